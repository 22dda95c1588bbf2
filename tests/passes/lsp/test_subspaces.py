"""Projectors while training runs: compared, fitted, installed once per step, and nothing lost on the way."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from graphopt.passes import Lsp
from graphopt.passes.lsp.projectors import Subspace, fit, unseen_energy
from graphopt.passes.lsp.subspaces import Subspaces
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import graphopt
from graphopt.errors import InputError
from tests import zoo
from tests.compressed import compressed_reference, data, made, train


def test_gradients_accumulate_and_projectors_stay_meanwhile() -> None:
    _, opt, optimizer = made(lsp={"check_every": 1})
    batches = data(2)
    train(opt, optimizer, batches[:1])
    weight = opt.states["lsp"].weights["second.weight"]
    opt(batches[0][0].double(), batches[0][1]).backward()
    first, subspace = weight.variable.grad.clone(), weight.subspace
    opt(batches[1][0].double(), batches[1][1]).backward()
    both = weight.variable.grad.clone()
    assert weight.subspace is subspace
    optimizer.zero_grad()
    opt(batches[1][0].double(), batches[1][1]).backward()
    torch.testing.assert_close(both, first + weight.variable.grad)


def test_projectors_are_compared_at_the_first_step_and_then_so_often(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr("graphopt.passes.lsp.subspaces.fit", lambda *a: seen.append(opt.states["lsp"].steps) or fit(*a))
    _, opt, optimizer = made(lsp={"check_every": 3, "threshold": 0.01, "iterations": 2})
    train(opt, optimizer, data(8))
    assert sorted(set(seen)) == [0, 3, 6]


def test_a_check_fits_to_several_batches_and_compares_with_one_that_they_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    fitted: list[tuple[int, Tensor]] = []

    def recording(start: Subspace, gradient: Tensor, *a: Any) -> Any:
        fitted.append((opt.states["lsp"].steps, gradient))
        return fit(start, gradient, *a)

    monkeypatch.setattr("graphopt.passes.lsp.subspaces.fit", recording)
    model, opt, optimizer = made(lsp={"check_every": 5, "batches": 3, "threshold": 1e-3, "iterations": 20})
    weight, references, latest = opt.states["lsp"].weights["second.weight"], [], []
    for batch in data(8):
        reference = copy.deepcopy(model)
        reference.zero_grad()
        reference(batch[0].double(), batch[1]).backward()
        references.append(reference.second.weight.grad)
        train(opt, optimizer, [batch])
        latest.append((weight.subspace.error(references[-1]), weight.error))
        assert weight.fits > 0  # drawn projectors are replaced at once
    steps = [step for step, gradient in fitted if gradient.shape == weight.shape]
    assert steps == [2, 2, 7, 7]  # from what was learned, and, as 2 does not divide 5, from a random support
    sums = [gradient for _, gradient in fitted if gradient.shape == weight.shape][::2]
    for found, expected in zip(sums, (sum(references[:2]), sum(references[5:7])), strict=True):
        torch.testing.assert_close(found / found.norm(), expected / expected.norm())
    for step in (0, *steps):
        assert latest[step][0] == pytest.approx(latest[step][1])
    assert weight.gathered is weight.moments is None


def test_a_check_of_one_batch_keeps_no_gradient_and_one_of_more_than_are_due_ends_in_time() -> None:
    _, opt, optimizer = made(lsp={"check_every": 2})
    train(opt, optimizer, data(1))
    assert all(w.gathered is None for w in opt.states["lsp"].weights.values())
    _, opt, optimizer = made(lsp={"check_every": 2, "batches": 5, "threshold": 1e-3, "iterations": 5})
    train(opt, optimizer, data(4))
    assert all(w.fits >= 2 and w.gathered is None for w in opt.states["lsp"].weights.values())


def test_gradients_that_are_not_finite_do_not_count_in_a_check() -> None:
    _, opt, optimizer = made(lsp={"check_every": 4, "batches": 3})
    (x, labels), *others = data(3)
    train(opt, optimizer, [(x, labels)])
    opt(x.double() * math.nan, labels).backward()
    optimizer.zero_grad()
    assert all(w.batches == 1 and bool(torch.isfinite(w.gathered).all()) for w in opt.states["lsp"].weights.values())
    train(opt, optimizer, others)
    assert all(w.batches == 0 and w.gathered is w.moments is None for w in opt.states["lsp"].weights.values())


def test_good_projectors_are_left_alone_and_bad_ones_fitted_only_if_that_helps() -> None:
    _, opt, optimizer = made(lsp={"check_every": 1, "threshold": 1e6})
    before = {name: w.subspace for name, w in opt.states["lsp"].weights.items()}
    train(opt, optimizer, data(2))
    assert all(w.subspace is before[name] and w.fits == 0 and w.error > 0 for name, w in opt.states["lsp"].weights.items())


def test_moments_move_with_the_projectors() -> None:
    model, opt, optimizer = made(lsp={"check_every": 2, "threshold": 1e-3, "iterations": 5})
    train(opt, optimizer, data(2))
    before = copy.deepcopy(optimizer.moments["second.weight"])
    subspace = opt.states["lsp"].weights["second.weight"].subspace
    reference = copy.deepcopy(model)
    reference(data(1)[0][0].double(), data(1)[0][1]).backward()
    opt(data(1)[0][0].double(), data(1)[0][1]).backward()
    after, new = optimizer.moments["second.weight"], opt.states["lsp"].weights["second.weight"].subspace
    assert new is not subspace
    left, right = new.left.dense().t() @ subspace.left.dense(), subspace.right.dense().t() @ new.right.dense()
    torch.testing.assert_close(after.first, left @ before.first @ right)
    carried = left.square() @ before.second @ right.square()
    unseen = unseen_energy(subspace, new, reference.second.weight.grad)
    assert float(unseen.sum()) > 0
    torch.testing.assert_close(after.second, carried + carried.sum() * unseen)
    assert after.step == before.step == 2


@pytest.mark.parametrize("backwards", ["one", "first to last", "last to first", "twice"])
def test_several_forwards_in_one_step_have_one_subspace(backwards: str) -> None:
    """Siamese models: whatever is fitted meanwhile is installed after the step."""
    model, opt, optimizer = made()
    (x, labels), (y, others) = [(a.double(), b) for a, b in data(2)]
    expected = compressed_reference(model, opt, lambda m: m(x, labels) + m(y, others))
    first = opt(x, labels)
    second = first if backwards == "twice" else opt(y, others)
    if backwards == "one":
        (first + second).backward()
    elif backwards == "twice":
        expected = {}
        first.backward(retain_graph=True)
        expected = {n: 2 * w.variable.grad for n, w in opt.states["lsp"].weights.items()}
        first.backward()
    else:
        for loss in (first, second) if backwards == "first to last" else (second, first):
            loss.backward()
    for name, w in opt.states["lsp"].weights.items():
        torch.testing.assert_close(w.variable.grad, expected[name])
    optimizer.step()
    assert all(w.error < 1 and w.next is None for w in opt.states["lsp"].weights.values())


def test_a_check_that_saw_no_finite_gradient_is_made_again() -> None:
    _, opt, optimizer = made()
    x, labels = data(1)[0]
    opt(x.double(), labels)  # a forward alone
    opt(x.double() * math.inf, labels).backward()
    optimizer.zero_grad()
    assert all(math.isnan(w.error) for w in opt.states["lsp"].weights.values())
    train(opt, optimizer, data(1))
    assert all(w.error < 1 for w in opt.states["lsp"].weights.values())


def test_a_weight_whose_gradient_overflowed_in_a_check_is_looked_at_again_alone() -> None:
    model, opt, optimizer = made(lsp={"iterations": 2})
    with torch.no_grad():
        model.first.weight.mul_(1e-200)
    x, labels = data(1)[0]
    (opt(x.double() * 1e200, labels) * 1e150).backward()
    optimizer.zero_grad()  # as where a scaler leaves the step out
    weights = opt.states["lsp"].weights
    assert math.isnan(weights["first.weight"].error)
    other, subspace = weights["second.weight"].error, weights["second.weight"].subspace
    assert other < 1
    train(opt, optimizer, data(2))
    assert weights["first.weight"].error < 1
    assert weights["first.weight"].fits == 1
    assert weights["second.weight"].error == other
    assert weights["second.weight"].subspace is subspace


@pytest.mark.parametrize("batches", [1, 3])
def test_a_gradient_of_zero_is_none_that_projectors_represent(batches: int) -> None:
    model, opt, optimizer = made(lsp={"batches": batches}, lr=0.0)
    with torch.no_grad():
        model.third.weight.zero_()
    weights = opt.states["lsp"].weights
    train(opt, optimizer, data(1))
    assert all(math.isnan(w.error) for w in weights.values())
    assert "projectors not compared yet, 0 fits" in str(opt.report)
    train(opt, optimizer, data(1))
    assert all(math.isnan(w.error) for w in weights.values())
    state = copy.deepcopy(optimizer.state_dict())
    with torch.no_grad():
        model.third.weight.copy_(torch.eye(3, 16))
    other = made(lsp={"batches": batches}, lr=0.0)
    other[0].load_state_dict(model.state_dict())
    other[2].load_state_dict(state)
    train(opt, optimizer, data(1))
    train(*other[1:], data(1))
    for name, w in weights.items():
        assert w.error < 1
        assert other[1].states["lsp"].weights[name].error == w.error


def test_weights_that_never_get_a_gradient_are_looked_at_ever_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    model, opt, optimizer = made(lsp={"check_every": 12}, lr=0.0)
    with torch.no_grad():
        model.third.weight.zero_()
    checked: list[int] = []
    due = Subspaces.due

    def noted(self: Subspaces, trained: Any) -> bool:
        checks = due(self, trained)
        checked.extend([self.steps] if checks else [])
        return checks

    monkeypatch.setattr(Subspaces, "due", noted)
    train(opt, optimizer, data(20))
    assert checked == [0, 1, 2, 4, 8, 12, 16]


def test_checks_that_are_not_compiled_end_as_others_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else every further step would be tried as a check, and none as an ordinary one."""
    _, opt, optimizer = made(torch.float64)

    def uncompiled(opt: Any, running: Any, plan: Any, args: Any, kwargs: Any) -> tuple[Any, bool]:
        return opt._fallback.run_model(opt, args, kwargs), False

    with monkeypatch.context() as patch:
        patch.setattr(opt._fallback, "compiled_or_not", uncompiled)
        train(opt, optimizer, data(3))
    train(opt, optimizer, data(1))
    assert opt.last_step is not None
    assert opt.last_step.graph.compressed


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_errors_do_not_depend_on_the_scale_of_the_loss(scale: float) -> None:
    _, opt, _ = made(torch.float32)
    x, labels = data(1)[0]
    (opt(x, labels) * scale).backward()
    assert all(0.1 < w.error < 1 for w in opt.states["lsp"].weights.values())


def test_copies_and_pickles_are_refused() -> None:
    _, opt, optimizer = made()
    with pytest.raises(InputError, match="copy the model itself"):
        copy.deepcopy(opt)
    with pytest.raises(InputError, match="state_dict"):
        copy.deepcopy(optimizer)
    for part in (optimizer, opt):
        with pytest.raises(InputError, match="cannot be pickled"):
            pickle.dumps(part)


def test_selecting_anew_leaves_the_optimizer_alone_and_deselected_weights_where_they_are() -> None:
    torch.manual_seed(0)
    model = zoo.MLP(width=16)
    rewrite = Lsp(subspace=5, nonzeros=2, criterion="flops")
    opt = graphopt.optimize(model, data(1)[0], budget=0.75, passes=["greentrainer", rewrite], backend="aot_eager")
    optimizer = opt.make_optimizer(torch.optim.AdamW, lr=1e-2)
    train(opt, optimizer, data(2))
    before, steps = copy.deepcopy(model.state_dict()), opt.states["lsp"].steps
    opt(*data(1)[0]).backward()
    opt.reselect(data(1)[0], optimizer)
    assert opt.states["lsp"].steps == steps
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_the_report_says_what_is_compressed() -> None:
    _, opt, optimizer = made()
    train(opt, optimizer, data(2))
    assert [w["layer"] for w in opt.report.sections["lsp"]["compressed"]] == ["second.weight", "first.weight"]
    assert "second.weight: " in str(opt.report)
    assert opt.report.left_alone["third.weight"] == "3 x 16 is smaller than subspace=5"
    assert "lsp: gradients projected" in opt.report.approximations


def test_complex_matrices_keep_their_gradient() -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 16)
            self.turn = nn.Parameter(0.2 * torch.randn(16, 16, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            return self.last((torch.tanh(self.first(x)).to(self.turn.dtype) @ self.turn).real).square().mean()

    model, x = Turned(), torch.randn(4, 8)
    model(x).backward()
    wanted, model.turn.grad = model.turn.grad, None
    opt = graphopt.optimize(model, (x,), passes=[Lsp(subspace=4, nonzeros=2)], backend="aot_eager")
    optimizer = opt.make_optimizer(torch.optim.AdamW)
    opt(x).backward()
    torch.testing.assert_close(model.turn.grad, wanted)
    optimizer.step()
    assert opt.report.left_alone["turn"].startswith("its numbers are complex")


def test_a_check_holds_one_full_gradient_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[int] = []
    seen: list[Any] = []
    check = Subspaces._check

    def counting(self: Subspaces, site: int, gradient: Tensor) -> Tensor:
        seen.append(StorageWeakRef(gradient.untyped_storage()))
        alive.append(sum(not s.expired() for s in seen))
        return check(self, site, gradient)

    monkeypatch.setattr(Subspaces, "_check", counting)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))
    x = torch.randn(4, 16)
    opt = graphopt.optimize(model, (x,), passes=[Lsp(subspace=4, nonzeros=2, criterion="flops")], backend="aot_eager")
    optimizer = opt.make_optimizer(torch.optim.AdamW, lr=1e-3)
    opt(x).sum().backward()
    del optimizer
    assert len(alive) == 6
    assert max(alive) <= 2  # the one before may live until its own node has returned


def test_a_budget_below_the_weights_names_the_smallest_that_is_feasible() -> None:
    rewrite = Lsp(subspace=5, nonzeros=2, criterion="flops")
    with pytest.raises(graphopt.BudgetError, match=r"Smallest feasible with these passes: [\d,]+"):
        graphopt.optimize(
            zoo.MLP(width=16), data(1)[0], budget=graphopt.Budget(memory=100), passes=[rewrite], backend="aot_eager"
        )


class Sometimes(nn.Module):
    """A weight whose gradient is a product in some calls, and something else in others."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, penalty: bool = False) -> Tensor:
        loss = self.layer(x).square().mean()
        return loss + self.layer.weight.pow(4).sum() if penalty else loss


def test_a_call_that_computes_a_gradient_in_another_way_compresses_it_too() -> None:
    torch.manual_seed(0)
    model = Sometimes().double()
    x = torch.randn(4, 8, dtype=torch.float64)
    opt = graphopt.optimize(model, (x,), passes=[Lsp(subspace=4, nonzeros=2, criterion="flops")], backend="aot_eager")
    optimizer = opt.make_optimizer(torch.optim.AdamW, lr=1e-2)
    opt(x).backward()
    optimizer.step()
    optimizer.zero_grad()
    expected = compressed_reference(model, opt, lambda m: m(x, True))
    opt(x, True).backward()
    torch.testing.assert_close(opt.states["lsp"].weights["layer.weight"].variable.grad, expected["layer.weight"])


def test_a_batch_that_is_not_finite_changes_no_projector() -> None:
    _, opt, optimizer = made()
    x, labels = data(1)[0]
    opt(x.double() * math.nan, labels).backward()
    optimizer.step()
    assert set(optimizer.skipped) == set(opt.states["lsp"].weights)
    assert all(w.fits == 0 for w in opt.states["lsp"].weights.values())


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("rows", lambda t: t.double()),
        ("rows", lambda t: t.clamp(min=1)),
        ("rows", lambda t: t[:-1]),
        ("sums", lambda t: t.to(torch.int64)),
        ("sums", lambda t: t * math.nan),
        ("sums", lambda t: t[:, :-1]),
        ("sharing", lambda n: n + 1),
    ],
)
def test_gathered_moments_of_other_weights_are_refused(field: str, change: Any) -> None:
    _, opt, optimizer = made(lsp={"check_every": 5, "batches": 3})
    train(opt, optimizer, data(1))
    state = opt.states["lsp"].snapshot()
    opt.states["lsp"].prepare(copy.deepcopy(state))
    left = state["weights"]["second.weight"]["moments"]["left"]
    left[field] = change(left[field])
    with pytest.raises(InputError, match=r"gradients of second.weight that a check under way"):
        opt.states["lsp"].prepare(state)

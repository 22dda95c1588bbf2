"""Training with compressed gradients: Adam in the subspace, projectors that are fitted, and nothing lost on the way."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from graphopt.passes import Lsp
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import graphopt
from graphopt.errors import GraphoptError, InputError
from graphopt.projectors import Projector, Subspace, fit
from graphopt.runtime.host_adam import Moments, adam_direction
from graphopt.runtime.subspace_optimizer import SubspaceOptimizer
from graphopt.runtime.subspaces import Subspaces
from tests import zoo


def data(count: int, size: int = 6) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(size, 5, generator=generator), torch.arange(size) % 3) for _ in range(count)]


def made(dtype: torch.dtype = torch.float64, make: Any = torch.optim.AdamW, **options: Any) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model = zoo.MLP(width=16).to(dtype)
    rewrite = Lsp(**{"subspace": 5, "nonzeros": 2, "criterion": "flops", **options.pop("lsp", {})})
    batch = (data(1)[0][0].to(dtype), data(1)[0][1])
    opt = graphopt.optimize(model, batch, passes=[rewrite], backend="aot_eager")
    return model, opt, opt.make_optimizer(make, **{"lr": 1e-2, **options})


def train(opt: Any, optimizer: Any, batches: list[tuple[Tensor, Tensor]]) -> list[float]:
    losses = []
    for x, labels in batches:
        loss = opt(x.to(next(opt.parameters()).dtype), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


def test_the_loop_of_the_readme_learns() -> None:
    _, opt, optimizer = made(torch.float32, lr=1e-2)
    losses = train(opt, optimizer, data(1) * 60)
    assert losses[-1] < 0.5 * losses[0]
    assert set(opt.subspaces.weights) == {"first.weight", "second.weight"}
    assert all(w.error < 1 for w in opt.subspaces.weights.values())


def test_with_permutations_as_projectors_it_is_adamw() -> None:
    """P5: s = m = n, P and Q permutations: every update is that of full AdamW."""
    model, opt, optimizer = made(lsp={"subspace": 16, "nonzeros": 1}, weight_decay=0.1)
    reference = copy.deepcopy(model)
    full = torch.optim.AdamW(reference.parameters(), lr=1e-2, weight_decay=0.1)
    weight = opt.subspaces.weights["second.weight"]
    ones = torch.ones(16, 1, dtype=torch.float64)
    left, right = (Projector(torch.randperm(16).view(16, 1).to(torch.int32), ones, 16) for _ in range(2))
    weight.install(Subspace(left, right))
    for x, labels in data(5):
        opt(x.double(), labels).backward()
        reference(x.double(), labels).backward()
        optimizer.step()
        full.step()
        optimizer.zero_grad()
        full.zero_grad()
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_a_step_is_the_one_of_the_paper() -> None:
    """W <- (1 - lr decay) W - lr P u Q', with u of torch's own Adam on P'GQ."""
    model, opt, optimizer = made(weight_decay=0.2)
    reference = copy.deepcopy(model)
    x, labels = data(1)[0]
    opt(x.double(), labels).backward()
    reference(x.double(), labels).backward()
    weight = opt.subspaces.weights["second.weight"]
    variable = torch.zeros(5, 5, dtype=torch.float64, requires_grad=True)
    gradient = dict(reference.named_parameters())["second.weight"].grad
    variable.grad = weight.subspace.left.dense().t() @ gradient @ weight.subspace.right.dense()
    torch.optim.Adam([variable], lr=1e-2).step()
    expected = (
        1 - 0.2e-2
    ) * reference.second.weight + weight.subspace.left.dense() @ variable @ weight.subspace.right.dense().t()
    optimizer.step()
    torch.testing.assert_close(model.second.weight, expected)


def test_gradients_accumulate_and_projectors_stay_meanwhile() -> None:
    _, opt, optimizer = made(lsp={"check_every": 1})
    batches = data(2)
    train(opt, optimizer, batches[:1])
    weight = opt.subspaces.weights["second.weight"]
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
    monkeypatch.setattr("graphopt.runtime.subspaces.fit", lambda *a: seen.append(opt.subspaces.steps) or fit(*a))
    _, opt, optimizer = made(lsp={"check_every": 3, "threshold": 0.01, "iterations": 2})
    train(opt, optimizer, data(8))
    assert sorted(set(seen)) == [0, 3, 6]


def test_good_projectors_are_left_alone_and_bad_ones_fitted_only_if_that_helps() -> None:
    _, opt, optimizer = made(lsp={"check_every": 1, "threshold": 1e6})
    before = {name: w.subspace for name, w in opt.subspaces.weights.items()}
    train(opt, optimizer, data(2))
    assert all(w.subspace is before[name] and w.fits == 0 and w.error > 0 for name, w in opt.subspaces.weights.items())


def test_moments_move_with_the_projectors() -> None:
    _, opt, optimizer = made(lsp={"check_every": 2, "threshold": 1e-3, "iterations": 5})
    train(opt, optimizer, data(2))
    before = copy.deepcopy(optimizer.moments["second.weight"])
    subspace = opt.subspaces.weights["second.weight"].subspace
    opt(data(1)[0][0].double(), data(1)[0][1]).backward()
    after, new = optimizer.moments["second.weight"], opt.subspaces.weights["second.weight"].subspace
    assert new is not subspace
    left, right = new.left.dense().t() @ subspace.left.dense(), subspace.right.dense().t() @ new.right.dense()
    torch.testing.assert_close(after.first, left @ before.first @ right)
    assert after.step == before.step == 2


def compressed_reference(model: nn.Module, opt: Any, total: Any) -> dict[str, Tensor]:
    """P'GQ of eager's gradients, with the projectors in force."""
    reference = copy.deepcopy(model)
    reference.zero_grad()
    total(reference).backward()
    weights = dict(reference.named_parameters())
    return {name: w.subspace.compress(weights[name].grad) for name, w in opt.subspaces.weights.items()}


@pytest.mark.parametrize("backwards", ["one", "first to last", "last to first", "twice"])
def test_several_forwards_in_one_step_have_one_subspace(backwards: str) -> None:
    """Siamese models: whatever is fitted meanwhile comes into force after the step."""
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
        expected = {n: 2 * w.variable.grad for n, w in opt.subspaces.weights.items()}
        first.backward()
    else:
        for loss in (first, second) if backwards == "first to last" else (second, first):
            loss.backward()
    for name, w in opt.subspaces.weights.items():
        torch.testing.assert_close(w.variable.grad, expected[name])
    optimizer.step()
    assert all(w.error < 1 and w.next is None for w in opt.subspaces.weights.values())


def test_clearing_gradients_on_the_model_clears_compressed_ones() -> None:
    model, opt, _ = made()
    x, labels = data(1)[0]
    clears = [lambda: opt.zero_grad(), lambda: model.zero_grad(), lambda: opt.zero_grad(set_to_none=False)]
    opt(x.double(), labels).backward()
    opt.zero_grad()
    for clear in clears:
        opt(x.double(), labels).backward()
        for name, wanted in compressed_reference(model, opt, lambda m: m(x.double(), labels)).items():
            torch.testing.assert_close(opt.subspaces.weights[name].variable.grad, wanted)
        clear()


def test_a_penalty_on_a_weight_itself_counts() -> None:
    model, opt, optimizer = made()
    x, labels = data(1)[0]
    train(opt, optimizer, data(1))
    expected = compressed_reference(model, opt, lambda m: m(x.double(), labels) + m.second.weight.square().sum())
    (opt(x.double(), labels) + model.second.weight.square().sum()).backward()
    torch.testing.assert_close(opt.subspaces.weights["second.weight"].variable.grad, expected["second.weight"])
    assert model.second.weight.grad is None
    model.eval()
    optimizer.zero_grad()
    model(x.double(), labels).backward()
    expected = compressed_reference(model, opt, lambda m: m(x.double(), labels))
    torch.testing.assert_close(opt.subspaces.weights["second.weight"].variable.grad, expected["second.weight"])


def test_a_check_that_saw_no_finite_gradient_is_made_again() -> None:
    _, opt, optimizer = made()
    x, labels = data(1)[0]
    opt(x.double(), labels)  # a forward alone
    opt(x.double() * math.inf, labels).backward()
    optimizer.zero_grad()
    assert all(math.isnan(w.error) for w in opt.subspaces.weights.values())
    train(opt, optimizer, data(1))
    assert all(w.error < 1 for w in opt.subspaces.weights.values())


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_errors_do_not_depend_on_the_scale_of_the_loss(scale: float) -> None:
    _, opt, _ = made(torch.float32)
    x, labels = data(1)[0]
    (opt(x, labels) * scale).backward()
    assert all(0.1 < w.error < 1 for w in opt.subspaces.weights.values())


def test_weights_that_no_optimizer_steps_get_no_gradient() -> None:
    torch.manual_seed(0)
    model = zoo.MLP(width=16)
    opt = graphopt.optimize(model, data(1)[0], passes=[Lsp(subspace=5, nonzeros=2, criterion="flops")], backend="aot_eager")
    optimizer = opt.make_optimizer(torch.optim.AdamW, [model.second.weight], lr=1e-2)
    before = copy.deepcopy(model.state_dict())
    train(opt, optimizer, data(2))
    assert {k for k, v in model.state_dict().items() if not torch.equal(v, before[k])} == {"second.weight"}
    assert opt.subspaces.weights["first.weight"].variable.grad is None
    optimizer.add_param_group({"params": [model.first.weight]})
    train(opt, optimizer, data(2))
    assert not torch.equal(model.first.weight, before["first.weight"])
    assert math.isfinite(opt.subspaces.weights["first.weight"].error)


def test_copies_and_pickles_are_refused() -> None:
    _, opt, optimizer = made()
    with pytest.raises(InputError, match="copy the model itself"):
        copy.deepcopy(opt)
    with pytest.raises(InputError, match="state_dict"):
        copy.deepcopy(optimizer)
    with pytest.raises(InputError, match="cannot be pickled"):
        pickle.dumps(optimizer)


def test_selecting_anew_leaves_the_optimizer_alone_and_deselected_weights_where_they_are() -> None:
    torch.manual_seed(0)
    model = zoo.MLP(width=16)
    rewrite = Lsp(subspace=5, nonzeros=2, criterion="flops")
    opt = graphopt.optimize(model, data(1)[0], budget=0.75, passes=["greentrainer", rewrite], backend="aot_eager")
    optimizer = opt.make_optimizer(torch.optim.AdamW, lr=1e-2)
    train(opt, optimizer, data(2))
    before, steps = copy.deepcopy(model.state_dict()), opt.subspaces.steps
    opt(*data(1)[0]).backward()
    opt.reselect(data(1)[0], optimizer)
    assert opt.subspaces.steps == steps
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_the_report_says_what_is_compressed() -> None:
    _, opt, optimizer = made()
    train(opt, optimizer, data(2))
    assert [w["layer"] for w in opt.report.compressed] == ["second.weight", "first.weight"]
    assert "second.weight: " in str(opt.report)
    assert opt.report.left_alone["third.weight"] == "3 x 16 is smaller than subspace=5"
    assert "lsp: gradients projected" in opt.report.approximations


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
    opt.make_optimizer(torch.optim.AdamW, lr=1e-3)
    opt(x).sum().backward()
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
    torch.testing.assert_close(opt.subspaces.weights["layer.weight"].variable.grad, expected["layer.weight"])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_skips_that_weight_only(bad: float) -> None:
    model, opt, optimizer = made()
    train(opt, optimizer, data(1))
    before = copy.deepcopy(model.state_dict())
    opt(data(1)[0][0].double(), data(1)[0][1]).backward()
    opt.subspaces.weights["first.weight"].variable.grad[0, 0] = bad
    optimizer.step()
    assert torch.equal(model.first.weight, before["first.weight"])
    assert not torch.equal(model.second.weight, before["second.weight"])
    assert optimizer.skipped == {"first.weight": 1}
    assert "1 steps skipped: its gradient was not finite" in str(opt.report)
    assert bool(torch.isfinite(optimizer.moments["first.weight"].first).all())


def test_a_batch_that_is_not_finite_changes_no_projector() -> None:
    _, opt, optimizer = made()
    x, labels = data(1)[0]
    opt(x.double() * math.nan, labels).backward()
    optimizer.step()
    assert set(optimizer.skipped) == set(opt.subspaces.weights)
    assert all(w.fits == 0 for w in opt.subspaces.weights.values())


def test_a_failing_host_update_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, opt, optimizer = made()
    train(opt, optimizer, data(1))
    opt(data(1)[0][0].double(), data(1)[0][1]).backward()
    before, moments = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.moments)
    calls = []

    def failing(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("boom")
        return adam_direction(*args)

    monkeypatch.setattr("graphopt.runtime.subspace_optimizer.adam_direction", failing)
    with pytest.raises(GraphoptError, match=r"of \w+.weight on the host failed, and no weight was changed: boom"):
        optimizer.step()
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(torch.equal(m.first, moments[name].first) and m.step == 1 for name, m in optimizer.moments.items())
    monkeypatch.undo()
    optimizer.step()


def test_schedulers_scalers_and_clipping_see_compressed_gradients() -> None:
    model, opt, optimizer = made()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    opt(data(1)[0][0].double(), data(1)[0][1]).backward()
    norm = torch.nn.utils.clip_grad_norm_(optimizer.parameters(), 1e-3)
    assert float(norm) > 1e-3
    clipped = torch.stack([p.grad.norm() for p in optimizer.parameters()]).norm()
    torch.testing.assert_close(clipped, torch.tensor(1e-3, dtype=torch.float64))
    optimizer.step()
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-3)
    before = model.second.weight.clone()
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    train_scaled = scaler.scale(opt(data(1)[0][0].double(), data(1)[0][1]))
    optimizer.zero_grad()
    train_scaled.backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert float((model.second.weight - before).abs().max()) > 0


def test_groups_may_differ_in_rate_and_decay() -> None:
    torch.manual_seed(0)
    model = zoo.MLP(width=16)
    opt = graphopt.optimize(model, data(1)[0], passes=[Lsp(subspace=5, nonzeros=2, criterion="flops")], backend="aot_eager")
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() == 1]
    optimizer = opt.make_optimizer(torch.optim.AdamW, [{"params": matrices, "lr": 0.0}, {"params": others}], lr=1e-2)
    before = copy.deepcopy(model.state_dict())
    train(opt, optimizer, data(2))
    assert all(torch.equal(v, before[k]) == k.endswith("weight") for k, v in model.state_dict().items())


def test_a_checkpoint_goes_on_as_if_nothing_had_happened() -> None:
    options = {"check_every": 4, "threshold": 0.3, "iterations": 3}
    model, opt, optimizer = made(lsp=options)
    train(opt, optimizer, data(6)[:3])
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    expected = train(opt, optimizer, data(6)[3:])
    again, other, second = made(lsp=options)
    again.load_state_dict(saved[0])
    second.load_state_dict(saved[1])
    assert train(other, second, data(6)[3:]) == expected


def test_states_of_others_are_refused() -> None:
    _, _, optimizer = made()
    state = optimizer.state_dict()
    _, _, larger = made(lsp={"subspace": 4})
    with pytest.raises(InputError, match=r"has subspace 5 for .*, this model 4"):
        larger.load_state_dict(state)
    _, _, denser = made(lsp={"nonzeros": 1})
    with pytest.raises(InputError, match=r"left nonzeros 2 for .*, this model 1"):
        denser.load_state_dict(state)
    with pytest.raises(InputError, match="no 'subspaces'"):
        optimizer.load_state_dict(optimizer.inner.state_dict())
    weights = {k: v for k, v in state["subspaces"]["weights"].items() if k != "first.weight"}
    broken = {**state, "subspaces": {**state["subspaces"], "weights": weights}}
    with pytest.raises(InputError, match=r"first\.weight"):
        optimizer.load_state_dict(broken)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (torch.optim.SGD, {}, "SGD is neither"),
        (type("Own", (torch.optim.AdamW,), {}), {}, "Own is neither"),
        (torch.optim.AdamW, {"amsgrad": True}, "amsgrad=True"),
        (torch.optim.AdamW, {"maximize": True}, "maximize=True"),
        (torch.optim.Adam, {"weight_decay": 0.1}, "use torch.optim.AdamW"),
    ],
)
def test_optimizers_that_the_host_lacks_are_refused(make: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        made(make=make, **options)


def test_an_ordinary_optimizer_is_refused_before_it_trains_nothing() -> None:
    model = zoo.MLP(width=16)
    opt = graphopt.optimize(model, data(1)[0], passes=[Lsp(subspace=5, nonzeros=2, criterion="flops")], backend="aot_eager")
    torch.optim.AdamW(model.parameters())
    with pytest.raises(GraphoptError, match="make_optimizer"):
        opt(*data(1)[0])


def test_without_compression_it_is_the_optimizer_that_was_asked_for() -> None:
    model = zoo.MLP()
    opt = graphopt.optimize(model, data(1)[0], backend="aot_eager")
    assert type(opt.make_optimizer(torch.optim.SGD, lr=0.1)) is torch.optim.SGD


def test_the_host_update_is_torchs() -> None:
    variable = nn.Parameter(torch.zeros(4, 4))
    reference = torch.optim.Adam([variable], lr=1.0, betas=(0.8, 0.95), eps=1e-6)
    moments = Moments(torch.zeros(4, 4), torch.zeros(4, 4))
    for _ in range(4):
        variable.grad, before = torch.randn(4, 4), variable.detach().clone()
        reference.step()
        direction, moments = adam_direction(variable.grad, moments, (0.8, 0.95), 1e-6)
        torch.testing.assert_close(before - direction, variable.detach(), rtol=1e-5, atol=1e-6)


def test_it_is_a_torch_optimizer() -> None:
    _, _, optimizer = made()
    assert isinstance(optimizer, SubspaceOptimizer)
    assert isinstance(optimizer, torch.optim.Optimizer)
    closure_losses = []
    optimizer.step(lambda: closure_losses.append(1.0) or 1.0)
    assert closure_losses == [1.0]

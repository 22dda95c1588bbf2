"""Training with compressed gradients: Adam in the subspace, projectors that are fitted, and nothing lost on the way."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from graphopt.passes import Lsp
from torch import Tensor, nn

import graphopt
from graphopt.errors import GraphoptError, InputError
from graphopt.projectors import Projector, Subspace, fit
from graphopt.runtime.subspace_optimizer import Moments, SubspaceOptimizer, adam_direction
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
    first, fits = weight.variable.grad.clone(), weight.fits
    opt(batches[1][0].double(), batches[1][1]).backward()
    both = weight.variable.grad.clone()
    assert weight.fits == fits
    optimizer.zero_grad()
    opt.subspaces.start_check()
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


def test_a_backward_whose_projectors_have_changed_is_an_error_and_not_a_wrong_gradient() -> None:
    _, opt, optimizer = made(lsp={"check_every": 1, "threshold": 1e-3})
    train(opt, optimizer, data(1))
    (x, labels), (y, others) = data(2)
    opt.subspaces.start_check()
    old = opt(x.double(), labels)
    opt.subspaces._checked_at = -1
    opt(y.double(), others).backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        old.backward()


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
    with pytest.raises(InputError, match=r"with a subspace of 4, but .* with one of 5"):
        larger.load_state_dict(state)
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

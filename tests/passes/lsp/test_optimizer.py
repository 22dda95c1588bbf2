"""Adam in the subspace: what a step does, what an ordinary optimizer would do alike, and what is refused."""

from __future__ import annotations

import copy
import gc
import math
from typing import Any

import pytest
import torch
from graphopt.passes import Lsp
from graphopt.passes.lsp.host_adam import Moments, adam_direction
from graphopt.passes.lsp.optimizer import SubspaceOptimizer
from graphopt.passes.lsp.projectors import Projector, Subspace
from torch import nn

import graphopt
from graphopt.errors import GraphoptError, InputError
from tests import zoo
from tests.compressed import compressed_reference, data, made, train


def test_the_loop_of_the_readme_learns() -> None:
    _, opt, optimizer = made(torch.float32, lr=1e-2)
    losses = train(opt, optimizer, data(1) * 60)
    assert losses[-1] < 0.5 * losses[0]
    assert set(opt.states["lsp"].weights) == {"first.weight", "second.weight"}
    assert all(w.error < 1 for w in opt.states["lsp"].weights.values())


def test_with_permutations_as_projectors_it_is_adamw() -> None:
    """P5: s = m = n, P and Q permutations: every update is that of full AdamW."""
    model, opt, optimizer = made(lsp={"subspace": 16, "nonzeros": 1}, weight_decay=0.1)
    reference = copy.deepcopy(model)
    full = torch.optim.AdamW(reference.parameters(), lr=1e-2, weight_decay=0.1)
    weight = opt.states["lsp"].weights["second.weight"]
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
    weight = opt.states["lsp"].weights["second.weight"]
    variable = torch.zeros(5, 5, dtype=torch.float64, requires_grad=True)
    gradient = dict(reference.named_parameters())["second.weight"].grad
    variable.grad = weight.subspace.left.dense().t() @ gradient @ weight.subspace.right.dense()
    torch.optim.Adam([variable], lr=1e-2).step()
    expected = (
        1 - 0.2e-2
    ) * reference.second.weight + weight.subspace.left.dense() @ variable @ weight.subspace.right.dense().t()
    optimizer.step()
    torch.testing.assert_close(model.second.weight, expected)


def test_clearing_gradients_on_the_model_clears_compressed_ones() -> None:
    model, opt, _ = made()
    x, labels = data(1)[0]
    clears = [lambda: opt.zero_grad(), lambda: model.zero_grad(), lambda: opt.zero_grad(set_to_none=False)]
    opt(x.double(), labels).backward()
    opt.zero_grad()
    for clear in clears:
        opt(x.double(), labels).backward()
        for name, wanted in compressed_reference(model, opt, lambda m: m(x.double(), labels)).items():
            torch.testing.assert_close(opt.states["lsp"].weights[name].variable.grad, wanted)
        clear()


def test_a_penalty_on_a_weight_itself_counts() -> None:
    model, opt, optimizer = made()
    x, labels = data(1)[0]
    train(opt, optimizer, data(1))
    expected = compressed_reference(model, opt, lambda m: m(x.double(), labels) + m.second.weight.square().sum())
    (opt(x.double(), labels) + model.second.weight.square().sum()).backward()
    torch.testing.assert_close(opt.states["lsp"].weights["second.weight"].variable.grad, expected["second.weight"])
    assert model.second.weight.grad is None
    model.eval()
    optimizer.zero_grad()
    model(x.double(), labels).backward()
    expected = compressed_reference(model, opt, lambda m: m(x.double(), labels))
    torch.testing.assert_close(opt.states["lsp"].weights["second.weight"].variable.grad, expected["second.weight"])


def test_weights_that_no_optimizer_steps_get_no_gradient() -> None:
    torch.manual_seed(0)
    model = zoo.MLP(width=16)
    opt = graphopt.optimize(model, data(1)[0], passes=[Lsp(subspace=5, nonzeros=2, criterion="flops")], backend="aot_eager")
    optimizer = opt.make_optimizer(torch.optim.AdamW, [model.second.weight], lr=1e-2)
    before = copy.deepcopy(model.state_dict())
    train(opt, optimizer, data(2))
    assert {k for k, v in model.state_dict().items() if not torch.equal(v, before[k])} == {"second.weight"}
    assert opt.states["lsp"].weights["first.weight"].variable.grad is None
    optimizer.add_param_group({"params": [model.first.weight]})
    train(opt, optimizer, data(2))
    assert not torch.equal(model.first.weight, before["first.weight"])
    assert math.isfinite(opt.states["lsp"].weights["first.weight"].error)


def test_a_weight_that_is_frozen_meanwhile_is_trained_later() -> None:
    torch.manual_seed(0)
    model = zoo.MLP(width=16)
    opt = graphopt.optimize(model, data(1)[0], passes=[Lsp(subspace=5, nonzeros=2, criterion="flops")], backend="aot_eager")
    model.first.requires_grad_(False)
    optimizer = opt.make_optimizer(torch.optim.AdamW, list(model.parameters()), lr=1e-2)
    assert not model.first.weight.requires_grad
    before = copy.deepcopy(model.state_dict())
    train(opt, optimizer, data(2))
    assert torch.equal(model.first.weight, before["first.weight"])
    assert not torch.equal(model.second.weight, before["second.weight"])
    model.first.requires_grad_(True)
    train(opt, optimizer, data(2))
    assert not torch.equal(model.first.weight, before["first.weight"])
    assert model.first.weight.grad is None


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_skips_that_weight_only(bad: float) -> None:
    model, opt, optimizer = made()
    train(opt, optimizer, data(1))
    before = copy.deepcopy(model.state_dict())
    opt(data(1)[0][0].double(), data(1)[0][1]).backward()
    opt.states["lsp"].weights["first.weight"].variable.grad[0, 0] = bad
    optimizer.step()
    assert torch.equal(model.first.weight, before["first.weight"])
    assert not torch.equal(model.second.weight, before["second.weight"])
    assert optimizer.skipped == {"first.weight": 1}
    assert "1 steps skipped: its gradient was not finite" in str(opt.report)
    assert bool(torch.isfinite(optimizer.moments["first.weight"].first).all())


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

    monkeypatch.setattr("graphopt.passes.lsp.optimizer.adam_direction", failing)
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


@pytest.mark.parametrize(("batches", "nonzeros"), [(1, 2), (3, 2), (3, 5)])
def test_a_checkpoint_goes_on_as_if_nothing_had_happened(batches: int, nonzeros: int) -> None:
    """With three batches, it is made in the middle of a check."""
    options = {"nonzeros": nonzeros, "check_every": 4, "batches": batches, "threshold": 0.3, "iterations": 3}
    model, opt, optimizer = made(lsp=options)
    train(opt, optimizer, data(8)[:5])
    assert (opt.states["lsp"].weights["first.weight"].gathered is not None) == (batches == 3)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    expected = train(opt, optimizer, data(8)[5:])
    again, other, second = made(lsp=options)
    again.load_state_dict(saved[0])
    second.load_state_dict(saved[1])
    assert train(other, second, data(8)[5:]) == expected


def test_states_of_others_are_refused() -> None:
    _, _, optimizer = made()
    state = optimizer.state_dict()
    _, _, larger = made(lsp={"subspace": 4})
    with pytest.raises(InputError, match=r"has subspace=5, this model 4"):
        larger.load_state_dict(state)
    _, _, denser = made(lsp={"nonzeros": 1})
    with pytest.raises(InputError, match=r"left projector of .* with \(\d+, 2\) entries, this model one with \(\d+, 1\)"):
        denser.load_state_dict(state)
    with pytest.raises(InputError, match="no .lsp."):
        optimizer.load_state_dict(optimizer.inner.state_dict())
    weights = {k: v for k, v in state["lsp"]["weights"].items() if k != "first.weight"}
    broken = {**state, "lsp": {**state["lsp"], "weights": weights}}
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


def test_a_group_that_is_refused_is_not_added() -> None:
    _, opt, _ = made()
    parameters = dict(opt.named_parameters())
    optimizer = opt.make_optimizer(torch.optim.AdamW, [parameters["first.weight"]], lr=1e-2)
    groups = len(optimizer.param_groups)
    with pytest.raises(InputError, match="amsgrad"):
        optimizer.add_param_group({"params": [parameters["second.weight"]], "amsgrad": True})
    assert len(optimizer.param_groups) == len(optimizer.inner.param_groups) == groups
    optimizer.add_param_group({"params": [parameters["second.weight"]]})
    train(opt, optimizer, data(1))


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


def test_hooks_on_its_state_are_called() -> None:
    _, opt, optimizer = made()
    train(opt, optimizer, data(2))
    called: list[Any] = []

    def without_mark(loaded: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        called.append((loaded, state["mark"]))
        return {name: value for name, value in state.items() if name != "mark"}

    optimizer.register_state_dict_pre_hook(lambda saved: called.append((saved, "before")))
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "mark": "set"})
    optimizer.register_load_state_dict_pre_hook(without_mark)
    optimizer.register_load_state_dict_post_hook(lambda loaded: called.append((loaded, "after")))
    state = optimizer.state_dict()
    assert {"param_groups", "lsp", "moments", "mark"} <= set(state)
    optimizer.load_state_dict(state)
    assert [what for _, what in called] == ["before", "set", "after"]
    assert all(which is optimizer for which, _ in called)
    assert state["mark"] == "set"


def test_it_is_a_torch_optimizer() -> None:
    _, _, optimizer = made()
    assert isinstance(optimizer, SubspaceOptimizer)
    assert isinstance(optimizer, torch.optim.Optimizer)
    closure_losses = []
    optimizer.step(lambda: closure_losses.append(1.0) or 1.0)
    assert closure_losses == [1.0]


@pytest.mark.parametrize("schedule", ["sequential", "layerwise"])
def test_a_dropped_optimizer_leaves_gradients_alone_at_once(schedule: str) -> None:
    """Not only when Python collects garbage: the model may be trained in another way by then."""
    gc.disable()
    try:
        model, opt, optimizer = made(lsp={"schedule": schedule})
        x, labels = data(1)[0]
        opt(x.double(), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        del opt, optimizer
        model.zero_grad()
        model(x.double(), labels).backward()
        assert all(p.grad is not None for p in model.parameters())
    finally:
        gc.enable()

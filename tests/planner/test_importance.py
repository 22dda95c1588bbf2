import copy
import logging

import pytest
import torch
from torch import nn

import graphopt
from graphopt import ImportanceError
from graphopt.calls import as_call
from graphopt.planner.gradient_norms import gradient_norms
from graphopt.planner.importance import Importance, measure_importance, next_update
from tests import zoo
from tests.rules import MEASURED

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
}


def trained(name: str, optimizer_name: str, steps: int = 2):  # type: ignore[no-untyped-def]
    model, inputs = zoo.make(name, 4)
    optimizer = OPTIMIZERS[optimizer_name](list(model.parameters()))
    for _ in range(steps):
        zoo.loss_of(zoo.call(model, inputs)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, inputs, optimizer


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
@pytest.mark.parametrize("steps", [0, 2])
def test_update_is_what_the_optimizer_then_does(name: str, steps: int) -> None:
    model, inputs, optimizer = trained("mlp", name, steps)
    zoo.loss_of(zoo.call(model, inputs)).backward()
    predicted = {n: next_update(optimizer, optimizer.param_groups[0], p, p.grad) for n, p in model.named_parameters()}
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer.step()
    for n, p in model.named_parameters():
        torch.testing.assert_close(predicted[n], p.detach() - before[n], rtol=1e-4, atol=1e-6)


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer):  # type: ignore[no-untyped-def]
    return copy.deepcopy((
        model.state_dict(), optimizer.state_dict(), [p.grad for p in model.parameters()], torch.get_rng_state(),
        [p._version for p in model.parameters()],
    ))  # fmt: skip


def equal(a, b) -> bool:  # type: ignore[no-untyped-def]
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


@pytest.mark.parametrize("name", ["cnn", "bert"])
@pytest.mark.parametrize("steps", [0, 2])
def test_nothing_of_the_callers_changes(name: str, steps: int) -> None:
    model, inputs = zoo.make(name, 4, dropout=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    for _ in range(steps):
        zoo.loss_of(zoo.call(model, inputs)).backward()
        optimizer.step()
        scheduler.step()
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    before = snapshot(model, optimizer)
    names = [n for n, _ in model.named_parameters()]
    measure_importance(model, *as_call(inputs), names, optimizer)
    assert equal(before, snapshot(model, optimizer))


def test_plain_sgd_rates_by_squared_gradient() -> None:
    model, inputs = zoo.make("mlp", 4, torch.float64)
    names = [n for n, _ in model.named_parameters()]
    by_default = measure_importance(model, inputs, {}, names)
    by_optimizer = measure_importance(model, inputs, {}, names[::-1], torch.optim.SGD(model.parameters(), lr=0.3))
    model(*inputs).backward()
    squares = {n: float(p.grad.square().sum()) for n, p in model.named_parameters()}
    for n in names:
        assert by_default.values[n] == pytest.approx(squares[n] / max(squares.values()))
        assert by_optimizer.values[n] == pytest.approx(by_default.values[n])
        assert by_default.values[n] >= 0


def test_half_precision_steps_that_round_to_nothing_still_count() -> None:
    model, inputs = zoo.make("mlp", 4, torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    importance = measure_importance(model, inputs, {}, [n for n, _ in model.named_parameters()], optimizer)
    assert max(importance.values.values()) == 1.0


def test_tensors_that_the_optimizer_does_not_hold_are_worthless() -> None:
    model, inputs = zoo.make("mlp", 4)
    optimizer = torch.optim.SGD(model.third.parameters(), lr=0.1)
    importance = measure_importance(model, inputs, {}, [n for n, _ in model.named_parameters()], optimizer)
    assert {n for n, v in importance.values.items() if v > 0} == {"third.weight", "third.bias"}


def test_a_model_without_a_loss_is_probed_and_the_report_says_so() -> None:
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    x = torch.randn(4, 5)
    probed = graphopt.optimize(model, (x,), budget=0.7, passes=MEASURED, backend="aot_eager")
    assert "sensitivity" in probed.report.importance
    given = graphopt.optimize(model, (x,), 0.7, MEASURED, loss=lambda y: y.square().mean(), backend="aot_eager")
    assert "given loss" in given.report.importance


def test_infinite_importance_is_an_error_at_first_and_a_warning_later() -> None:
    model, (x, labels) = zoo.make("mlp", 4)
    with pytest.raises(ImportanceError, match="not finite"):
        graphopt.optimize(model, (x * float("inf"), labels), 0.5, MEASURED, backend="aot_eager")
    opt = graphopt.optimize(model, (x, labels), 0.5, MEASURED, backend="aot_eager")
    before, messages = opt.selected, []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("graphopt").addHandler(handler)
    try:
        outcome = opt.reselect((x * float("nan"), labels))
    finally:
        logging.getLogger("graphopt").removeHandler(handler)
    assert not outcome.changed
    assert opt.selected == before
    assert "keeping the last selection" in messages[0]


def test_an_optimizer_that_needs_a_closure_is_refused() -> None:
    model, inputs = zoo.make("mlp", 4)
    with pytest.raises(ImportanceError, match="optimizer=None"):
        graphopt.optimize(model, inputs, 0.5, MEASURED, optimizer=torch.optim.LBFGS(model.parameters()))


def test_a_warm_up_that_starts_at_zero_rates_by_the_rate_that_it_rises_to() -> None:
    model, inputs = zoo.make("mlp", 4)
    args, kwargs = as_call(inputs)
    names = [n for n, _ in model.named_parameters()]
    groups = [{"params": [p], "lr": 0.1 * (i + 1)} for i, p in enumerate(model.parameters())]
    risen = measure_importance(model, args, kwargs, names, torch.optim.AdamW(groups))
    warming = torch.optim.AdamW(groups)
    torch.optim.lr_scheduler.LambdaLR(warming, lambda step: step / 10)
    assert all(g["lr"] == 0 for g in warming.param_groups)
    assert measure_importance(model, args, kwargs, names, warming).values == pytest.approx(risen.values, rel=1e-5)


def test_the_importance_of_several_is_the_same_in_every_order() -> None:
    values = {str(i): v for i, v in enumerate(torch.rand(200, dtype=torch.float64).tolist())}
    importance = Importance(values, "")
    sums = {importance.of([str(i) for i in torch.randperm(200).tolist()]) for _ in range(50)}
    assert len(sums) == 1
    assert importance.of(["0", "not measured"]) == values["0"]


class Tiny16(nn.Module):
    """Runs in float16; its first gradient is smaller than float16 can hold."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.float16, enabled=x.dtype == torch.float32):
            hidden = self.first(x)
        return (self.second(hidden.to(x.dtype)) * 1e-7).square().sum() * 1e5


def test_small_gradients_count_in_float16() -> None:
    """Without a scale, every gradient of `first` is 0."""
    x, model = torch.randn(4, 8), Tiny16()
    names = [name for name, _ in model.named_parameters()]
    exact = measure_importance(copy.deepcopy(model).double(), (x.double(),), {}, names).values
    rated = measure_importance(model, (x,), {}, names).values
    assert exact["first.weight"] > 0
    assert rated == pytest.approx(exact, rel=0.05)
    exact, rated = (gradient_norms(*of, {}, names) for of in ((copy.deepcopy(model).double(), (x.double(),)), (model, (x,))))
    assert rated == pytest.approx(exact, rel=0.05)

"""Which rule rates, by what an optimizer holds and by what can be measured; its gradients are used again."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from graphopt.passes import GreenTrainer
from torch import Tensor, nn

import graphopt
from graphopt import ImportanceError, PassError
from graphopt.analysis.flops import FlopProfile
from graphopt.calls import as_call
from graphopt.capture import capture
from graphopt.planner.capacity import capacity
from graphopt.planner.importance import Importance
from graphopt.planner.rating import Rater
from tests import zoo
from tests.planner.test_capacity import rated


def rate(model: nn.Module, inputs: Any, optimizer: torch.optim.Optimizer | None = None, *passes: GreenTrainer) -> Importance:
    args, kwargs = as_call(inputs)
    analysis = graphopt.analyze(model, inputs)
    assert isinstance(analysis.flops, FlopProfile)
    graph = capture(model, args, kwargs)
    return Rater(passes, model, args, kwargs, graph, optimizer).rate(analysis.flops, analysis.flops.order)


def test_tensors_that_the_optimizer_does_not_hold_are_worth_nothing_and_the_others_what_they_were() -> None:
    model, inputs = zoo.make("mlp")
    held = {"second.weight", "second.bias"}
    optimizer = torch.optim.AdamW(model.second.parameters())  # type: ignore[union-attr]
    everything, found = rate(model, inputs).values, rate(model, inputs, optimizer).values
    assert {n for n, value in found.items() if value} == held
    assert found["second.bias"] / found["second.weight"] == pytest.approx(everything["second.bias"] / everything["second.weight"])
    assert not set(graphopt.optimize(model, inputs, 0.75, backend="aot_eager", optimizer=optimizer).selected) - held


def test_an_optimizer_that_holds_none_of_the_tensors_is_an_error() -> None:
    model, inputs = zoo.make("mlp")
    for rule in (GreenTrainer(), GreenTrainer(rule="greentrainer")):
        with pytest.raises(ImportanceError):
            rate(model, inputs, torch.optim.AdamW(zoo.make("mlp")[0].parameters()), rule)
    with pytest.raises(ImportanceError, match="holds none of the tensors"):
        rate(model, inputs, torch.optim.AdamW(zoo.make("mlp")[0].parameters()))


def one_step(model: nn.Module, inputs: Any, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients, and what a step then adds to the weights; by name."""
    optimizer.zero_grad()
    zoo.loss_of(zoo.call(model, inputs)).backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer.step()
    return gradients, {n: p.detach() - before[n] for n, p in model.named_parameters()}


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("metric", ["loss", "update", "gradient"])
def test_the_published_rule_measures_what_the_optimizers_next_step_does(metric: Any, steps: int) -> None:
    model, inputs = zoo.make("mlp", dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(steps):
        one_step(model, inputs, optimizer)
    found = rate(model, inputs, optimizer, GreenTrainer(rule="greentrainer", metric=metric))
    twin = copy.deepcopy(model)
    other = torch.optim.AdamW(twin.parameters(), lr=0.01)
    other.load_state_dict(optimizer.state_dict())
    g, dw = one_step(twin, inputs, other)
    measures = {
        "loss": {n: -float((dw[n] * g[n]).sum()) for n in g},
        "update": {n: float(dw[n].abs().sum()) for n in g},
        "gradient": {n: float(g[n].abs().sum()) for n in g},
    }
    largest = max(measures[metric].values())
    assert found.values == pytest.approx({n: value / largest for n, value in measures[metric].items()})
    assert ("metric" in found.source) == (metric != "loss")


def test_without_a_pass_tensors_are_rated_by_place_and_size_and_by_default_by_gradients_too() -> None:
    model, inputs = zoo.make("mlp")
    by_capacity, found = rated(model, inputs), rate(model, inputs, None, GreenTrainer())
    assert rate(model, inputs).values == rate(model, inputs, None, GreenTrainer(rule="capacity")).values == by_capacity
    zoo.loss_of(zoo.call(model, inputs)).backward()
    norms = {n: float(p.grad.norm()) for n, p in model.named_parameters() if p.grad is not None}
    assert found.norms == pytest.approx(norms)
    analysis = graphopt.analyze(model, inputs)
    assert isinstance(analysis.flops, FlopProfile)
    assert found.values == pytest.approx(capacity(analysis.graph, analysis.flops, norms=norms).values)
    assert found.values != by_capacity != rate(model, inputs, None, GreenTrainer(rule="greentrainer")).values


class Outputs(nn.Module):
    """A model that leaves the loss to its caller."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layers(x)
        return output


def test_where_gradients_cannot_be_measured_they_do_not_count_and_the_report_says_why() -> None:
    model, (x, labels) = zoo.make("mlp")
    found = rate(model, (x * math.nan, labels), None, GreenTrainer())
    assert found.values == rated(model, (x, labels))
    assert "NaN" in found.source
    silent = (torch.randn(4, 6),)
    found = rate(Outputs(), silent, None, GreenTrainer())
    assert found.values == rated(Outputs(), silent)
    assert "loss=" in found.source
    opt = graphopt.optimize(Outputs(), silent, 0.75, backend="aot_eager", loss=lambda output: output.square().mean())
    assert "gradient" in opt.report.selection.rule
    assert "do not count" not in opt.report.selection.rule


def test_under_a_limit_on_memory_no_gradient_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphopt.planner.rating.gradient_norms", None)
    model, inputs = zoo.make("mlp")
    opt = graphopt.optimize(model, inputs, graphopt.Budget(flops=0.75, memory="1GB"), backend="aot_eager")
    assert (
        opt.report.selection.rule
        == graphopt.optimize(model, inputs, 0.75, [GreenTrainer(rule="capacity")], "aot_eager").report.selection.rule
    )


def test_the_same_gradients_count_when_tensors_are_selected_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (x, labels) = zoo.make("mlp")
    opt = graphopt.optimize(model, (x, labels), 0.75, backend="aot_eager")
    monkeypatch.setattr("graphopt.planner.rating.gradient_norms", None)
    assert opt.reselect((x * 100, labels), tolerance=0.0).gain == 0.0


def test_rules_and_metrics_that_do_not_exist_are_refused_with_those_that_do() -> None:
    with pytest.raises(PassError, match="rule='topmost' is unknown. Use one of steepness, capacity, greentrainer."):
        GreenTrainer(rule="topmost")  # type: ignore[arg-type]
    with pytest.raises(PassError, match="metric='hessian' is unknown. Use one of loss, update, gradient."):
        GreenTrainer(rule="greentrainer", metric="hessian")  # type: ignore[arg-type]

"""Peaks of plans: estimates spare predictions, and never decide alone that a plan keeps to its limit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from graphopt.passes import Recompute
from torch import Tensor, nn

import graphopt
from graphopt.graph import TrainingGraph
from graphopt.planner.memory_limit import MemoryLimit
from graphopt.planner.peaks import Peaks
from graphopt.planner.plan import Plan
from tests.planner.tower import Tower


@pytest.fixture
def graph() -> TrainingGraph:
    torch.manual_seed(0)
    return graphopt.analyze(Tower(3, 16, activation=nn.GELU), (torch.randn(512, 16),), backend="aot_eager").graph


def plan_for(limit: MemoryLimit) -> Plan:
    return Plan(graphopt.Budget(), (Recompute(),), memory=limit)


def test_without_fusion_an_estimate_is_the_prediction(graph: TrainingGraph) -> None:
    limit = MemoryLimit(1, "aot_eager")
    peaks = Peaks(graph, limit)
    plan = plan_for(limit)
    peaks.correct(plan)
    assert not peaks.estimates
    assert peaks.left is None
    assert peaks.estimated(plan) == peaks.predicted(plan) == limit.peak_of(plan.rewrite(graph)[0], 512)


def test_what_an_estimate_has_far_above_the_limit_is_not_predicted(graph: TrainingGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = MemoryLimit(1, "inductor")
    peaks = Peaks(graph, limit, left=0.5)
    monkeypatch.setattr(MemoryLimit, "peak_once", None)
    assert not peaks.within(plan_for(limit))


def test_what_is_near_the_limit_is_predicted_which_corrects_estimates(graph: TrainingGraph) -> None:
    first = MemoryLimit(1, "inductor")
    plan = plan_for(first)
    peaks = Peaks(graph, first)
    unfused = peaks.estimated(plan)
    assert not peaks.within(plan)
    peak = peaks.predicted(plan)
    assert peak < unfused
    assert peaks.estimated(plan) == pytest.approx(peak, abs=1)
    assert Peaks(graph, replace(first, peak_bytes=peak)).within(plan)
    assert not Peaks(graph, replace(first, peak_bytes=peak - 1)).within(plan)


class Convolutions(nn.Module):
    """Computed again, the activation before its second convolution needs more memory under Inductor than kept."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.other = nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16)
        self.grouped, self.head = nn.Conv2d(16, 16, 3, padding=1, groups=4), nn.Linear(16, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = nn.functional.silu(self.norm(self.first(x)))
        x = nn.functional.max_pool2d(nn.functional.gelu(self.other(self.second(x))), 2)
        x = x + nn.functional.silu(self.grouped(x))
        return nn.functional.cross_entropy(self.head(x.mean((2, 3))), labels)


def test_a_prediction_that_is_out_of_line_tells_nothing_of_other_plans(
    graph: TrainingGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = MemoryLimit(1, "inductor")
    peaks = Peaks(graph, limit, left=0.5)
    kept, again = plan_for(limit), replace(plan_for(limit), passes=())
    peaks._unfused.update({kept.key: (100, 400), again.key: (100, 300)})
    monkeypatch.setattr(MemoryLimit, "peak_once", lambda self, graph, key, *_: {kept.key: 420, again.key: 552}[key])
    peaks.correct(kept)
    assert peaks.left == 0.8
    peaks.correct(again)
    assert peaks.out_of_line(again)
    assert not peaks.out_of_line(kept)
    assert peaks.left == 0.8
    assert peaks.estimated(again) == 552


@pytest.mark.long
def test_what_needs_more_memory_computed_again_is_kept() -> None:
    torch.manual_seed(0)
    model, batch = Convolutions(), (torch.randn(8, 3, 16, 16), torch.arange(8) % 4)
    most = int(0.85 * graphopt.analyze(model, batch).memory.peak_bytes)
    opt = graphopt.optimize(model, batch, graphopt.Budget(memory=most))
    assert opt.report.trained == opt.report.trainable


def test_few_predictions_lead_to_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = Tower(3, 16, activation=nn.GELU), torch.randn(4096, 16)
    most = int(0.85 * graphopt.analyze(model, (x,)).memory.peak_bytes)
    predictions: list[int] = []
    peak_of = MemoryLimit.peak_of

    def counted(self: MemoryLimit, graph: TrainingGraph, batch_size: int) -> int:
        predictions.append(peak_of(self, graph, batch_size))
        return predictions[-1]

    monkeypatch.setattr(MemoryLimit, "peak_of", counted)
    opt = graphopt.optimize(model, (x,), graphopt.Budget(memory=most))
    assert opt.report.trained == opt.report.trainable
    assert predictions[-1] <= most
    assert len(predictions) <= 3

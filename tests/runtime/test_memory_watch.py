"""A budget for memory holds for the example; of larger batches the user is warned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import graphopt
from graphopt.analysis.flops import flop_profile
from graphopt.planner.memory_limit import MemoryLimit
from tests import zoo
from tests.measure import planned_peak
from tests.messages import warnings_of


def limited(batch: int, room: float = 1.05) -> tuple[graphopt.OptimizedModule, int]:
    """A model within a little more than what a step of `batch` needs."""
    model, inputs = zoo.make("mlp", batch)
    memory = int(planned_peak(model, inputs) * room)
    return graphopt.optimize(model, inputs, budget=graphopt.Budget(memory=memory), backend="aot_eager"), memory


def step(opt: nn.Module, batch: int) -> None:
    zoo.call(opt, zoo.make("mlp", batch)[1]).backward()


def test_of_a_larger_batch_that_needs_more_the_user_is_told_once() -> None:
    opt, memory = limited(8)
    with warnings_of() as warned:
        for batch in (8, 3, 8, 7):
            step(opt, batch)
        assert not opt.report.notes
        for _ in range(3):
            step(opt, 512)
            step(opt, 8)
    (note,) = opt.report.notes
    assert f"where memory={memory:,}" in note
    needed = planned_peak(*zoo.make("mlp", 512))
    assert f"(512, 5), (512,) needs {needed:,} bytes" in note
    assert warned == [note]


def test_sizes_between_known_ones_are_not_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream of lengths has many shapes."""
    opt, _ = limited(8, room=1.5)
    step(opt, 9)
    step(opt, 512)
    assert len(opt.report.notes) == 1
    monkeypatch.setattr(MemoryLimit, "peak_once", None)
    with warnings_of() as warned:
        for batch in (7, 9, 513, 1024):
            step(opt, batch)
    assert not warned


def test_a_flop_counter_sees_the_step_alone() -> None:
    opt, _ = limited(8)
    with FlopCounterMode(display=False) as counter:
        step(opt, 512)
    assert opt.last_step is not None
    assert counter.get_total_flops() == flop_profile(opt.last_step.graph).step
    assert opt.report.notes


def test_a_larger_batch_that_fits_is_nothing_to_tell_of() -> None:
    opt, _ = limited(8, room=1.5)
    step(opt, 9)
    assert not opt.report.notes


def test_without_a_limit_nothing_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = zoo.make("mlp", 8)
    opt = graphopt.optimize(model, inputs, budget=0.8, backend="aot_eager")
    monkeypatch.setattr(MemoryLimit, "peak_once", None)
    step(opt, 64)
    assert not opt.report.notes


class Deep(nn.Sequential):
    """Of which the head alone is trained at first."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(128, 128) for _ in range(6)))
        for layer in list(self)[:-1]:
            layer.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The loss."""
        return super().forward(x).square().mean()


@pytest.mark.parametrize("batch", [8, 9])
def test_tensors_that_were_unfrozen_are_told_of_and_planned_within_the_limit(batch: int) -> None:
    model, x = Deep(), torch.randn(8, 128)
    memory = int(planned_peak(model, (x,)) * 1.3)
    opt = graphopt.optimize(model, (x,), budget=graphopt.Budget(memory=memory), backend="aot_eager")
    opt(torch.randn(batch, 128)).backward()
    assert not opt.report.notes
    model.requires_grad_(True)
    opt(torch.randn(batch, 128)).backward()
    (note,) = opt.report.notes
    assert f"where memory={memory:,}, because the plan was made for fewer trained tensors" in note
    assert opt.reselect((x,)).changed
    assert 0 < len(opt.selected) < len(list(model.parameters()))
    opt.zero_grad()
    opt(x).backward()
    assert {name for name, p in model.named_parameters() if p.grad is not None} == opt.selected
    assert opt.report.plan.predicted["peak_bytes"] <= memory


def test_tensors_that_the_limit_had_left_out_are_planned_anew_too() -> None:
    model, x = Deep(), torch.randn(8, 128)
    memory = int(planned_peak(model, (x,)) * 1.3)
    model[3].requires_grad_(True)
    model[4].requires_grad_(True)
    opt = graphopt.optimize(model, (x,), budget=graphopt.Budget(memory=memory), backend="aot_eager")
    first = opt.selected
    assert "3.weight" not in first
    assert not opt.reselect((x,)).changed
    model[4].requires_grad_(False)
    model[5].requires_grad_(False)
    assert opt.reselect((x,)).changed
    assert opt.selected == {"3.weight", "3.bias"}
    opt(x).backward()
    assert {name for name, p in model.named_parameters() if p.grad is not None} == opt.selected
    assert opt.report.plan.predicted["peak_bytes"] <= memory


class Sequences(nn.Module):
    """Each row of a sample is mixed with all others."""

    def __init__(self) -> None:
        super().__init__()
        self.below, self.above = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The loss."""
        hidden = torch.tanh(self.below(x))
        return self.above(torch.softmax(hidden @ hidden.transpose(1, 2), -1) @ hidden).square().mean()


def test_longer_inputs_are_larger_too() -> None:
    model, x = Sequences(), torch.randn(4, 12, 8)
    opt = graphopt.optimize(
        model, (x,), budget=graphopt.Budget(memory=int(planned_peak(model, (x,)) * 1.05)), backend="aot_eager"
    )
    opt(x).backward()
    assert not opt.report.notes
    opt(torch.randn(4, 48, 8)).backward()
    (note,) = opt.report.notes
    assert "(4, 48, 8)" in note


def test_training_goes_on_where_it_cannot_be_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    opt, _ = limited(8)

    def fails(*args: Any) -> int:
        raise RuntimeError("no forecast")

    monkeypatch.setattr(MemoryLimit, "peak_once", fails)
    with warnings_of() as warned:
        step(opt, 512)
    assert ["no forecast" in text for text in warned] == [True]
    assert all(p.grad is not None for p in opt.parameters())


class Broken(nn.Module):
    """A perceptron that is two graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 64), nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The loss."""
        hidden = self.first(x).relu()
        torch._dynamo.graph_break()
        return self.second(hidden).square().mean()


def test_a_larger_batch_of_a_model_of_several_graphs_is_predicted_as_well() -> None:
    model, x = Broken(), torch.randn(8, 16)
    memory = int(graphopt.analyze(model, (x,), backend="aot_eager").memory.peak_bytes * 1.05)
    opt = graphopt.optimize(model, (x,), budget=graphopt.Budget(memory=memory), backend="aot_eager")
    for batch in (8, 512):
        opt(torch.randn(batch, 16)).backward()
    (note,) = opt.report.notes
    assert "inputs (512, 16) needs" in note

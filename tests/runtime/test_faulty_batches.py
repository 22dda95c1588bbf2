"""Batches that are not finite, and measurements that fail: selection and sample ratios stay as they were."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graphopt.passes import Vcas
from graphopt.passes.vcas.calibration import Measurement

import graphopt
from tests import zoo
from tests.messages import warnings_of
from tests.rules import MEASURED


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_batch_that_is_not_finite_keeps_selection_and_ratios(value: float) -> None:
    model, (x, labels) = zoo.make("mlp", 8)
    bad = (torch.full_like(x, value), labels)
    opt = graphopt.optimize(model, (x, labels), budget=0.7, passes=MEASURED, backend="aot_eager")
    before, optimizer = opt.selected, torch.optim.SGD(model.parameters(), lr=0.0)
    controller = graphopt.SelectionController(opt, optimizer, every=1)
    with warnings_of() as texts:
        opt(*bad).backward()
        assert not controller.after_step(bad).changed
    assert opt.selected == before
    assert "keeping the last selection" in texts[0]
    opt.zero_grad()
    opt(x, labels).backward()
    assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_calibration_on_a_batch_that_is_not_finite_keeps_the_ratios(value: float) -> None:
    model, (x, labels) = zoo.make("mlp", 16)
    opt = graphopt.optimize(model, (x, labels), budget=graphopt.Budget(variance=0.9), passes=[Vcas(every=1)], backend="aot_eager")
    for _ in range(40):
        opt.controller.after_step((x + torch.randn_like(x), labels))
        if opt.controller.ratios:
            break
    before = opt.controller.ratios
    state = opt.controller.state
    assert before
    for _ in range(3):
        opt.controller.after_step((torch.full_like(x, value), labels))
    assert (opt.controller.ratios, opt.controller.state) == (before, state)
    opt(x, labels).backward()
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters())
    assert str(opt.report)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"), RuntimeError("boom")])
def test_a_calibration_that_fails_keeps_the_ratios(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    model, inputs = zoo.make("mlp", 16)
    opt = graphopt.optimize(model, inputs, budget=graphopt.Budget(variance=0.9), passes=[Vcas(every=1)], backend="aot_eager")

    def failing(self: Any, *_: Any) -> Any:
        raise error

    monkeypatch.setattr(Measurement, "exact", failing)
    with warnings_of() as texts:
        assert [opt.controller.after_step(inputs) for _ in range(4)] == [None] * 4
    assert len(texts) == 1
    assert str(error) in opt.report.notes[-1]
    assert opt.controller.ratios == ()


def test_a_selection_that_runs_out_of_memory_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = zoo.make("mlp", 6)
    opt = graphopt.optimize(model, inputs, budget=0.7, passes=MEASURED, backend="aot_eager")
    before = opt.selected

    def no_room(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr("graphopt.planner.rating.measure_importance", no_room)
    with warnings_of() as texts:
        assert not opt.reselect(inputs).changed
    assert opt.selected == before
    assert "no room" in texts[0]

"""What is chosen jointly under autocast, a GradScaler, half precision, and with batches that are not finite."""

from __future__ import annotations

import math

import pytest
import torch
from graphopt.passes import Vcas
from torch import Tensor

import graphopt
from graphopt.runtime.module import OptimizedModule
from tests.runtime.test_joint_sampling import Batch, Stack, data

LAYERS = 6


def make(dtype: torch.dtype, example: Batch, backend: str = "aot_eager") -> tuple[Stack, torch.optim.Optimizer, OptimizedModule]:
    torch.manual_seed(0)
    model = Stack(layers=LAYERS).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
    budget = graphopt.Budget(flops=0.6, variance=0.6)
    passes = ["greentrainer", Vcas(every=4, jointly=True)]
    return model, optimizer, graphopt.optimize(model, example, budget, passes, backend, optimizer=optimizer)


def part_of_flops(opt: OptimizedModule) -> float:
    assert opt.last_step is not None
    reports = opt.last_step.reports
    return reports[-1].step_flops_after / reports[0].step_flops_before


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_in_other_precisions(dtype: torch.dtype) -> None:
    batches = [(x.to(dtype), labels) for x, labels in data(10)]
    model, optimizer, opt = make(dtype, batches[0])
    for batch in batches:
        opt(*batch).backward()
        assert part_of_flops(opt) <= 0.6
        assert all(p.grad is None or p.grad.dtype == dtype for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        opt.controller.after_step(batch)
    assert opt.sample_ratios
    assert not opt.report.notes
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_a_gradient_scaler_in_float16() -> None:
    """The first scales overflow: those steps are skipped; variances are measured without the scale."""
    batches = data(10)
    with torch.autocast("cpu", torch.float16):
        model, optimizer, opt = make(torch.float32, batches[0])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=4)
    scales = [scaler.get_scale()]
    for batch in batches:
        with torch.autocast("cpu", torch.float16):
            loss = opt(*batch)
        scaler.scale(loss).backward()
        assert part_of_flops(opt) <= 0.6
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            opt.controller.after_step(batch)
        scales.append(scaler.get_scale())
    assert scales[1] < scales[0]
    assert opt.sample_ratios
    assert not opt.report.notes
    assert all(math.isfinite(a.tokens_variance) for a in opt.controller.history)
    assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_batch_that_is_not_finite_shows_in_the_gradients_and_changes_no_choice(backend: str) -> None:
    def with_nan(batch: Batch) -> tuple[Tensor, Tensor]:
        x = batch[0].clone()
        x[3, 2, 1] = math.nan
        return x, batch[1]

    batches = data(10)
    model, optimizer, opt = make(torch.float32, batches[0], backend)
    for k, batch in enumerate(batches):
        bad = k in (5, 7)  # one in a calibration, after ratios are in force
        given = with_nan(batch) if bad else batch
        before = opt.plan.key
        loss = opt(*given)
        loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        assert gradients
        if bad:
            assert math.isnan(loss.item())
            assert all(not torch.isfinite(g).all() for g in gradients)
        else:
            assert all(torch.isfinite(g).all() for g in gradients)
            optimizer.step()
        optimizer.zero_grad()
        opt.controller.after_step(given)
        if bad:
            assert opt.plan.key == before
    assert opt.sample_ratios
    assert [a.step for a in opt.controller.history] == [4, 8]
    assert not opt.report.notes

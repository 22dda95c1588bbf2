"""The time of a step predicted, on a machine whose times are known."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

import graphopt
from graphopt.analysis.flops import flop_profile
from graphopt.capture import capture
from graphopt.planner.step_time import machine_times, step_seconds
from graphopt.specialise import specialise
from tests import zoo


class Machine:
    """A FLOP takes a nanosecond, and so does a byte."""

    peak = bandwidth = 1e9

    def product(self, m: int, k: int, n: int) -> float:
        return 2 * m * k * n / self.peak


def on(device: torch.device, dtype: torch.dtype) -> Machine:
    return Machine()


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 16))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight).relu().exp().sin()


def test_products_take_their_time_and_the_rest_what_it_moves() -> None:
    rows = 4
    graph = specialise(capture(Chain(), (torch.randn(rows, 8),)), rows)
    products = 2 * rows * 8 * 16 * 2  # forward, and the weight's gradient
    value = rows * 16 * 4
    forward = 3 * 2 * value  # each reads one and writes one
    backward = (2 + 3 + 3 + 3) * value  # the cosine; times the gradient; times exp's result; 0 where relu's result is
    seconds = step_seconds(graph, False, on)  # type: ignore[arg-type]
    assert seconds == pytest.approx((products + forward + backward) / 1e9)
    # Fused: the product's result is read; relu's, exp's and sin's are kept or returned, and read again in the backward.
    fused = step_seconds(graph, True, on)  # type: ignore[arg-type]
    assert products / 1e9 < fused < seconds


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        return torch.native_layer_norm(x, [16], None, None, 1e-5)[0].t() + self.bias[:, None]


def test_views_and_results_of_one_operator_move_nothing() -> None:
    rows = 4
    graph = specialise(capture(Normalised(), (torch.randn(rows, 16),), batch_dim=None), 1)
    value, statistics, bias = rows * 16 * 4, 2 * rows * 4, 16 * 4
    norm, addition, gradient = 2 * value + statistics, 2 * value + bias, value + bias
    assert step_seconds(graph, False, on) == pytest.approx((norm + addition + gradient) / 1e9)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["bert", "cnn", "lstm"])
def test_no_step_is_faster_than_its_products(name: str) -> None:
    graph = specialise(zoo.captured(name), 4)
    fused, unfused = (step_seconds(graph, fuses, on) for fuses in (True, False))  # type: ignore[arg-type]
    assert flop_profile(graph).step / 1e9 < fused < unfused


def test_more_rows_take_longer() -> None:
    graph = zoo.captured("mlp")
    seconds = [step_seconds(specialise(graph, rows), True, on) for rows in (*range(2, 66), 96, 128)]  # type: ignore[arg-type]
    assert all(few < many for few, many in itertools.pairwise(seconds))


def test_it_is_reported_beside_what_was_measured() -> None:
    model, inputs = zoo.make("mlp", 4)
    opt = graphopt.optimize(model, inputs, budget=0.8, backend="aot_eager")
    for step in range(4):
        plan = opt.report.plan
        assert plan is not None
        assert (plan.predicted["seconds"] is None) == (plan.measured["forward_backward"] is None) == (step < 3)
        zoo.call(opt, inputs).backward()
    plan = opt.report.plan
    assert plan is not None
    assert plan.predicted["seconds"] > 0
    assert plan.measured["forward_backward"] < plan.measured["seconds"]
    assert "predicted        forward and backward" in str(opt.report)


class Broken(nn.Module):
    """Two graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 64), nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).relu()
        torch._dynamo.graph_break()
        return self.second(hidden).square().mean()


def test_all_graphs_of_a_step_take_time(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(16, 8)
    opt = graphopt.optimize(Broken(), (x,), backend="aot_eager")
    for _ in range(3):
        opt(x).backward()
    monkeypatch.setattr("graphopt.report.plan.step_seconds", lambda graph, fuses: 1.0)
    assert opt.report.plan is not None
    assert opt.report.plan.predicted["seconds"] == 2.0


def test_products_of_the_forecast_are_not_those_that_orders_are_chosen_by() -> None:
    from graphopt.planner.product_times import product_times

    device = torch.device("cpu")
    assert machine_times(device, torch.float32) is not product_times(device, torch.float32)
    assert machine_times(device, torch.float32) is machine_times(device, torch.float32)
    for dtype in (torch.int64, torch.float8_e4m3fn):  # no random matrices can be drawn
        assert machine_times(device, dtype) is machine_times(device, torch.float32)
    assert machine_times(device, torch.bfloat16) is not machine_times(device, torch.float32)

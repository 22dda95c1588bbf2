"""Passes that work above several rows or operators do nothing across a graph break: what is planned is what runs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from graphopt.passes import DeadRows, LinearCrossEntropy
from torch import Tensor, nn

import graphopt
from tests.long_forms import long

SAMPLES, ROWS, WIDTH, CLASSES = 4, 6, 16, 40


class Divided(nn.Module):
    """Layers whose last one reads one row of each sample; graphs break before and after some of them.

    Attributes:
        breaks: before which layers, and "loss".
    """

    def __init__(self, *breaks: int | str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.breaks = breaks

    def block(self, x: Tensor, number: int) -> Tensor:
        """One layer, in a graph of its own where that is asked for."""
        if number in self.breaks:
            torch._dynamo.graph_break()
        return x + self.layers[number](x).tanh()

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.block(x, 0)
        x = self.block(x, 1)
        x = self.block(x, 2)
        x = self.block(x, 3)
        logits = self.head(x[:, 0])
        if "loss" in self.breaks:
            torch._dynamo.graph_break()
        return nn.functional.cross_entropy(logits, labels)


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(SAMPLES, ROWS, WIDTH), torch.randint(0, CLASSES, (SAMPLES,))


def step(model: Divided, **options: Any) -> graphopt.OptimizedModule:
    """One step, whose gradients are those of eager mode."""
    inputs = batch()
    eager = copy.deepcopy(model)
    opt = graphopt.optimize(model, inputs, backend="aot_eager", **options)
    assert isinstance(opt, graphopt.OptimizedModule)
    opt(*inputs).backward()
    eager(*inputs).backward()
    for name, parameter in eager.named_parameters():
        found = model.get_parameter(name).grad
        if name in opt.selected:
            torch.testing.assert_close(found, parameter.grad)
        else:
            assert found is None
    return opt


@pytest.mark.parametrize(
    ("breaks", "budget"),
    [
        *(((3,), None), ((1, 3), 0.7), (("loss",), 0.5), ((2, "loss"), None), ((2, "loss"), 0.5)),
        *long(((3,), 0.5), ((3,), 0.7), ((1, 3), None), ((1, 3), 0.5), (("loss",), None), (("loss",), 0.7), ((2, "loss"), 0.7)),
    ],
)
def test_the_flops_of_a_plan_are_those_of_the_graphs_that_run(breaks: tuple[int | str, ...], budget: float | None) -> None:
    model = Divided(*breaks)
    planned = graphopt.optimize(copy.deepcopy(model), batch(), budget, backend="aot_eager").report.flops_ratio
    opt = step(model, budget=budget)
    assert opt.report.flops_ratio == pytest.approx(planned)
    assert opt.report.flops_ratio <= (budget or 1.0)


def test_rows_are_left_out_up_to_the_last_break() -> None:
    whole, at_the_end, before_the_last_layer = (
        step(Divided(*breaks), passes=[DeadRows()]).report.flops_ratio for breaks in ((), ("loss",), (2,))
    )
    assert whole == pytest.approx(at_the_end)
    assert whole < before_the_last_layer < 1


def test_a_head_is_left_whole_where_its_loss_is_in_another_graph() -> None:
    chunks = LinearCrossEntropy(chunks=2)
    together, apart = (graphopt.analyze(Divided(*breaks), batch()).graph for breaks in ((2,), (2, "loss")))
    assert [site.name for site in chunks.applicable(together)] == ["head.weight"]
    assert not chunks.applicable(apart)

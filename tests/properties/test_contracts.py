"""The contracts that random networks are held to find planted faults: what cannot fail shows nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from graphopt.passes import run_pass
from torch import Tensor, nn
from torch.nn import functional as F

from graphopt.graph import TrainingGraph
from tests.properties.contracts import Request, check


class Perceptron(nn.Module):
    """What `tests.properties.random_models.Network` offers, with nothing random about it."""

    output, sizes = "loss", (4, 3)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        return F.cross_entropy(self.third(hidden + self.second(hidden).tanh()), y)

    def loss_of(self, loss: Tensor) -> Tensor:
        return loss

    def inputs(self, batch: int, seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(batch, 5, generator=generator, dtype=torch.float64), torch.arange(batch) % 3


class OnePixel(Perceptron):
    """Inductor expects other strides than a convolution in float64 has of one pixel, whoever calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.grown = nn.Conv2d(5, 10, 1, stride=2, padding=1, groups=5, bias=False)
        self.convolution = nn.Conv2d(10, 5, 3, padding=1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(self.convolution(F.interpolate(self.grown(x), scale_factor=2)).mean((2, 3)), y)

    def inputs(self, batch: int, seed: int) -> tuple[Tensor, Tensor]:
        x, y = super().inputs(batch, seed)
        return x[..., None, None], y


def request(*passes: str, backend: str = "aot_eager") -> Request:
    return Request(passes, share=0.6, keep_rows=0.5, keep_tokens=0.5, subspace=2, order=None, chunks=2, backend=backend)


def scaled_output(kind: str) -> Callable[[TrainingGraph], None]:
    """A fault: one output of a kind is a millionth too large."""

    def plant(graph: TrainingGraph) -> None:
        (output,) = graph.graph.find_nodes(op="output")
        values = list(output.args[0])
        place = next(
            i for i, (desc, v) in enumerate(zip(graph.outputs, values, strict=True)) if desc.kind == kind and v is not None
        )
        right = values[place]
        with graph.graph.inserting_after(right):
            wrong = graph.graph.call_function(torch.ops.aten.mul.Tensor, (right, 1 + 1e-6))
        wrong.meta, values[place] = dict(right.meta), wrong
        output.args = (tuple(values),)

    return plant


def repeated_product(graph: TrainingGraph) -> None:
    """A fault: FLOPs that the user did not ask for."""
    product = next(n for n in graph.graph.nodes if n.target in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default))
    user = next(iter(product.users))
    with graph.graph.inserting_after(product):
        again = graph.graph.node_copy(product)
    with graph.graph.inserting_after(again):
        both = graph.graph.call_function(torch.ops.aten.maximum.default, (product, again))  # the same values
    again.meta, both.meta = dict(product.meta), dict(product.meta)
    user.replace_input_with(product, both)


def after(name: str, plant: Callable[[TrainingGraph], None]) -> Any:
    """`run_pass`, with a fault in what the pass of that name leaves."""

    def faulty(rewrite: Any, graph: TrainingGraph, decisions: Any) -> Any:
        rewritten, report = run_pass(rewrite, graph, decisions)
        if rewrite.name == name:
            plant(rewritten)
        return rewritten, report

    return faulty


@pytest.mark.parametrize("passes", [("flops",), ("vcas",), ("lsp",), ("runlora",), ("train", "lsp"), ("memory",)])
def test_without_a_fault_the_contract_holds(passes: tuple[str, ...]) -> None:
    assert check(Perceptron().double(), [request(*passes)]) == ["held"]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("passes", "rewrite", "plant", "found"),
    [
        (("flops",), "greentrainer", scaled_output("gradient"), "the gradient of .* of the largest entry off"),
        (("flops",), "greentrainer", scaled_output("output"), "an output is .* of the largest entry off"),
        (("lsp",), "lsp", scaled_output("gradient"), "of the largest entry off"),
        (("vcas",), "vcas", scaled_output("output"), "an output is .* of the largest entry off"),
        (("vcas",), "vcas", scaled_output("gradient"), "the mean gradient of .* of the largest entry off"),
        (("train", "lsp"), "greentrainer", scaled_output("gradient"), "of the largest entry off"),
        (("flops",), "greentrainer", repeated_product, "over budget"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else None,
)
def test_a_planted_fault_is_found(
    passes: tuple[str, ...], rewrite: str, plant: Callable[[TrainingGraph], None], found: str
) -> None:
    faulty = after(rewrite, plant)
    with (
        mock.patch("graphopt.planner.plan.run_pass", faulty),
        mock.patch("tests.properties.contracts.run_pass", faulty),
        pytest.raises(AssertionError, match=found),
    ):
        check(Perceptron().double(), [request(*passes)])  # type: ignore[arg-type]


def test_an_error_that_is_torch_compiles_own_is_told_from_ours() -> None:
    assert check(OnePixel().double(), [request(backend="inductor")]) == ["torch.compile fails, too"]  # type: ignore[arg-type]
    with (
        mock.patch("tests.properties.contracts.hold", side_effect=AssertionError("expected size")),
        pytest.raises(AssertionError),
    ):
        check(OnePixel().double(), [request(backend="inductor")])  # type: ignore[arg-type]

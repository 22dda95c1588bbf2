"""The exact expectation of a sampled backward: over every subset that its samplers can draw, with their own probabilities."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from graphopt.passes.vcas.ops import filled_probabilities, shuffled
from torch import Tensor, fx, nn

from graphopt.calls import as_call, flatten_call
from graphopt.graph import TrainingGraph
from tests import zoo


class GroupNormNet(nn.Module):
    """Convolutions whose norms look at one sample each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8),
            nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        )  # fmt: skip
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.layers(x).flatten(1)), labels)


class TokensFirst(nn.Module):
    """A layer between others has tokens as its first dimension, as `nn.MultiheadAttention` always has."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.head = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x))
        hidden = self.inner(hidden.transpose(0, 1)).transpose(0, 1)
        return self.head(torch.tanh(hidden)).square().mean()


def made(name: str, batch: int, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Any]:
    if name == "tokens first":
        torch.manual_seed(0)
        return TokensFirst().to(dtype), (torch.randn(batch, 2, 3, dtype=dtype),)
    if name != "group norm":
        return zoo.make(name, batch, dtype, **({"layers": 1} if name == "bert" else {}))
    torch.manual_seed(0)
    return GroupNormNet().to(dtype), (torch.randn(batch, 3, 6, 6, dtype=dtype), torch.arange(batch) % 4)


ORDER = 0.25
"""Decides the order of rows; with any, the expectation is the same."""


def drawn_operators(node: fx.Node) -> bool:
    return node.target is torch.ops.graphopt.systematic_rows.default


class Draws(fx.Interpreter):
    """Runs a joint graph with given uniform numbers, and notes where each drawing changes with its number."""

    def __init__(self, graph: TrainingGraph) -> None:
        super().__init__(graph.module)
        self.cuts: list[list[float]] = []

    def run_node(self, n: fx.Node) -> Any:
        if drawn_operators(n):
            weights, count = self.fetch_args_kwargs_from_env(n)[0][0], n.args[2]
            p, _ = filled_probabilities(weights, count)  # type: ignore[arg-type]
            order = shuffled(len(p), torch.tensor(ORDER))
            self.cuts.append(sorted({0.0, 1.0, *(float(e) % 1.0 for e in p[order].cumsum(0))}))
        return super().run_node(n)


def expectation(graph: TrainingGraph, model: nn.Module, inputs: Any) -> dict[str, Tensor]:
    """The exact expectation of every gradient: over every subset that the samplers can draw, with their own probabilities."""
    flat = flatten_call(*as_call(inputs))
    tensors = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}
    sites = sum(drawn_operators(node) for node in graph.graph.nodes)
    total: dict[str, Tensor] = {}

    def run(uniforms: Sequence[float]) -> tuple[Draws, Sequence[Any]]:
        values: list[Any] = []
        for desc, node in zip(graph.inputs, graph.placeholders, strict=True):
            if desc.kind == "input":
                values.append(flat.tensors[desc.target])
            elif desc.kind == "tangent":
                recorded = node.meta["val"]  # of a scalar, the loss; other outputs are not differentiated
                shape = [graph.at(size, graph.batch_size) for size in recorded.shape]
                values.append(torch.full(shape, 0.0 if shape else 1.0, dtype=recorded.dtype))
            elif desc.kind == "random":
                firsts = [*uniforms, *[0.5] * (sites - len(uniforms))]
                values.append(torch.tensor([[first, ORDER] for first in firsts], dtype=torch.float64).flatten())
            else:
                values.append(tensors[desc.target].detach())
        interpreter = Draws(graph)
        with torch.no_grad():
            return interpreter, interpreter.run(*values)

    def add(uniforms: list[float], probability: float) -> None:
        interpreter, results = run(uniforms)
        if len(uniforms) < sites:
            for low, high in itertools.pairwise(interpreter.cuts[len(uniforms)]):
                if high - low > 1e-12:
                    add([*uniforms, (low + high) / 2], probability * (high - low))
            return
        for desc, value in zip(graph.outputs, results, strict=True):
            if desc.kind == "gradient" and isinstance(value, Tensor):
                name = desc.target.target
                total[name] = total.get(name, 0) + probability * value

    add([], 1.0)
    return total


def eager_gradients(model: nn.Module, inputs: Any) -> dict[str, Tensor]:
    model.zero_grad()
    zoo.loss_of(zoo.call(model, inputs)).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

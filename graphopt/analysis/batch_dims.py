"""Where the batch is in a tensor of a joint graph."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from graphopt.compat import pytree
from graphopt.errors import GraphoptError
from graphopt.graph import BATCH, TrainingGraph, reached


class NoRows(GraphoptError):
    """A tensor's shape depends on the batch in another way than one dimension of B times a number."""


@dataclass(frozen=True)
class BatchDim:
    """The dimension of a tensor that holds the samples.

    Attributes:
        dim: which one.
        inner: elements of it per sample, as in a flattened (B * T); samples are its slow part.
    """

    dim: int
    inner: int


def batch_dim(graph: TrainingGraph, tensor: Tensor) -> BatchDim | None:
    """The batch dimension of a tensor that a node of `graph` records; None if its shape does not depend on the batch.

    Raises:
        NoRows: see there.
    """
    found = None
    for dim, size in enumerate(tensor.shape):
        if not isinstance(size, torch.SymInt):
            continue
        formula = graph.formula(size)
        if BATCH not in formula.free_symbols:
            continue
        factor = sympy.cancel(formula / BATCH)
        if found is not None or not factor.is_Integer:
            shape = [graph.formula(s) for s in tensor.shape]
            raise NoRows(f"its shape {shape} depends on the batch size B in more than one plain dimension")
        found = BatchDim(dim, int(factor))
    return found


def elements_before(graph: TrainingGraph, tensor: Tensor) -> int:
    """Product of the sizes before a tensor's batch dimension, for the example's batch; 1 if it has none.

    A view keeps it where each sample's rows stay its own.

    Raises:
        NoRows: see there.
    """
    rows = batch_dim(graph, tensor)
    return math.prod(graph.at(size, graph.batch_size) for size in tensor.shape[: rows.dim if rows else 0])


def carries_batch(graph: TrainingGraph, value: Any) -> bool:
    """Whether the shape of any tensor in a node's recorded value depends on the batch."""
    return any(
        isinstance(size, torch.SymInt) and BATCH in graph.formula(size).free_symbols
        for tensor in pytree.tree_leaves(value)
        if isinstance(tensor, Tensor)
        for size in tensor.shape
    )


def gradient_cone(graph: TrainingGraph) -> set[fx.Node]:
    """Nodes computed from the gradient of an output: what the backward alone computes."""

    def computed(node: fx.Node) -> list[fx.Node]:
        return [u for u in node.users if u.op == "call_function" and not isinstance(u.meta.get("val"), torch.SymInt)]

    return set(reached([n for d, n in zip(graph.inputs, graph.placeholders, strict=True) if d.kind == "tangent"], computed))

"""Gradients of weights as sums of matrix products: what a linear map of the gradient can be applied to, factor by factor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, fx

from graphopt.analysis.products import Matrix, as_matrix, same_shape
from graphopt.graph import TrainingGraph

aten = torch.ops.aten


@dataclass(frozen=True)
class WeightGradient:
    """The gradient of one matrix.

    Attributes:
        name: of the parameter.
        shape: (m, n).
        node: the gradient as the graph returns it.
        terms: the products (`aten.mm`) that it is the sum of; empty where it is no such sum.
        other: what it is computed by besides products, "" if nothing.
    """

    name: str
    shape: tuple[int, int]
    node: fx.Node
    terms: tuple[Matrix, ...]
    other: str


def find_weight_gradients(graph: TrainingGraph) -> tuple[WeightGradient, ...]:
    """The gradients of all trained matrices, in the order in which the backward computes them."""
    position = {node: i for i, node in enumerate(graph.graph.nodes)}
    shapes = {p.name: p.shape for p in graph.parameters}
    found = []
    for name, node in graph.gradients().items():
        shape = shapes[name]
        if len(shape) == 2 and name not in graph.compressed:
            terms, other = _terms(node)
            found.append(WeightGradient(name, (shape[0], shape[1]), node, () if other else terms, other))
    return tuple(sorted(found, key=lambda gradient: position[gradient.node]))


def _terms(gradient: fx.Node) -> tuple[tuple[Matrix, ...], str]:
    """The products that a gradient is the sum of; and the operator that computes part of it in another way, if any."""
    terms: list[Matrix] = []
    stack = [Matrix(gradient, False, 1.0)]
    while stack:
        outer = stack.pop()
        inner = as_matrix(outer.leaf)
        node, transposed, scale = inner.leaf, outer.transposed != inner.transposed, outer.scale * inner.scale
        if node.target is aten.mm.default:
            terms.append(Matrix(node, transposed, scale))
        elif node.target is aten.add.Tensor and len(node.args) == 2 and _adds_matrices(node):
            left, right = cast(tuple[fx.Node, fx.Node], node.args)
            alpha = float(node.kwargs.get("alpha", 1))  # type: ignore[arg-type]
            stack += [Matrix(right, transposed, scale * alpha), Matrix(left, transposed, scale)]
        elif node.target is aten._to_copy.default:  # rounded
            stack.append(Matrix(node.all_input_nodes[0], transposed, scale))
        else:
            return (), str(node.target)
    return tuple(terms), ""


def _adds_matrices(node: fx.Node) -> bool:
    """Whether an addition has two operands of its own shape, so that it is a sum of two parts of the gradient."""
    tensors = [a for a in node.args if isinstance(a, fx.Node) and isinstance(a.meta.get("val"), Tensor)]
    return len(tensors) == 2 and all(same_shape(node, a) for a in tensors)

"""Gradients of weights as sums of matrix products: what a linear map of the gradient can be applied to, factor by factor."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from graphopt.analysis.products import scalar_factor
from graphopt.analysis.row_rules import VIEWS
from graphopt.graph import TrainingGraph

aten = torch.ops.aten

_SAME_VALUES = frozenset({aten.clone.default, aten.alias.default, aten.detach.default, aten._to_copy.default})


@dataclass(frozen=True)
class Term:
    """`scale` times a product, or its transpose.

    Attributes:
        node: `aten.mm`.
        transposed: the gradient has the transpose of the product.
    """

    node: fx.Node
    transposed: bool
    scale: float

    @property
    def factors(self) -> tuple[fx.Node, fx.Node]:
        """The product's operands."""
        left, right = self.node.args
        assert isinstance(left, fx.Node)
        assert isinstance(right, fx.Node)
        return left, right


@dataclass(frozen=True)
class WeightGradient:
    """The gradient of one matrix.

    Attributes:
        name: of the parameter.
        shape: (m, n).
        node: the gradient as the graph returns it.
        terms: its sum; empty where it is not a sum of products.
        other: what it is computed by besides products, "" if nothing.
    """

    name: str
    shape: tuple[int, int]
    node: fx.Node
    terms: tuple[Term, ...]
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


def _terms(gradient: fx.Node) -> tuple[tuple[Term, ...], str]:
    """The products that a gradient is the sum of; and the operator that computes part of it in another way, if any."""
    terms: list[Term] = []
    stack = [(gradient, False, 1.0)]
    while stack:
        node, transposed, scale = stack.pop()
        sources = node.all_input_nodes
        if node.target is aten.mm.default:
            terms.append(Term(node, transposed, scale))
        elif _transposes(node):
            stack.append((sources[0], not transposed, scale))
        elif node.target is aten.add.Tensor and len(node.args) == 2 and _adds_matrices(node):
            alpha = float(node.kwargs.get("alpha", 1))  # type: ignore[arg-type]
            stack += [(node.args[1], transposed, scale * alpha), (node.args[0], transposed, scale)]  # type: ignore[list-item]
        elif (factor := scalar_factor(node)) is not None:
            stack.append((sources[0], transposed, scale * factor))
        elif node.target in _SAME_VALUES or (node.target in VIEWS and _same_shape(node, sources[0])):
            stack.append((sources[0], transposed, scale))
        else:
            return (), str(node.target)
    return tuple(terms), ""


def _transposes(node: fx.Node) -> bool:
    if node.target is aten.permute.default:
        return list(node.args[1]) in ([1, 0], [-1, 0], [1, -2], [-1, -2])  # type: ignore[arg-type]
    if node.target is aten.transpose.int:
        return {int(d) % 2 for d in node.args[1:]} == {0, 1}  # type: ignore[arg-type]
    return node.target is aten.t.default


def _adds_matrices(node: fx.Node) -> bool:
    """Whether an addition has two operands of its own shape, so that it is a sum of two parts of the gradient."""
    return all(isinstance(a, fx.Node) and _same_shape(node, a) for a in node.args)


def _same_shape(left: fx.Node, right: fx.Node) -> bool:
    shapes = [getattr(n.meta.get("val"), "shape", None) for n in (left, right)]
    return all(s is not None and all(isinstance(d, int) for d in s) for s in shapes) and shapes[0] == shapes[1]

"""The products that give the gradients of linear layers' weights: dW = dZ' Z, summed over rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from graphopt.passes.base import numbered
from torch import Tensor, fx

from graphopt.analysis.batch_dims import NoRows, batch_dim, gradient_cone
from graphopt.compat import pytree
from graphopt.graph import TrainingGraph, reached

aten = torch.ops.aten

_PASSED = frozenset({
    aten.t.default, aten.transpose.int, aten.permute.default, aten.view.default, aten._unsafe_view.default, aten.reshape.default,
    aten.add.Tensor, aten.clone.default, aten._to_copy.default, aten.alias.default, aten.detach.default,
})  # fmt: skip
"""What may stand between a product and the gradient of which it is a term, so that the variance of one is that of the other."""

_LINEAR = _PASSED | {
    aten.sum.dim_IntList, aten.sum.default, aten.neg.default, aten.sub.Tensor, aten.div.Tensor, aten.div.Scalar, aten.mul.Tensor,
    aten.mul.Scalar, aten.expand.default, aten.unsqueeze.default, aten.squeeze.dim,
}  # fmt: skip
"""Operators that are linear in gradients, if no two of those are multiplied and none divides."""


@dataclass(frozen=True)
class WeightProduct:
    """A product in a weight's gradient that sums over rows (samples, or tokens of samples).

    Attributes:
        name: of the parameter; further products of the same parameter are numbered.
        node: the product, (m x rows) by (rows x n).
        tokens: rows per sample.
    """

    name: str
    node: fx.Node
    tokens: int


def find_weight_products(graph: TrainingGraph) -> tuple[WeightProduct, ...]:
    """The products over rows in the gradients of a joint graph with a symbolic batch."""
    cone = gradient_cone(graph)
    found: dict[fx.Node, WeightProduct] = {}
    for name, gradient in graph.gradients().items():
        for node in reached([gradient], lambda node: node.all_input_nodes if node.target in _PASSED and node in cone else ()):
            tokens = _tokens(graph, cone, node)
            if tokens is not None and node not in found:
                found[node] = WeightProduct(numbered(name, (other.name for other in found.values())), node, tokens)
    return tuple(found[node] for node in graph.graph.nodes if node in found)


def linear_products(graph: TrainingGraph) -> tuple[WeightProduct, ...]:
    """Those that go into gradients by linear operators alone: their terms may be left out where samples are not independent.

    None where an input of torch's own orders operators with effects, or a gradient's size is not a multiple of the batch's.
    """
    cone = gradient_cone(graph)
    try:
        for value in (leaf for node in cone for leaf in pytree.tree_leaves(node.meta.get("val")) if isinstance(leaf, Tensor)):
            batch_dim(graph, value)
    except NoRows:
        return ()
    if any(desc.kind == "input" and not isinstance(desc.target, int) for desc in graph.inputs):
        return ()
    return tuple(
        p
        for p in find_weight_products(graph)
        if all(_is_linear(user, cone) for user in reached(p.node.users, lambda node: node.users))
    )


def _is_linear(node: fx.Node, cone: set[fx.Node]) -> bool:
    if node.op == "output":
        return True
    gradients = [n in cone and isinstance(n.meta.get("val"), Tensor) for n in node.args if isinstance(n, fx.Node)]
    multiplied = node.target is aten.mul.Tensor and gradients.count(True) > 1
    divides = node.target is aten.div.Tensor and len(gradients) > 1 and gradients[1]
    value = node.meta.get("val")
    rounded = isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex())
    return node.target in _LINEAR and not multiplied and not divides and not rounded


def _tokens(graph: TrainingGraph, cone: set[fx.Node], node: fx.Node) -> int | None:
    """Rows per sample that a product sums over, if it multiplies one gradient by one activation; else None."""
    if node.target is not aten.mm.default or node not in cone:
        return None
    left, right = node.args
    assert isinstance(left, fx.Node)
    assert isinstance(right, fx.Node)
    if (left in cone) == (right in cone):
        return None
    try:
        rows, columns = batch_dim(graph, left.meta["val"]), batch_dim(graph, right.meta["val"])
    except NoRows:
        return None
    if rows is None or columns is None or rows.dim != 1 or columns.dim != 0:
        return None
    return rows.inner

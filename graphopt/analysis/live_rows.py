"""Which part of a weight's gradient rows can be other than zero.

A classifier reads one token of the last layer. In the backward every other token's gradient is zero until attention mixes them,
so that the layers above learn from one row per sample, although their products run over all of them. Found on the joint graph:
operators that embed a gradient in zeros start it, and whatever computes row by row passes it on.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from graphopt.analysis.batch_dims import gradient_cone
from graphopt.graph import TrainingGraph

aten = torch.ops.aten

_SAME_ELEMENTS = frozenset({
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.unsqueeze.default, aten.clone.default,
    aten.alias.default, aten.detach.default, aten._to_copy.default,
})  # fmt: skip
_SUMMED = frozenset({aten.add.Tensor, aten.mul.Tensor, aten.mul.Scalar, aten.t.default, aten.transpose.int, aten.permute.default})
"""With those, what may stand between the operator that sums over rows and the gradient of a weight."""

_ALONG_LAST = frozenset({aten.native_layer_norm_backward.default, aten._softmax_backward_data.default})
"""Operators that mix a gradient along its last dimension alone."""

_SCALED = frozenset({aten.mul.Tensor, aten.mul.Scalar, aten.neg.default, aten.div.Tensor, aten.div.Scalar})
"""Pointwise operators that are 0 where the gradient is."""

_ADDED = {aten.add.Tensor: (0, 1), aten.sub.Tensor: (0, 1), aten.where.self: (1, 2),
          aten.masked_fill.Scalar: (0, 2), aten.masked_fill.Tensor: (0, 2)}  # fmt: skip
"""Pointwise operators that are 0 where all that they add or choose from is; which arguments that are."""

_QUERIES_FIRST = ("_scaled_dot_product_flash_attention_for_cpu_backward", "_scaled_dot_product_flash_attention_backward",
                  "_scaled_dot_product_efficient_attention_backward", "_scaled_dot_product_cudnn_attention_backward")  # fmt: skip
"""Backwards of attention: a query's gradient is zero where the gradient of its output is; keys and values mix all rows."""


@dataclass(frozen=True)
class Rows:
    """Elements of a contiguous tensor that can be other than zero: those at index // inner % size in a range.

    Attributes:
        inner: elements after the dimension.
        size: of the dimension.
        kept: (start, stop, step) along it.
    """

    inner: int
    size: int
    kept: tuple[int, int, int]

    @property
    def part(self) -> float:
        """How much of the dimension it is."""
        return len(range(*self.kept)) / self.size


def live_parts(graph: TrainingGraph) -> dict[str, float]:
    """Per parameter, the part of the rows in its gradient's sum that can be other than zero, in [0, 1]."""
    cone, found = gradient_cone(graph), dict[fx.Node, Rows]()
    for node in graph.graph.nodes:
        if node in cone and node.op == "call_function":
            rows = _rows(graph, node, [found.get(n) for n in node.all_input_nodes if n in cone], cone, found)
            if rows is not None and 0 not in _shape(graph, node):
                found[node] = rows
    parts = {}
    for name, gradient in graph.gradients().items():
        reductions = _reductions(gradient, cone)
        terms = [max(_part_of_sum(graph, node, n, found.get(n)) for n in inputs) for node, inputs in reductions]
        parts[name] = min(1.0, sum(terms)) if terms else 1.0
    return parts


def _reductions(gradient: fx.Node, cone: set[fx.Node]) -> list[tuple[fx.Node, list[fx.Node]]]:
    """Every operator whose result is a term of a weight's gradient, with its inputs that carry gradients."""
    stack, seen, terms = [gradient], set[fx.Node](), []
    while stack:
        node = stack.pop()
        if node in seen or node not in cone:
            continue
        seen.add(node)
        if node.target in _SAME_ELEMENTS or node.target in _SUMMED or node.target is operator.getitem:
            stack.extend(node.all_input_nodes)
        else:
            terms.append((node, [n for n in node.all_input_nodes if n in cone]))
    return [(node, inputs) for node, inputs in terms if inputs]


def _part_of_sum(graph: TrainingGraph, node: fx.Node, source: fx.Node, rows: Rows | None) -> float:
    """How much of what `node` sums over can be other than zero; 1 where `rows` of its input `source` are not along that."""
    if rows is None:
        return 1.0
    shape, target = _shape(graph, source), node.target
    count = len(shape)
    if target in (aten.mm.default, aten.bmm.default):
        summed = {count - 1} if source is node.args[0] else {count - 2}
    elif target is aten.sum.dim_IntList:
        summed = {int(d) % count for d in node.args[1]}  # type: ignore[union-attr, arg-type]
    elif target is aten.native_layer_norm_backward.default:
        summed = set(range(count - len(node.args[2])))  # type: ignore[arg-type]
    elif target is aten.convolution_backward.default:
        summed = {0, *range(2, count)}
    elif target is aten.embedding_dense_backward.default:
        summed = set(range(count - 1))
    else:
        return 1.0
    return rows.part if _dim(shape, rows) in summed else 1.0


def _rows(
    graph: TrainingGraph, node: fx.Node, inputs: Sequence[Rows | None], cone: set[fx.Node], found: dict[fx.Node, Rows]
) -> Rows | None:
    """The rows of a node's result that can be other than zero; None: all, or unknown.

    Args:
        inputs: the same of its inputs that carry gradients.
    """
    target: Any = node.target
    if target in (aten.select_backward.default, aten.slice_backward.default):
        same = _shape(graph, node.args[0]) == _shape(graph, node)
        return _embedded(graph, node) or (inputs[0] if inputs and same else None)
    if not inputs or inputs[0] is None:
        return _right_of_product(graph, node, found) if target is aten.bmm.default else None
    rows = inputs[0]
    if target in _SAME_ELEMENTS:
        return rows
    if target is operator.getitem:
        return rows if node.args[1] == 0 else None
    if target in (aten.t.default, aten.transpose.int, aten.permute.default):
        return _permuted(graph, node, rows)
    if target in (aten.mm.default, aten.bmm.default):
        left = node.args[0]
        return _resized(graph, left, node, rows) if left in found else _right_of_product(graph, node, found)
    if target is aten.sum.dim_IntList:
        return _summed(graph, node, rows)
    if target in _ALONG_LAST:
        return rows if rows.inner % _mixed(graph, node) == 0 else None
    if getattr(target, "__name__", "").partition(".")[0] in _QUERIES_FIRST:
        return _resized(graph, node.args[0], node, rows)
    if _keeps_zeros(node, cone) and all(other == rows for other in inputs):
        same = _shape(graph, node) == _shape(graph, next(n for n in node.all_input_nodes if n in cone))
        return rows if same else None
    return None


def _keeps_zeros(node: fx.Node, cone: set[fx.Node]) -> bool:
    """Whether an operator is pointwise, and 0 wherever all its inputs that carry gradients are."""
    target: Any = node.target
    if target in _ADDED:
        return all(node.args[k] in cone or _is_zero(node.args[k]) for k in _ADDED[target])
    backward = torch.Tag.pointwise in getattr(target, "tags", ()) and target.__name__.partition(".")[0].endswith("_backward")
    return target is aten.mul.Tensor or ((target in _SCALED or backward) and node.args[0] in cone)


def _is_zero(value: Any) -> bool:
    if isinstance(value, fx.Node):
        return value.target in (aten.scalar_tensor.default, aten.full.default, aten.full_like.default) and bool(
            value.args[-1] == 0
        )
    return isinstance(value, (int, float)) and value == 0


def _mixed(graph: TrainingGraph, node: fx.Node) -> int:
    """Of an operator along the last dimensions: how many elements it mixes; all where it is along others."""
    shape = _shape(graph, node.args[0])
    along: Any = node.args[2]
    if isinstance(along, int):
        return shape[-1] if along % len(shape) == len(shape) - 1 else math.prod(shape)
    return math.prod(shape[len(shape) - len(along) :])


def _shape(graph: TrainingGraph, node: Any) -> list[int]:
    value = node.meta["val"]
    value = value[0] if isinstance(value, (tuple, list)) else value
    return [graph.at(size, graph.batch_size) for size in value.shape]


def _embedded(graph: TrainingGraph, node: fx.Node) -> Rows | None:
    """Of a gradient that is put into a larger tensor of zeros; None where it fills it."""
    shape = _shape(graph, node)
    dim = node.args[2]
    assert isinstance(dim, int)
    dim %= len(shape)
    size, inner = shape[dim], math.prod(shape[dim + 1 :])
    if node.target is aten.select_backward.default:
        index = node.args[3]
        assert isinstance(index, int)
        return Rows(inner, size, (index % size, index % size + 1, 1)) if size > 1 else None
    if not all(isinstance(arg, int) for arg in node.args[3:6]):
        return None
    kept = slice(*node.args[3:6]).indices(size)
    return Rows(inner, size, kept) if len(range(*kept)) < size else None


def _permuted(graph: TrainingGraph, node: fx.Node, rows: Rows) -> Rows | None:
    """Where the rows are after dimensions have changed places; None where they are spread over several."""
    before = _shape(graph, node.args[0])
    if node.target is aten.t.default:
        order = list(range(len(before)))[::-1]
    elif node.target is aten.permute.default:
        order = [int(d) % len(before) for d in node.args[1]]  # type: ignore[union-attr, arg-type]
    else:
        order = list(range(len(before)))
        one, other = (int(d) % len(before) for d in node.args[1:3])  # type: ignore[arg-type]
        order[one], order[other] = order[other], order[one]
    dim = _dim(before, rows)
    if dim is None:
        return None
    below = math.prod(before[d] for d in order[order.index(dim) + 1 :])
    return replace(rows, inner=rows.inner // math.prod(before[dim + 1 :]) * below)


def _dim(shape: Sequence[int], rows: Rows) -> int | None:
    """The dimension that the rows are in, or are a part of; None where they are spread over several."""
    for dim, size in enumerate(shape):
        inner = math.prod(shape[dim + 1 :])
        if rows.inner % inner == 0 and inner * size % (rows.inner * rows.size) == 0 and size > 1:
            return dim
    return None


def _resized(graph: TrainingGraph, source: Any, node: fx.Node, rows: Rows) -> Rows | None:
    """After the last dimension was multiplied away, if the rows are not in it."""
    last, new = _shape(graph, source)[-1], _shape(graph, node)[-1]
    return replace(rows, inner=rows.inner // last * new) if rows.inner % last == 0 else None


def _right_of_product(graph: TrainingGraph, node: fx.Node, found: dict[fx.Node, Rows]) -> Rows | None:
    """Of a product whose right factor has its rows in the last dimension, as of a transposed gradient."""
    right = node.args[1]
    rows = found.get(right) if isinstance(right, fx.Node) else None
    last = _shape(graph, node)[-1]
    return rows if rows is not None and last % (rows.inner * rows.size) == 0 and node.args[0] not in found else None


def _summed(graph: TrainingGraph, node: fx.Node, rows: Rows) -> Rows | None:
    """After a sum over the last dimensions, as in a norm that is computed row by row."""
    before = _shape(graph, node.args[0])
    dims = sorted(int(d) % len(before) for d in node.args[1])  # type: ignore[union-attr, arg-type]
    if dims != list(range(len(before) - len(dims), len(before))):
        return None
    gone = math.prod(before[d] for d in dims)
    return replace(rows, inner=rows.inner // gone) if rows.inner % gone == 0 else None

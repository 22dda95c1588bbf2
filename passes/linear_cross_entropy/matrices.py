"""Heads as matrices with a row for each token, whatever dimensions the model gives its logits; their losses one by one.

A model's logits are a product (N, V), seen as (samples, steps, V), changed element by element, cut to the steps that have a
label, and seen as (N', V) again for the loss. Here views move behind what works element by element, where two of them cancel; the
cut moves in front of the product; in the backward, zeros that are put in the place of what was cut move behind the products.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from graphopt.analysis.products import same_shape
from graphopt.analysis.row_rules import MEAN, NLL, NLL_BACKWARD, NONE, VIEWS, arguments, is_elementwise
from graphopt.compat import expression
from graphopt.errors import GraphoptError
from graphopt.graph import TrainingGraph, reached
from graphopt.transforms.edit import CHECKPOINTED, ORIGIN, insert_node

aten = torch.ops.aten

PRODUCTS = frozenset({aten.mm.default, aten.addmm.default})
_ALONG: dict[Any, int] = {aten._log_softmax.default: 1, aten._log_softmax_backward_data.default: 2}
"""Operators along a dimension, and where among their arguments it is."""
_OF_ONE = frozenset({aten.neg.default, aten.clone.default, aten._to_copy.default, aten.detach.default, aten.alias.default})


class NotSeparable(GraphoptError):
    """A head whose tokens cannot be worked on in chunks."""


def as_matrices(graph: TrainingGraph) -> None:
    """Bring every head of a graph to that form, in place; the values that it computes stay the same."""
    losses = graph.graph.find_nodes(op="call_function", target=NLL)
    for loss in losses:
        value = arguments(loss)[0].meta["val"]
        if value.dim() == 2 and isinstance(value.shape[1], int):
            _one_by_one(graph, loss)
    widths = {arguments(loss)[0].meta["val"].shape[-1] for loss in losses}
    for width in widths:
        if isinstance(width, int):
            _Matrices(graph, width).apply()
    graph.eliminate_dead_code()


def _emit(anchor: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A new node before another, of the same half of the step, and computed again where that is."""
    return insert_node(anchor.graph, target, args, anchor, kwargs, (*ORIGIN, *CHECKPOINTED, "partitioner_tag"))


def _one_by_one(graph: TrainingGraph, loss: fx.Node) -> None:
    """Have a loss that is summed over tokens computed for each, and summed then."""
    log_probabilities, labels, weight, reduction, ignored = arguments(loss)
    if reduction == NONE:
        return
    dtype = log_probabilities.meta["val"].dtype
    exact = torch.promote_types(dtype, torch.float32)
    both = _emit(loss, NLL, log_probabilities, labels, weight, NONE, ignored)
    counts = _emit(loss, aten.ne.Scalar, labels, ignored)
    each = _emit(loss, aten._to_copy.default, counts, dtype=exact)
    if weight is not None:
        zero = _emit(loss, aten.zeros_like.default, labels)
        own = _emit(loss, aten.index.Tensor, weight, [_emit(loss, aten.where.self, counts, labels, zero)])
        each = _emit(loss, aten.mul.Tensor, own, each)
    total = _emit(loss, aten.sum.default, each)
    summed = _emit(loss, aten.sum.default, _emit(loss, operator.getitem, both, 0), dtype=exact)
    result = _emit(loss, aten.div.Tensor, summed, total) if reduction == MEAN else summed
    if exact != dtype:
        result = _emit(loss, aten._to_copy.default, result, dtype=dtype)
    results = (result, _emit(loss, aten._to_copy.default, total, dtype=dtype) if exact != dtype else total)
    for node in graph.graph.find_nodes(op="call_function", target=NLL_BACKWARD):
        gradient, probabilities, its_labels, its_weight, its_reduction, its_ignored, its_total = arguments(node)
        if its_total not in loss.users or its_labels is not labels or its_reduction != reduction:
            continue
        scaled = _emit(node, aten.div.Tensor, gradient, total) if reduction == MEAN else gradient
        ones = _emit(node, aten.ones_like.default, labels, dtype=dtype)
        scaled = _emit(node, aten._to_copy.default, _emit(node, aten.mul.Tensor, ones, scaled), dtype=dtype)
        node.args = (scaled, probabilities, labels, its_weight, NONE, its_ignored, its_total)
    for user in list(loss.users):
        user.replace_all_uses_with(results[arguments(user)[1]])


class _Matrices:
    """One sweep over a graph.

    Attributes:
        width: V.
        rows: by node of more dimensions, what it is a view of, and its sizes but the last.
        zeros: by node, what it is among zeros; the sizes of that but the last; and the operators that put it there.
        turned: by node, what it is the transpose of among those.
        kept: products that are read by more than the loss.
    """

    def __init__(self, graph: TrainingGraph, width: int) -> None:
        self.graph = graph
        self.width = width
        self.rows: dict[fx.Node, tuple[fx.Node, list[Any]]] = {}
        self.zeros: dict[fx.Node, tuple[fx.Node, list[Any], tuple[fx.Node, ...]]] = {}
        self.turned: dict[fx.Node, fx.Node] = {}
        self.kept = _read_elsewhere(graph)

    def apply(self) -> None:
        for node in list(self.graph.graph.nodes):
            if node.op != "call_function" or not isinstance(node.meta.get("val"), Tensor):
                continue
            if node.target in VIEWS:
                self._view(node)
            elif node.target is aten.slice.Tensor:
                self._cut(node)
            elif node.target is aten.slice_backward.default:
                self._put_back(node)
            elif any(n in self.zeros or n in self.turned for n in node.all_input_nodes):
                self._behind(node)
            elif (is_elementwise(node.target) or _is_along_rows(node)) and any(n in self.rows for n in node.all_input_nodes):
                self._row_by_row(node)

    def _is_wide(self, node: fx.Node) -> bool:
        shape = node.meta["val"].shape
        return len(shape) > 1 and isinstance(shape[-1], int) and shape[-1] == self.width

    def _view(self, node: fx.Node) -> None:
        source, sizes = arguments(node)[:2]
        if not self._is_wide(node) or not self._is_wide(source):
            return
        if source in self.zeros:
            self.zeros[node] = self.zeros[source]
            return
        if source.meta["val"].dim() > 2 and source not in self.rows:
            return
        matrix = self.rows[source][0] if source in self.rows else source
        if node.meta["val"].dim() == 2:
            node.replace_all_uses_with(matrix)
        elif -1 not in sizes[:-1]:
            self.rows[node] = (matrix, list(sizes[:-1]))

    def _cut(self, node: fx.Node) -> None:
        source, *given = arguments(node)
        if source not in self.rows:
            return
        matrix, lead = self.rows[source]
        if same_shape(node, source):
            self.rows[node] = (matrix, lead)
            return
        if given and given[0] % (len(lead) + 1) == len(lead):
            return
        sizes: list[Any] = []
        try:
            part = self._part(matrix, lead, node, {}, sizes)
        except NotSeparable:
            return
        self.rows[node] = (part, sizes)

    def _part(self, node: fx.Node, lead: list[Any], cut: fx.Node, known: dict[fx.Node, fx.Node], sizes: list[Any]) -> fx.Node:
        """The rows of a matrix that a cut leaves, of what it is computed from as far as that is possible."""
        if node in known:
            return known[node]
        args = arguments(node)
        if node.target in PRODUCTS and node not in self.kept:
            *added, left, right = args[:3]
            if any(len(a.meta["val"].shape) != 1 for a in added):
                raise NotSeparable("something is added to logits in another form")
            found = _emit(cut, node.target, *added, self._part(left, lead, cut, known, sizes), right, **node.kwargs)
        elif is_elementwise(node.target) and self._is_wide(node):
            rows = node.meta["val"].shape[0]
            inputs = {n: n if self._for_all(n, rows) else self._part(n, lead, cut, known, sizes) for n in node.all_input_nodes}
            args, kwargs = fx.map_arg((args, dict(node.kwargs)), inputs.__getitem__)
            found = _emit(cut, node.target, *args, **kwargs)
        elif isinstance(node.meta["val"], Tensor) and node.meta["val"].dim() == 2:
            width = node.meta["val"].shape[1]
            taken = _emit(cut, aten.slice.Tensor, _emit(cut, aten.view.default, node, [*lead, width]), *arguments(cut)[1:])
            if not sizes:
                shape = taken.meta["val"].shape[:-1]
                sizes += [s if isinstance(s, int) else _emit(cut, aten.sym_size.int, taken, d) for d, s in enumerate(shape)]
            found = _emit(cut, aten.reshape.default, taken, [-1, width])
        else:
            raise NotSeparable("what logits are computed from has no rows")
        known[node] = found
        return found

    @staticmethod
    def _for_all(node: fx.Node, rows: Any) -> bool:
        """Whether each of so many rows reads all of a value."""
        value = node.meta["val"]
        if not isinstance(value, Tensor) or value.dim() < 2:
            return True
        return _is_one(value.shape[0]) and not _is_one(rows)

    def _row_by_row(self, node: fx.Node) -> None:
        """f(a view) is a view of f."""
        lead = next(self.rows[n][1] for n in node.all_input_nodes if n in self.rows)
        shape, inputs = node.meta["val"].shape, {}
        if len(shape) != len(lead) + 1 or not self._is_wide(node):
            return
        for argument in node.all_input_nodes:
            value = argument.meta["val"]
            if argument in self.rows and same_shape(argument, node):
                inputs[argument] = self.rows[argument][0]
            elif self._for_all(argument, 1):
                inputs[argument] = argument
            elif all(size == 1 for size in value.shape[:-1]):
                inputs[argument] = _emit(node, aten.reshape.default, argument, [-1])
            elif value.dim() == len(shape) and _same(value.shape[:-1], shape[:-1]):
                inputs[argument] = _emit(node, aten.reshape.default, argument, [-1, value.shape[-1]])
            else:
                return
        args, kwargs = fx.map_arg((arguments(node), dict(node.kwargs)), inputs.__getitem__)
        if (place := _ALONG.get(node.target)) is not None:
            args = (*args[:place], 1, *args[place + 1 :])
        found = _emit(node, node.target, *args, **kwargs)
        view = _emit(node, aten.view.default, found, [*lead, self.width])
        node.replace_all_uses_with(view)
        self.rows[view] = (found, lead)

    def _put_back(self, node: fx.Node) -> None:
        source, _, dim, *_ = arguments(node)
        if dim % node.meta["val"].dim() == node.meta["val"].dim() - 1:
            return
        if source in self.rows:
            matrix, lead = self.rows[source]
            self.zeros[node] = (matrix, lead, (node,))
        elif source in self.zeros:
            matrix, lead, steps = self.zeros[source]
            self.zeros[node] = (matrix, lead, (*steps, node))

    def _behind(self, node: fx.Node) -> None:
        """What is computed of a tensor among zeros, with the zeros put there afterwards."""
        args, target = arguments(node), node.target
        first = args[0]
        if first in self.zeros and (target in _OF_ONE or (target is aten.mul.Tensor and not isinstance(args[1], fx.Node))):
            matrix, lead, steps = self.zeros[first]
            self.zeros[node] = (_emit(node, target, matrix, *args[1:], **node.kwargs), lead, steps)
        elif first in self.zeros and target in (aten.t.default, aten.transpose.int, aten.permute.default):
            if first.meta["val"].dim() == 2 and node.meta["val"].shape[0] == self.width:
                self.turned[node] = first
        elif first in self.zeros and target is aten.sum.dim_IntList and list(args[1]) == [0] and first.meta["val"].dim() == 2:
            node.replace_all_uses_with(_emit(node, target, self.zeros[first][0], *args[1:], **node.kwargs))
        elif target is aten.mm.default and first in self.zeros and args[1] not in self.zeros:
            matrix, lead, steps = self.zeros[first]
            found, width = _emit(node, target, matrix, args[1]), node.meta["val"].shape[1]
            found = _emit(node, aten.reshape.default, found, [*lead, width])
            for step in steps:
                _, sizes, *rest = arguments(step)
                found = _emit(node, step.target, found, [*sizes[:-1], width], *rest)
            node.replace_all_uses_with(_emit(node, aten.reshape.default, found, [-1, width]))
        elif target is aten.mm.default and first in self.turned and args[1] not in self.zeros:
            matrix = self.zeros[self.turned[first]][0]
            own = self._taken(args[1], self.zeros[self.turned[first]][2], node)
            node.replace_all_uses_with(_emit(node, target, _emit(node, aten.t.default, matrix), own))
        elif target is aten.mm.default and len(args) == 2 and args[1] in self.zeros and first not in self.turned:
            matrix, _, steps = self.zeros[args[1]]
            own = self._taken(_emit(node, aten.t.default, first), steps, node)
            node.replace_all_uses_with(_emit(node, target, _emit(node, aten.t.default, own), matrix))

    def _taken(self, node: fx.Node, steps: Sequence[fx.Node], anchor: fx.Node) -> fx.Node:
        """The rows of a matrix that are in the places where others were put among zeros."""
        width = node.meta["val"].shape[1]
        node = _emit(anchor, aten.reshape.default, node, [*arguments(steps[-1])[1][:-1], width])
        for step in reversed(steps):
            _, _, *rest = arguments(step)
            node = _emit(anchor, aten.slice.Tensor, node, *rest)
        return _emit(anchor, aten.reshape.default, node, [-1, width])


def _read_elsewhere(graph: TrainingGraph) -> set[fx.Node]:
    """Products that outputs of the forward read otherwise than summed over the vocabulary."""
    ends = (NLL, aten.sum.dim_IntList)
    read = reached(graph.forward_results(), lambda node: () if node.target in ends else node.all_input_nodes)
    return {node for node in read if node.target in PRODUCTS}


def _is_along_rows(node: fx.Node) -> bool:
    place = _ALONG.get(node.target)
    return place is not None and arguments(node)[place] % node.meta["val"].dim() == node.meta["val"].dim() - 1


def _same(sizes: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(sizes) == len(others) and all(expression(a) == expression(b) for a, b in zip(sizes, others, strict=True))


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1

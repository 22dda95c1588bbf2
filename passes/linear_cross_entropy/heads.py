"""Heads: from hidden states by a product to logits, by a softmax and labels to a loss, and back to gradients."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import fx

from graphopt.analysis.batch_dims import gradient_cone
from graphopt.analysis.row_axes import Axis, Read, Rules, arguments, first_value
from graphopt.errors import GraphoptError
from graphopt.graph import TrainingGraph, ancestors

aten = torch.ops.aten

PRODUCTS = frozenset({aten.mm.default, aten.addmm.default})
NLL, NLL_BACKWARD = aten.nll_loss_forward.default, aten.nll_loss_backward.default
MEAN, SUM = 1, 2
"""Of `nll_loss_forward`: its `reduction`."""


class NotSeparable(GraphoptError):
    """A head whose tokens cannot be worked on in chunks."""


@dataclass(frozen=True)
class Head:
    """A head whose logits can be computed for some tokens at a time.

    Attributes:
        name: of the weight.
        loss: the node of the loss.
        backward: of its gradient.
        length: how many steps the tokens can be divided into: of the sequence, or of the batch.
        start: where these are among the N tokens of the loss.
        tokens: N, of the batch.
        wide: nodes with N x V elements or more that are computed in chunks, and where the tokens are in them.
        in_full: those of the forward that others read, too: they are computed for all tokens, and read in chunks.
        rows: gradients with a row for each token that leave the head, such as that of the hidden states.
        sums: gradients that sum over tokens, such as that of the weight, and where the tokens are in what they read.
        saved_bytes: of logits and gradients of logits that need not be held at once.
    """

    name: str
    loss: fx.Node
    backward: fx.Node
    length: int
    start: Axis
    tokens: int
    wide: Mapping[fx.Node, Axis]
    in_full: frozenset[fx.Node]
    rows: Mapping[fx.Node, Axis]
    sums: Mapping[fx.Node, Read]
    saved_bytes: int

    @property
    def weights_bytes(self) -> int:
        """Of what is summed over tokens."""
        return sum(node.meta["val"].nbytes for node in self.sums)


@dataclass
class _Search:
    """What was found so far; see `Head`."""

    rules: Rules
    size: int
    forward: dict[fx.Node, Axis] = field(default_factory=dict)
    backward: dict[fx.Node, Axis] = field(default_factory=dict)
    rows: dict[fx.Node, Axis] = field(default_factory=dict)
    sums: dict[fx.Node, Read] = field(default_factory=dict)

    def is_wide(self, node: fx.Node) -> bool:
        """Whether a tensor has as many elements as the logits."""
        value = first_value(node)
        return value is not None and value.numel() >= self.size

    def visit(self, node: fx.Node, axis: Axis) -> None:
        """Follow what rows of a node of the forward are computed from, up to what is smaller."""
        waiting = [(node, axis)]
        while waiting:
            node, axis = waiting.pop()
            if node in self.forward:
                if self.forward[node] != axis:
                    raise NotSeparable(f"{node.name} has its tokens in two places")
                continue
            self.forward[node] = axis
            waiting += [(n, a) for n, a in self.read(node, axis).items() if a is not None and self.is_wide(n)]

    def read(self, node: fx.Node, axis: Axis) -> Read:
        """See `Rules.read`."""
        read = self.rules.read(node, axis)
        if read is None:
            raise NotSeparable(f"tokens of the logits are not computed one by one ({node.target})")
        return read


def find_heads(graph: TrainingGraph) -> tuple[list[Head], dict[str, str]]:
    """Every head that can be worked on in chunks, and reason by name of those that cannot."""
    heads: list[Head] = []
    left_alone: dict[str, str] = {}
    for node in graph.graph.find_nodes(op="call_function", target=NLL):
        try:
            heads.append(_head(graph, node))
        except NotSeparable as reason:
            left_alone[_name(graph, node)] = str(reason)
    return heads, left_alone


def _head(graph: TrainingGraph, loss: fx.Node) -> Head:
    softmax, target, _, reduction, _ = arguments(loss)
    value = first_value(softmax)
    assert value is not None
    if value.dim() != 2 or not all(isinstance(size, int) for size in value.shape):
        raise NotSeparable("the number of tokens is not known before the step runs")
    if reduction not in (MEAN, SUM):
        raise NotSeparable("the loss is not summed over tokens")
    if any(n.meta["val"].dtype == torch.float16 for n in (softmax, *softmax.all_input_nodes)):
        raise NotSeparable("float16 is too coarse for gradients without the scale of the loss")
    reasons = []
    for length, start in _divisions(softmax):
        try:
            return _divided(graph, loss, length, start)
        except NotSeparable as reason:
            reasons.append(reason)
    raise reasons[0]


def _divisions(softmax: fx.Node) -> list[tuple[int, Axis]]:
    """Along what the tokens may be divided: all of them, the steps of the sequence, or samples."""
    tokens, node = softmax.meta["val"].shape[0], softmax
    found = [(tokens, Axis(0))]
    while node.target not in PRODUCTS and node.all_input_nodes:
        node = node.all_input_nodes[0]
        value = first_value(node)
        if value is not None and value.dim() == 3:
            samples, steps = value.shape[:2]
            for length, axis in ((steps, Axis(0)), (samples, Axis(0, tokens // samples if tokens % samples == 0 else 1))):
                if isinstance(length, int) and 1 < length < tokens and tokens % (length * axis.inner) == 0:
                    found.append((length, axis))
    return list(dict.fromkeys(found))


def _divided(graph: TrainingGraph, loss: fx.Node, length: int, start: Axis) -> Head:
    softmax, target, *_ = arguments(loss)
    value = softmax.meta["val"]
    found = _Search(Rules(graph, length), value.numel())
    found.visit(softmax, start)
    products = [node for node in found.forward if node.target in PRODUCTS]
    if not products or any(found.is_wide(n) for p in products for n in p.all_input_nodes if n in found.forward):
        raise NotSeparable("the logits are not a product of fewer numbers")
    gradients = [n for n in graph.graph.find_nodes(op="call_function", target=NLL_BACKWARD) if arguments(n)[2] is target]
    gradients = [n for n in gradients if _original(arguments(n)[1]) is _original(softmax)]
    if len(gradients) != 1:
        raise NotSeparable("its gradient is not that of one loss")
    _follow(graph, found, gradients[0], start)
    in_full = _read_by_others(found, loss)
    used = [n for n in (*found.forward, *found.backward) if n.target not in _FREE and n not in in_full]
    largest = sorted((n.meta["val"].nbytes for n in used), reverse=True)[:2]
    return Head(
        _name(graph, loss), loss, gradients[0], length, start, value.shape[0], {**found.forward, **found.backward},
        frozenset(in_full), found.rows, found.sums, sum(largest),
    )  # fmt: skip


_FREE = frozenset({
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.t.default, aten.transpose.int, aten.detach.default,
    aten.alias.default, aten.slice.Tensor,
})  # fmt: skip
"""Operators that copy nothing."""


def _follow(graph: TrainingGraph, found: _Search, gradient: fx.Node, start: Axis) -> None:
    """Gradients of logits, down to where tokens are summed over, or have a row of fewer numbers."""
    cone = gradient_cone(graph)
    found.backward[gradient] = start
    for node in graph.graph.nodes:
        read = {n: found.backward[n] for n in node.all_input_nodes if n in found.backward}
        if not read or node in found.backward:
            continue
        if not found.rules.is_linear(node, read):
            raise NotSeparable(f"a gradient of the logits is not passed on as it comes ({node.target})")
        if (summed := found.rules.summed(node, read)) is not None:
            found.sums[node] = summed
            reads: Read = summed
        else:
            first, there = next(iter(read.items()))
            axis = found.rules.written(node, first, there)
            if axis is None:
                raise NotSeparable(f"gradients of tokens are not computed one by one ({node.target})")
            (found.backward if found.is_wide(node) else found.rows)[node] = axis
            reads = found.read(node, axis)
        if any(reads.get(n) != where for n, where in read.items()):
            raise NotSeparable(f"{node.name} reads tokens in two places")
        for other, where in reads.items():
            if other in found.backward:
                continue
            if other in cone:
                raise NotSeparable("the logits have a gradient from elsewhere, too")
            if where is not None and found.is_wide(other):
                found.visit(other, where)


def _read_by_others(found: _Search, loss: fx.Node) -> set[fx.Node]:
    """Nodes of the forward that more than the head reads; what only these read is not computed in chunks either."""
    inside = {*found.forward, *found.backward, *found.rows, *found.sums, loss}
    for node in found.backward:
        if any(user not in inside for user in node.users):
            raise NotSeparable(f"gradients of the logits are read elsewhere ({node.name})")
    in_full = {node for node in found.forward if any(user not in inside for user in node.users)}
    before = ancestors(in_full)
    return in_full | {node for node in found.forward if node in before and node.target in PRODUCTS}  # else computed twice


def _original(node: fx.Node) -> fx.Node:
    while node.target in (aten.detach.default, aten.alias.default):
        node = arguments(node)[0]
    return node


def _name(graph: TrainingGraph, loss: fx.Node) -> str:
    """The largest parameter that the last product before a loss reads."""
    names, node = graph.parameter_nodes(), loss
    seen: set[fx.Node] = set()
    waiting = [arguments(loss)[0]]
    while waiting:
        node = waiting.pop(0)
        if node in seen:
            continue
        seen.add(node)
        if node.target in PRODUCTS:
            for argument in reversed(arguments(node)):
                while isinstance(argument, fx.Node) and argument not in names and len(argument.all_input_nodes) == 1:
                    argument = argument.all_input_nodes[0]
                if argument in names:
                    return names[argument]
        waiting += node.all_input_nodes
        if node.target is operator.getitem and len(seen) > 50:
            break
    return "the logits"

"""Heads: from hidden states by a product to logits, by a softmax and labels to losses, and back to gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from graphopt.passes.base import numbered
from graphopt.passes.linear_cross_entropy.matrices import PRODUCTS, NotSeparable
from torch import Tensor, fx

from graphopt.analysis.batch_dims import gradient_cone
from graphopt.analysis.flop_formulas import node_flops
from graphopt.analysis.row_axes import Rules
from graphopt.analysis.row_rules import NLL, NLL_BACKWARD, NONE, Axis, Read, arguments, first_value
from graphopt.compat import draws
from graphopt.graph import TrainingGraph, ancestors, descendants, parameters_read, reached
from graphopt.transforms.edit import in_one_region

aten = torch.ops.aten

BY_TOKEN = Axis(0)
_TRANSPOSED = (aten.t.default, aten.transpose.int, aten.permute.default)
_FREE = frozenset({*_TRANSPOSED, aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.detach.default})
"""Operators that copy nothing."""


@dataclass(frozen=True)
class Head:
    """A head whose logits can be computed for some tokens at a time.

    Attributes:
        name: of the weight.
        loss: the node of the tokens' losses.
        tokens: N, of the batch that the graph was captured with; `symbolic`: the graph holds for other numbers, too.
        inside: what is computed in chunks, in order, and where the tokens are in it.
        rows, whole: what that reads with a row for each token, and as it is.
        in_full: those of `rows` that are logits: others read them, too.
        losses: nodes with a number for each token, such as its loss.
        gradients: with a row for each token, such as that of the hidden states.
        sums: gradients that sum over tokens, such as that of the weight, and where the tokens are in what they read.
        tangent: the gradient of the loss, which all of these are proportional to.
        flops: per token.
        saved_bytes: of logits and gradients of logits that need not be held at once.
        weights_bytes: of what is summed over tokens.
    """

    name: str
    loss: fx.Node
    tokens: int
    symbolic: bool
    inside: Mapping[fx.Node, Axis]
    rows: tuple[fx.Node, ...]
    whole: tuple[fx.Node, ...]
    in_full: frozenset[fx.Node]
    losses: tuple[fx.Node, ...]
    gradients: tuple[fx.Node, ...]
    sums: Mapping[fx.Node, Read]
    tangent: fx.Node
    flops: int
    saved_bytes: int
    weights_bytes: int


@dataclass
class _Search:
    """What was found so far; see `Head`. `reads` is what comes from outside."""

    rules: Rules
    size: int
    cone: set[fx.Node]
    inside: dict[fx.Node, Axis] = field(default_factory=dict)
    reads: dict[fx.Node, Axis | None] = field(default_factory=dict)
    losses: dict[fx.Node, None] = field(default_factory=dict)
    gradients: dict[fx.Node, None] = field(default_factory=dict)
    sums: dict[fx.Node, Read] = field(default_factory=dict)

    def is_wide(self, node: fx.Node) -> bool:
        """Whether a tensor has as many elements as the logits."""
        if first_value(node) is None or node.op != "call_function":
            return False
        return math.prod(self.rules.shape(node)) >= self.size

    def include(self, node: fx.Node, axis: Axis) -> None:
        """Compute rows of a node in chunks, and all of what they are computed from that is as large."""
        waiting = [(node, axis)]
        while waiting:
            node, axis = waiting.pop()
            if node in self.inside:
                if self.inside[node] != axis:
                    raise NotSeparable(f"{node.name} has its tokens in two places")
                continue
            if node not in self.cone and axis == BY_TOKEN and self.rules.read(node, axis) is None:
                self.reads[node] = axis  # logits that are computed in another way
                continue
            self.inside[node] = axis
            waiting += self.read(self.rules_of(node, axis))

    def read(self, reads: Read) -> list[tuple[fx.Node, Axis]]:
        """Note what is read from outside; returns what is to be computed in chunks, too."""
        more = []
        for node, axis in reads.items():
            if axis is not None and (self.is_wide(node) or (axis != BY_TOKEN and node.target in _TRANSPOSED)):
                more.append((node, axis))
            elif self.reads.setdefault(node, axis) != axis or axis not in (None, BY_TOKEN):
                raise NotSeparable(f"{node.name} has its tokens in two places")
            elif not isinstance(node.meta.get("val"), Tensor):
                raise NotSeparable(f"{node.name} is no tensor")
        return more

    def rules_of(self, node: fx.Node, axis: Axis) -> Read:
        if node.target is NLL_BACKWARD:
            gradient, probabilities, labels, weight, reduction, *_ = arguments(node)
            if reduction != NONE:
                raise NotSeparable("its gradient is not that of one loss")
            given: dict[fx.Node, Axis | None] = {gradient: axis, probabilities: axis, labels: axis}
            return given if weight is None else {**given, weight: None}
        found = self.rules.read(node, axis)
        if found is None:
            raise NotSeparable(f"tokens of the logits are not computed one by one ({node.target})")
        return found


def find_heads(graph: TrainingGraph) -> tuple[list[Head], dict[str, str]]:
    """Every head that can be worked on in chunks, and reason by name of those that cannot.

    Args:
        graph: after `as_matrices`.
    """
    heads: list[Head] = []
    left_alone: dict[str, str] = {}
    for node in graph.graph.find_nodes(op="call_function", target=NLL):
        if any(node in head.losses for head in heads):
            continue
        try:
            head = _head(graph, node)
            heads.append(replace(head, name=numbered(head.name, (other.name for other in heads))))
        except NotSeparable as reason:
            left_alone[_name(graph, node)] = str(reason)
    for node in graph.graph.find_nodes(op="call_function", target=aten.nll_loss2d_forward.default):
        left_alone.setdefault(
            _name(graph, node), "its logits are (N, vocabulary, ...) for the loss: make them (tokens, vocabulary)"
        )
    return heads, left_alone


def _head(graph: TrainingGraph, loss: fx.Node) -> Head:
    softmax, *_, reduction, _ = arguments(loss)
    value = first_value(softmax)
    assert value is not None
    if value.dim() != 2 or reduction != NONE or not isinstance(value.shape[1], int):
        raise NotSeparable("it is not a matrix of tokens and vocabulary")
    length = Rules(graph, 1).shape(softmax)[0]
    if length == 1:
        raise NotSeparable("there is one token")
    found = _Search(Rules(graph, length), length * value.shape[1], gradient_cone(graph))
    found.include(softmax, BY_TOKEN)
    size = -1
    while size != len(found.inside):
        size = len(found.inside)
        _follow(graph, found)
    if not found.sums and not found.gradients:
        raise NotSeparable("no gradient of its logits is recognised")
    products = [node for node in found.inside if node.target in PRODUCTS and node not in found.cone]
    if any(found.is_wide(n) for product in products for n in product.all_input_nodes if n in found.inside):
        raise NotSeparable("the logits are not a product of fewer numbers")
    return _checked(graph, found, loss, graph.at(value.shape[0], graph.batch_size), not isinstance(value.shape[0], int))


def _follow(graph: TrainingGraph, found: _Search) -> None:
    """What reads logits, or gradients of logits."""
    below = descendants(found.inside) - found.cone
    ends = (found.losses, found.gradients, found.sums)
    for node in graph.graph.nodes:
        if node in found.inside or any(node in known for known in ends):
            continue
        read = {n: found.inside[n] for n in node.all_input_nodes if n in found.inside}
        if node in found.cone and read:
            _backward(found, node, read)
        elif node.target is NLL and read:
            _, labels, weight, reduction, _ = arguments(node)
            if reduction != NONE:
                raise NotSeparable("its loss is not that of single tokens")
            found.read({labels: BY_TOKEN, **({} if weight is None else {weight: None})})
            found.losses[node] = None
        elif node in below and node.target is not NLL and any(map(found.is_wide, node.all_input_nodes)):
            _number_per_token(found, node, read)


def _number_per_token(found: _Search, node: fx.Node, read: Mapping[fx.Node, Axis]) -> None:
    """What is computed of each token's logits, if it is."""
    if first_value(node) is None or found.is_wide(node) or not found.rules.carries(node, BY_TOKEN):
        return
    reads = found.rules.read(node, BY_TOKEN) or {}
    if not reads or any(reads.get(n) != axis for n, axis in read.items()):
        return
    for more in found.read(reads):
        found.include(*more)
    found.losses[node] = None


def _backward(found: _Search, node: fx.Node, read: Mapping[fx.Node, Axis]) -> None:
    """A node of the backward that reads logits, or gradients of logits."""
    gradients = {n: axis for n, axis in read.items() if n in found.cone}
    if node.target is NLL_BACKWARD or not gradients:
        if not found.is_wide(node):
            raise NotSeparable(f"gradients of tokens are not computed one by one ({node.target})")
        found.include(node, BY_TOKEN)
        return
    if (summed := found.rules.summed(node, gradients)) is not None:
        found.sums[node] = reads = summed
    else:
        first, there = next(iter(gradients.items()))
        axis = found.rules.written(node, first, there)
        if axis is None:
            raise NotSeparable(f"gradients of tokens are not computed one by one ({node.target})")
        if found.is_wide(node):
            found.include(node, axis)
            return
        if axis != BY_TOKEN:
            raise NotSeparable(f"{node.name} has its tokens in another place")
        found.gradients[node], reads = None, found.rules_of(node, axis)
    if any(reads.get(n) != where for n, where in read.items()):
        raise NotSeparable(f"{node.name} reads tokens in two places")
    for more in found.read(reads):
        found.include(*more)


def _require_linear(found: _Search, nodes: Iterable[fx.Node]) -> None:
    """Gradients are computed for a gradient of the loss of one, and scaled afterwards."""
    for node in nodes:
        if node not in found.cone:
            continue
        given = {n: found.inside.get(n, BY_TOKEN) for n in node.all_input_nodes if n in found.cone}
        one = list(given) == [arguments(node)[0]]
        if not (one if node.target is NLL_BACKWARD else found.rules.is_linear(node, given)):
            raise NotSeparable(f"a gradient of the logits is not passed on as it comes ({node.target})")


def _checked(graph: TrainingGraph, found: _Search, loss: fx.Node, tokens: int, symbolic: bool) -> Head:
    ends = {*found.losses, *found.gradients, *found.sums}
    for node in found.inside:
        if node in found.cone and any(user not in found.inside and user not in ends for user in node.users):
            raise NotSeparable(f"gradients of the logits are read elsewhere ({node.name})")
    _require_linear(found, [*found.inside, *found.gradients, *found.sums])
    in_full = _read_by_others(found, ends)
    inside, reads = _needed(found, ends, in_full)
    if not in_one_region((*inside, *ends)):
        raise NotSeparable("a graph break divides it")
    if ancestors(reads) & {*ends, *(inside & found.cone)}:
        raise NotSeparable("what its tokens give is read again by them")
    if any(value.dtype == torch.float16 for n in inside if (value := first_value(n)) is not None):
        raise NotSeparable("float16 is too coarse for gradients without the scale of the loss")
    order = {node: i for i, node in enumerate(graph.graph.nodes)}
    first = min(order[node] for node in found.losses)  # what is read later is computed there once more
    if any(draws(n) and (n in inside or order[n] > first) for n in {*inside, *found.gradients, *found.sums, *ancestors(reads)}):
        raise NotSeparable("random numbers are drawn in it")
    rows = sorted((n for n, axis in reads.items() if axis is not None), key=order.__getitem__)
    used = sorted((graph.bytes_of(first_value(n)) for n in inside if n.target not in _FREE), reverse=True)
    flops = sum(graph.at(node_flops(n), graph.batch_size) for n in (*inside, *found.gradients, *found.sums))
    return Head(
        name=_name(graph, loss),
        loss=loss,
        tokens=tokens,
        symbolic=symbolic,
        inside={n: found.inside[n] for n in sorted(inside, key=order.__getitem__)},
        rows=tuple(rows),
        whole=tuple(sorted((n for n, axis in reads.items() if axis is None), key=order.__getitem__)),
        in_full=frozenset(in_full),
        losses=tuple(sorted(found.losses, key=order.__getitem__)),
        gradients=tuple(found.gradients),
        sums=found.sums,
        tangent=_tangent(graph, found, [n for n in reads if n in found.cone]),
        flops=flops // tokens,
        saved_bytes=sum(used[:2]),
        weights_bytes=sum(graph.bytes_of(first_value(n)) for n in found.sums),
    )


def _read_by_others(found: _Search, ends: set[fx.Node]) -> set[fx.Node]:
    """Nodes of the forward that more than the head reads; what only these read is not computed in chunks either."""
    forward = [node for node in found.inside if node not in found.cone]
    in_full = {node for node in forward if any(user not in found.inside and user not in ends for user in node.users)}
    before = ancestors(in_full)
    return in_full | {node for node in forward if node in before and node.target in PRODUCTS}  # else computed twice


def _needed(found: _Search, ends: set[fx.Node], in_full: set[fx.Node]) -> tuple[set[fx.Node], dict[fx.Node, Axis | None]]:
    """What is computed in chunks where logits come from outside, and what is read then."""
    inside: set[fx.Node] = set()
    reads: dict[fx.Node, Axis | None] = {}
    chunked = found.inside.keys() - in_full
    starts = [n for end in ends for n in end.all_input_nodes]
    for node in reached(starts, lambda node: node.all_input_nodes if node in chunked else ()):
        if node in chunked:
            inside.add(node)
        elif node in in_full:
            if found.inside[node] != BY_TOKEN:
                raise NotSeparable(f"{node.name} has its tokens in another place")
            reads[node] = BY_TOKEN
        elif node in found.reads:
            reads[node] = found.reads[node]
    return inside, reads


def _tangent(graph: TrainingGraph, found: _Search, gradients: list[fx.Node]) -> fx.Node:
    """The gradient of the loss, if all that comes from the backward is a known multiple of it."""
    above = ancestors(gradients)
    placeholders = zip(graph.inputs, graph.placeholders, strict=True)
    tangents = [node for desc, node in placeholders if desc.kind == "tangent" and node in above]
    if len(tangents) != 1 or tangents[0].meta["val"].dim():
        raise NotSeparable("the gradients of its tokens' losses do not come from that of one loss")
    _require_linear(found, (above & found.cone) - set(tangents))
    if (above - found.cone) & descendants(found.losses):
        raise NotSeparable("the gradients of its tokens' losses depend on these")
    return tangents[0]


def _name(graph: TrainingGraph, loss: fx.Node) -> str:
    """The largest parameter that the last product before a loss reads."""
    names, node = graph.parameter_nodes(), loss
    seen: set[fx.Node] = set()
    waiting = [arguments(loss)[0]]
    while waiting and len(seen) < 200:
        node = waiting.pop(0)
        if node in seen:
            continue
        seen.add(node)
        if node.target in PRODUCTS and (read := parameters_read(node, names)):
            return names[read[0]]
        waiting += node.all_input_nodes
    return "the logits"

"""From a head to the program that computes its losses and gradients for a chunk of tokens."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from graphopt.passes.linear_cross_entropy.heads import BY_TOKEN, Head
from graphopt.passes.linear_cross_entropy.matrices import NotSeparable
from torch import Tensor, fx

from graphopt.analysis.batch_dims import gradient_cone
from graphopt.analysis.liveness import can_be_view
from graphopt.analysis.row_axes import Rules
from graphopt.analysis.row_rules import NLL, NLL_BACKWARD, VIEWS, WITH_SIZES, Axis, arguments, first_value
from graphopt.compat import expression
from graphopt.graph import TrainingGraph
from graphopt.ops.by_tokens import BLOCK_BYTES, Program, Result, log_softmax_, softmax_gradient_

aten = torch.ops.aten


_ONE_BY_ONE = frozenset({aten.neg.default, aten.mul.Scalar, aten.div.Scalar, aten._to_copy.default})
"""Operators between what is computed of a token and the mask that hides it."""


_OF_SIZES = frozenset({
    aten.full.default, aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.zeros.default,
    aten.ones.default, aten.slice.Tensor,
})  # fmt: skip
"""Further operators to which numbers of tokens are sizes."""


@dataclass(frozen=True)
class Written:
    """A program, and what it needs.

    Attributes:
        program: takes `head.rows` and `head.whole`; returns `head.losses`, `head.gradients` and `head.sums`.
        graph: that its source was written from.
        row_bytes: of what is copied for a token before the program runs.
    """

    program: Program
    graph: fx.Graph
    row_bytes: int


class Writer:
    """Writes the program of a head."""

    def __init__(self, graph: TrainingGraph, head: Head) -> None:
        self.graph, self.head = graph, head
        self.rules = Rules(graph, Rules(graph, 1).shape(head.losses[0])[0])
        self.program = fx.Graph()
        self.count = self.program.placeholder("count")
        self.made: dict[fx.Node, fx.Node] = {}
        for kind, nodes in (("row", head.rows), ("whole", head.whole)):
            for i, node in enumerate(nodes):
                self.made[node] = self.program.placeholder(f"{kind}_{i}")
                self.made[node].meta = {"val": node.meta["val"]}
        self.tokens = {expression(node.meta["val"].shape[0]) for node in head.rows}  # one number, by whatever formula
        self.skips = self._skips()

    def write(self) -> Written:
        """The program.

        Raises:
            NotSeparable: a size in it depends on the batch.
        """
        head, results, values = self.head, [], []
        labels, ignored = arguments(head.loss)[1], arguments(head.loss)[4] if self.skips else None
        for node in (*head.losses, *head.gradients):
            values.append(self._loss(node) if node.target is NLL else self._again(node))
            results.append(self._result("rows", node))
        for node in head.sums:
            if node.target is aten.mm.default:
                values += [self._of(n) for n in arguments(node)[:2]]
                results.append(self._result("product", node))
            else:
                values.append(self._again(node))
                results.append(self._result("sum", node))
        self.program.output(tuple(values))
        source = self.program.python_code("self").src
        program = Program(source, tuple(results), head.rows.index(labels), ignored)
        row_bytes = self.graph.bytes_of([first_value(n) for n in head.rows]) // head.tokens if ignored is not None else 0
        return Written(program, self.program, row_bytes)

    def _skips(self) -> bool:
        """Whether tokens whose label is ignored may be left out: nothing reads what they give, and gradients are zero."""
        _, labels, _, _, ignored = arguments(self.head.loss)
        for node in self.head.losses:
            if node.target is NLL:
                if arguments(node)[1] is not labels or arguments(node)[4] != ignored:
                    return False
            elif not self._is_masked(node, labels, ignored):
                return False
        cone, zeros = gradient_cone(self.graph), self._zeros(labels, ignored)
        ends = (*self.head.gradients, *self.head.sums)
        return all(node in zeros for end in ends for node in end.all_input_nodes if node in cone)

    def _zeros(self, labels: fx.Node, ignored: int) -> Mapping[fx.Node, Axis]:
        """Gradients whose rows are zero where the label is ignored, and where their tokens are.

        Logits that more than the loss reads, such as an auxiliary loss or a teacher's, have gradients for every token.
        """
        zeros: dict[fx.Node, Axis] = {}
        for node in self.graph.graph.nodes:
            if node.op != "call_function" or not isinstance(node.meta.get("val"), Tensor):
                continue
            axis = self.head.inside.get(node, BY_TOKEN)
            if node.target is NLL_BACKWARD:
                zero = arguments(node)[2] is labels and arguments(node)[5] == ignored
            elif node.target is aten.masked_fill.Scalar and arguments(node)[2] == 0 and _masks(node, labels, ignored):
                zero = axis == BY_TOKEN
            elif any(n in zeros for n in node.all_input_nodes):
                reads = self.rules.read(node, axis) or {}
                zero = self.rules.keeps_zeros(node, {n: zeros[n] for n in reads if n in zeros and reads[n] == zeros[n]})
            else:
                zero = False
            if zero:
                zeros[node] = axis
        return zeros

    def _is_masked(self, node: fx.Node, labels: fx.Node, ignored: int) -> bool:
        """Whether all that reads a number for each token puts another in its place where the label is ignored."""

        def masks(user: fx.Node) -> bool:
            if user.target is aten.masked_fill.Scalar:
                return _masks(user, labels, ignored)
            return user.target in _ONE_BY_ONE and self._is_masked(user, labels, ignored)

        return bool(node.users) and all(map(masks, node.users))

    def _result(self, kind: str, node: fx.Node) -> Result:
        value = first_value(node)
        assert value is not None
        shape = value.shape[1:] if kind == "rows" else value.shape
        if not all(isinstance(size, int) for size in shape):
            raise NotSeparable(f"a size of {node.name} depends on the batch")
        return Result(kind, tuple(shape), str(value.dtype).removeprefix("torch."))

    def _of(self, node: fx.Node) -> fx.Node:
        """A node of the head, for the chunk."""
        if node not in self.made:
            self.made[node] = self._softmax(node) or self._softmax_gradient(node) or self._again(node)
        return self.made[node]

    def _loss(self, node: fx.Node) -> fx.Node:
        """The losses of an `NLL`."""
        if node not in self.made:
            self.made[node] = self._call(NLL, tuple(self._map(arguments(node))), {}, node)
        found = self.program.call_function(operator.getitem, (self.made[node], 0))
        found.meta = {"val": node.meta["val"][0], "tokens": self.tokens}
        return found

    def _softmax(self, node: fx.Node) -> fx.Node | None:
        """A softmax in the place of logits that nothing else reads."""
        if node.target is not aten._log_softmax.default or arguments(node)[2]:
            return None
        logits, dim, _ = arguments(node)
        fresh = not can_be_view(logits) if logits in self.head.inside else self.skips  # rows are copied where some are left out
        if not fresh or self._readers(logits) | self._losses_of(logits) != {node} or dim % 2 != 1 or node.meta["val"].dim() != 2:
            return None
        return self._call(log_softmax_, (self._of(logits),), {}, node)

    def _softmax_gradient(self, node: fx.Node) -> fx.Node | None:
        """The gradients of an NLL loss and of its softmax at once, in the place of the softmax, where nothing else reads it."""
        if node.target is not aten._log_softmax_backward_data.default:
            return None
        nll, softmax = _original(arguments(node)[0]), _original(arguments(node)[1])
        same_dtype = node.meta["val"].dtype == softmax.meta["val"].dtype
        if nll.target is not NLL_BACKWARD or softmax not in self.head.inside or not same_dtype:
            return None
        gradient, probabilities, labels, weight, _, ignored, _ = arguments(nll)
        readers = self._readers(softmax) - {nll, node} | set(filter(can_be_view, self._losses_of(softmax)))
        if _original(probabilities) is not softmax or readers or len(_users_behind_views(nll)) != 1:
            return None
        args = (self._of(softmax), self._of(gradient), self._of(labels), weight and self._of(weight), ignored)
        return self._call(softmax_gradient_, args, {}, node)

    def _readers(self, node: fx.Node) -> set[fx.Node]:
        later = {*self.head.inside, *self.head.gradients, *self.head.sums}
        return {user for user in _users_behind_views(node) if user in later}

    def _losses_of(self, node: fx.Node) -> set[fx.Node]:
        """Numbers for each token that read a tensor; they are computed before gradients."""
        return {user for user in _users_behind_views(node) if user in self.head.losses}

    def _again(self, node: fx.Node) -> fx.Node:
        target, sized = node.target, node.target in WITH_SIZES or node.target in _OF_SIZES
        args = list(self._map(arguments(node)[: 6 if target is NLL_BACKWARD else None], sized))
        if target is NLL_BACKWARD:
            nll = next(n for n in self.head.losses if n.target is NLL)  # the total weight of its tokens, which it does not use
            self._loss(nll)
            args += [None]
            args[6] = self.program.call_function(operator.getitem, (self.made[nll], 1))
            args[6].meta = {"val": nll.meta["val"][1], "tokens": self.tokens}
        if target in WITH_SIZES:
            if node in self.head.sums or self.head.inside.get(node, BY_TOKEN) != BY_TOKEN:
                raise NotSeparable(f"{node.name} has its tokens in another place")
            sizes = list(args[1])
            sizes[0] = -1 if target in VIEWS else self.count
            args[1] = sizes
            target = aten.reshape.default if target in VIEWS else target
        return self._call(target, tuple(args), self._map(dict(node.kwargs), sized), node)

    def _map(self, given: Any, sized: bool = False) -> Any:
        """Arguments for the chunk: `sized` where the number of tokens among them is a size, and no number to calculate with."""

        def one(node: fx.Node) -> Any:
            if node in self.made or node in self.head.inside:
                return self._of(node)
            if isinstance(value := node.meta.get("val"), torch.SymInt) and sized and expression(value) in self.tokens:
                return self.count
            raise NotSeparable(f"{node.name} is a number that depends on the batch")

        return fx.map_arg(given, one)

    def _call(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], like: fx.Node) -> fx.Node:
        node = self.program.call_function(target, args, kwargs)
        node.meta = {"val": like.meta["val"], "tokens": self.tokens}
        return node


def workspace(written: Written, tokens: int) -> int:
    """Bytes that exist while a program runs on a chunk of so many tokens, beside its arguments and results."""
    live, most, sizes = written.row_bytes * tokens, 0, {}
    nodes = list(written.graph.nodes)
    last: dict[fx.Node, int] = {}
    owner: dict[fx.Node, fx.Node] = {}
    for i, node in enumerate(nodes):
        for read in node.all_input_nodes:
            last[owner.get(read, read)] = i
        in_place = node.target in (log_softmax_, softmax_gradient_, operator.getitem) or can_be_view(node)
        if node.op == "call_function" and in_place:
            first = node.args[0]
            assert isinstance(first, fx.Node)
            owner[node] = owner.get(first, first)
    for i, node in enumerate(nodes):
        if node.op != "call_function":
            continue
        if node not in owner:
            sizes[node] = _bytes_of_chunk(node, tokens)
            live += sizes[node]
        most = max(most, live)
        if node.target is log_softmax_:
            most = max(most, live + min(max(BLOCK_BYTES, _bytes_of_chunk(node, 1)), _bytes_of_chunk(node, tokens)))
        live -= sum(size for other, size in sizes.items() if last.get(other) == i)
    return most


def _bytes_of_chunk(node: fx.Node, tokens: int) -> int:
    total = 0
    values = node.meta["val"] if isinstance(node.meta["val"], (tuple, list)) else (node.meta["val"],)
    for value in values:
        sizes = (tokens if expression(size) in node.meta["tokens"] else int(size) for size in value.shape)
        total += math.prod(sizes) * value.element_size()
    return total


def _masks(node: fx.Node, labels: fx.Node, ignored: int) -> bool:
    """Whether a `masked_fill` hides what has an ignored label."""
    mask = arguments(node)[1]
    return mask.target is aten.eq.Scalar and arguments(mask)[0] is labels and arguments(mask)[1] == ignored


def _users_behind_views(node: fx.Node) -> list[fx.Node]:
    """What reads a tensor, or the same under another name."""
    found = []
    for user in node.users:
        found += _users_behind_views(user) if user.target in (aten.detach.default, aten.alias.default) else [user]
    return found


def _original(node: fx.Node) -> fx.Node:
    while node.target in (aten.detach.default, aten.alias.default):
        node = arguments(node)[0]
    return node

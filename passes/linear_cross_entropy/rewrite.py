"""A head in chunks of tokens: loss and gradients of each chunk are computed together, in the forward.

The gradients are those for a gradient of the loss of one; the backward multiplies them by the one that comes (and, where the
loss is a mean, divides by the tokens' total weight). So no more than one chunk of logits is there at a time, and none is
computed twice. This is what Liger's kernels do by hand (Hsu et al., 2024, "Liger Kernel").
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import graphopt.passes.linear_cross_entropy.ops  # noqa: F401  registers the operator
import torch
from graphopt.passes.linear_cross_entropy.heads import MEAN, NLL, NLL_BACKWARD, SUM, Head
from torch import fx

from graphopt.analysis.batch_dims import gradient_cone
from graphopt.analysis.row_axes import Axis, Rules, arguments
from graphopt.compat import IN_FORWARD, fake_mode_of
from graphopt.errors import PassError
from graphopt.graph import TrainingGraph
from graphopt.transforms.edit import ORIGIN, insert_node
from graphopt.transforms.rows import joined_rows, on_some_rows, some_rows, split_rows

aten = torch.ops.aten


def in_chunks(graph: TrainingGraph, head: Head, chunks: int) -> None:
    """Compute a head in `chunks` parts, or fewer where its length is less, in place."""
    _Chunking(graph, head).apply(chunks)


@dataclass(frozen=True)
class _Part:
    """What a chunk gives; see `Head`."""

    loss: fx.Node
    total_weight: fx.Node
    rows: dict[fx.Node, fx.Node]
    sums: dict[fx.Node, fx.Node]


class _Chunking:
    def __init__(self, graph: TrainingGraph, head: Head) -> None:
        self.graph = graph
        self.head = head
        self.rules = Rules(graph, head.length)
        self.cone = gradient_cone(graph)
        self.anchor = head.loss
        self.place = {node: i for i, node in enumerate(graph.graph.nodes)}
        self.early: dict[fx.Node, fx.Node] = {}
        self.fake_mode = fake_mode_of([node.meta["val"] for node in graph.placeholders])

    def apply(self, chunks: int) -> None:
        """See `in_chunks`."""
        head = self.head
        step = -(-head.length // chunks)
        loss = total_weight = None
        rows: dict[fx.Node, list[fx.Node]] = {node: [] for node in head.rows}
        sums: dict[fx.Node, fx.Node] = {}
        for start in range(0, head.length, step):
            before: list[fx.Node] = [] if loss is None else [loss, *sums.values(), *(parts[-1] for parts in rows.values())]
            part = self._chunk(start, min(start + step, head.length), before)
            loss, total_weight = self._add(loss, part.loss), self._add(total_weight, part.total_weight)
            for node, gradient in part.rows.items():
                rows[node].append(gradient)
            for node, gradient in part.sums.items():
                sums[node] = self._add(sums.get(node), self._wide_enough(gradient))
        assert loss is not None
        assert total_weight is not None
        mean = arguments(head.loss)[3] == MEAN
        if mean:
            loss = self._emit(aten.div.Tensor, (loss, total_weight))
        gradients = {**{node: self._whole(node, axis, rows[node]) for node, axis in head.rows.items()}, **sums}
        for gradient in gradients.values():
            gradient.meta.update(IN_FORWARD)  # else chunks of logits may be kept for the backward
        self._replace_results(loss, total_weight)
        scale = arguments(head.backward)[0]
        if mean:  # where no token counts, the loss is not a number, and every gradient is zero
            self.anchor = head.backward
            none = self._emit(aten.eq.Scalar, (total_weight, 0), backward=True)
            some = self._emit(aten.masked_fill.Scalar, (total_weight, none, 1), backward=True)
            scale = self._emit(aten.div.Tensor, (scale, some), backward=True)
        for node, gradient in gradients.items():
            self.anchor = node
            scaled = self._emit(aten.mul.Tensor, (gradient, scale), backward=True)
            if scaled.meta["val"].dtype != node.meta["val"].dtype:
                scaled = self._emit(aten._to_copy.default, (scaled,), {"dtype": node.meta["val"].dtype}, backward=True)
            node.replace_all_uses_with(scaled)
        self.graph.eliminate_dead_code()

    def _replace_results(self, loss: fx.Node, total_weight: fx.Node) -> None:
        for user in list(self.head.loss.users):
            if user.target is operator.getitem:
                user.replace_all_uses_with(loss if arguments(user)[1] == 0 else total_weight)

    def _chunk(self, start: int, stop: int, before: list[fx.Node]) -> _Part:
        """Loss, total weight and gradients of some tokens, which are begun when the nodes in `before` are there."""
        made: dict[tuple[fx.Node, Axis], fx.Node] = {}

        def taken(node: fx.Node, axis: Axis | None) -> fx.Node:
            """What a node gives for these tokens; all that it gives where `axis` is None."""
            if axis is None:
                return self._early(node)
            if (node, axis) in made:
                return made[node, axis]
            inside = self.head.wide.get(node) == axis and node not in self.head.in_full
            if inside and node.target is NLL_BACKWARD:
                result = gradient()
            elif inside:
                result = again(node, self.rules.read(node, axis) or {}, axis)
            else:
                result = some_rows(self.rules, self._early(node), axis, start, stop, self._emit)
                if before and node not in self.head.in_full:
                    result = self._emit(torch.ops.graphopt.after.default, (result, before))
            made[node, axis] = result
            return result

        def again(node: fx.Node, read: Any, axis: Axis | None) -> fx.Node:
            inputs = {n: taken(n, read.get(n)) for n in node.all_input_nodes}
            args, kwargs = fx.map_arg((arguments(node), node.kwargs), inputs.__getitem__)
            target = node.target
            if axis is not None:
                target, args = on_some_rows(self.rules, node, args, axis, stop - start)
            return self._emit(target, args, kwargs)

        softmax, target, weight, _, ignored = arguments(self.head.loss)
        labels = taken(target, self.head.start)
        weight = weight if weight is None else self._early(weight)
        log_probabilities = taken(softmax, self.head.start)
        both = self._emit(NLL, (log_probabilities, labels, weight, SUM, ignored))
        loss, total = (self._emit(operator.getitem, (both, i)) for i in (0, 1))

        def gradient() -> fx.Node:
            value = loss.meta["val"]
            one = self._emit(aten.full.default, ([], 1.0), {"dtype": value.dtype, "device": value.device})
            return self._emit(NLL_BACKWARD, (one, log_probabilities, labels, weight, SUM, ignored, total))

        rows = {node: again(node, self.rules.read(node, axis) or {}, axis) for node, axis in self.head.rows.items()}
        sums = {node: again(node, read, None) for node, read in self.head.sums.items()}
        return _Part(loss, total, rows, sums)

    def _early(self, node: fx.Node) -> fx.Node:
        """A node of the forward as it is before the loss, repeated there if it comes later."""
        if node in self.cone:
            raise PassError(f"{node.name} depends on the gradient of an output")
        if self.place.get(node, -1) < self.place[self.head.loss]:
            return node
        if node not in self.early:
            args, kwargs = fx.map_arg((node.args, node.kwargs), self._early)
            self.early[node] = self._emit(node.target, args, kwargs)
        return self.early[node]

    def _whole(self, node: fx.Node, axis: Axis, parts: list[fx.Node]) -> fx.Node:
        """The parts of a tensor put together."""
        per_step = node.meta["val"].shape[axis.dim] // self.head.length
        split = [split_rows(self.rules, p, axis, p.meta["val"].shape[axis.dim] // per_step, self._emit) for p in parts]
        return joined_rows(self._emit(aten.cat.default, ([part for part, _ in split], split[0][1])), node, axis, self._emit)

    def _wide_enough(self, part: fx.Node) -> fx.Node:
        """In single precision at least, in which parts are added up."""
        if part.meta["val"].dtype.itemsize >= 4:
            return part
        return self._emit(aten._to_copy.default, (part,), {"dtype": torch.float32})

    def _add(self, total: fx.Node | None, part: fx.Node) -> fx.Node:
        return part if total is None else self._emit(aten.add.Tensor, (total, part))

    def _emit(self, target: Any, args: Any, kwargs: dict[str, Any] | None = None, backward: bool = False) -> fx.Node:
        node = insert_node(self.graph.graph, target, tuple(args), self.anchor, kwargs, ORIGIN, self.fake_mode)
        node.meta["partitioner_tag"] = "is_backward" if backward else "is_forward"
        return node

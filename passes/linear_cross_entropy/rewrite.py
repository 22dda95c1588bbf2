"""A head in chunks of tokens: losses and gradients of each chunk are computed together, in the forward.

The gradients are those for a gradient of the loss of one; the backward multiplies them by the one that comes. So no more than one
chunk of logits is there at a time, and none is computed twice. This is what Liger's kernels do by hand (Hsu et al., 2024, "Liger
Kernel").
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from graphopt.passes.linear_cross_entropy.heads import Head
from graphopt.passes.linear_cross_entropy.program import Writer, workspace
from torch import fx

from graphopt.analysis.batch_dims import gradient_cone
from graphopt.analysis.row_rules import NLL, arguments
from graphopt.compat import IN_FORWARD
from graphopt.graph import TrainingGraph
from graphopt.transforms.edit import insert_node

aten = torch.ops.aten


class Chunking:
    """The rewriting of one head."""

    def __init__(self, graph: TrainingGraph, head: Head) -> None:
        self.graph = graph
        self.head = head
        self.cone = gradient_cone(graph)
        self.place = {node: i for i, node in enumerate(graph.graph.nodes)}
        self.anchor = min(head.losses, key=self.place.__getitem__)
        self.early: dict[fx.Node, fx.Node] = {}

    def apply(self, tokens: int) -> None:
        """Compute the head for so many tokens at a time, in place.

        Raises:
            NotSeparable: see `Writer`.
        """
        head, written = self.head, Writer(self.graph, self.head).write()
        rows, whole = ([self._early(node) for node in nodes] for nodes in (head.rows, head.whole))
        needed = workspace(written, tokens)
        made = self._emit(torch.ops.graphopt.by_tokens.default, (written.program.text, rows, whole, tokens, head.flops, needed))
        made.meta |= IN_FORWARD  # else chunks of logits may be computed again
        found = [self._emit(operator.getitem, (made, i)) for i in range(len(written.program.results))]
        for node, result in zip(head.losses, found, strict=False):
            if node.target is NLL:
                for user in list(node.users):
                    if arguments(user)[1] == 0:
                        user.replace_all_uses_with(result)
            else:
                node.replace_all_uses_with(result)
        gradients = dict(zip((*head.gradients, *head.sums), found[len(head.losses) :], strict=True))
        for node, gradient in gradients.items():
            gradient.meta |= IN_FORWARD
            self.anchor = node
            scaled = self._emit(aten.mul.Tensor, (gradient, head.tangent), backward=True)
            if scaled.meta["val"].dtype != node.meta["val"].dtype:
                scaled = self._emit(aten._to_copy.default, (scaled,), {"dtype": node.meta["val"].dtype}, backward=True)
            node.replace_all_uses_with(scaled)
        self.graph.eliminate_dead_code()

    def _early(self, node: fx.Node) -> fx.Node:
        """A node as it is before the losses, repeated there if it comes later; for a gradient of the loss of one."""
        if node not in self.cone and self.place.get(node, -1) < self.place[self.anchor]:
            return node
        if node.op == "get_attr":  # a constant
            self.anchor.prepend(node)
            return node
        if node not in self.early:
            if node is self.head.tangent:
                value = node.meta["val"]
                made = self._emit(aten.full.default, ([], 1.0), {"dtype": value.dtype, "device": value.device})
            else:
                args, kwargs = fx.map_arg((node.args, node.kwargs), self._early)
                made = self._emit(node.target, args, kwargs)
            self.early[node] = made
        return self.early[node]

    def _emit(self, target: Any, args: Any, kwargs: dict[str, Any] | None = None, backward: bool = False) -> fx.Node:
        node = insert_node(self.graph.graph, target, tuple(args), self.anchor, kwargs)
        node.meta["partitioner_tag"] = "is_backward" if backward else "is_forward"
        return node

"""Bring a captured joint graph to the form that analyses and passes expect."""

from __future__ import annotations

import operator

import torch

from graphopt.compat import draws
from graphopt.graph import TrainingGraph

aten = torch.ops.aten


def normalise(graph: TrainingGraph) -> None:
    """Rewrite `graph` in place; the values that it computes stay the same."""
    split_convolution_backward(graph)
    save_randomness(graph)
    graph.eliminate_dead_code()


def save_randomness(graph: TrainingGraph) -> None:
    """Inside checkpointed regions, save what random operators return instead of running them again.

    Activation checkpointing arrives as marks on forward nodes, which the partitioner carries out by repeating the nodes in the
    backward. A repeated random operator would need the random state of its first run.
    """
    for node in graph.graph.nodes:
        if "recompute" in node.meta and draws(node):
            for unmarked in (node, *(user for user in node.users if user.target is operator.getitem)):
                for key in ("recompute", "ac_graph_id"):
                    unmarked.meta.pop(key, None)


def split_convolution_backward(graph: TrainingGraph) -> None:
    """One node per gradient of a convolution.

    `convolution_backward` computes dX, dW and db in one call, under a mask. As one node, nobody could drop dW and keep
    dX; libraries run them as separate kernels anyway.
    """
    for node in list(graph.graph.nodes):
        if node.target is not aten.convolution_backward.default:
            continue
        *rest, mask = node.args
        for user in list(node.users):
            if user.target is not operator.getitem or sum(mask) == 1:
                continue
            index = user.args[1]
            with graph.graph.inserting_before(user):
                single = graph.graph.call_function(node.target, (*rest, [i == index for i in range(3)]))
            single.meta = dict(node.meta)
            single.meta["val"] = tuple(v if i == index else None for i, v in enumerate(node.meta["val"]))
            user.args = (single, index)

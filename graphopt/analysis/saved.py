"""Bytes that the forward keeps for the backward, before any recomputation."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx
from torch.utils import _pytree as pytree

from graphopt.graph import TrainingGraph, ancestors


def saved_bytes(graph: TrainingGraph, batch_size: int | None = None) -> int:
    """Bytes of forward tensors that backward nodes read, each storage once; parameters and inputs are not counted.

    Args:
        batch_size: samples; the captured batch by default.
    """
    batch_size = batch_size or graph.batch_size
    forward = ancestors(graph.forward_results())
    storages: dict[Any, int] = {}
    for node in forward:
        if node.op != "call_function" or not any(u not in forward and u.op != "output" for u in node.users):
            continue
        source = _view_source(node)
        if source.op == "placeholder":
            continue
        for i, value in enumerate(pytree.tree_leaves(source.meta.get("val"))):
            if isinstance(value, Tensor):
                elements = 1
                for size in value.shape:
                    elements *= graph.at(size, batch_size)
                storages[source, i] = elements * value.element_size()
    return sum(storages.values())


def _view_source(node: fx.Node) -> fx.Node:
    """The node whose storage `node` is a view of (itself, if it is no view)."""
    while node.op == "call_function" and getattr(node.target, "is_view", False):
        source = node.args[0]
        if not isinstance(source, fx.Node):
            break
        node = source
    return node

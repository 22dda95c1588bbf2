"""Bytes that the forward keeps for the backward, if nothing is recomputed but what is marked so."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor, fx

from graphopt.analysis.liveness import is_view
from graphopt.compat import is_recomputed
from graphopt.graph import TrainingGraph, ancestors, reached

_TENSORS = (Tensor, tuple, list)
"""What computes with a tensor; a size that is read off it needs no memory."""


def saved_bytes(graph: TrainingGraph) -> int:
    """Bytes of forward tensors that backward nodes read, each storage once; parameters and inputs are not counted."""
    forward = ancestors(graph.forward_results())
    sources = {view_source(node) for node in forward if node.op == "call_function" and is_saved(node, forward)}
    return sum(graph.bytes_of(source.meta.get("val")) for source in sources if source.op != "placeholder")


def is_saved(node: fx.Node, forward: Collection[fx.Node]) -> bool:
    """Whether the backward, or what it computes again of the forward, reads what a node of the forward computes."""
    if is_recomputed(node):
        return False
    return any((u not in forward or is_recomputed(u)) and isinstance(u.meta.get("val"), _TENSORS) for u in node.users)


def recomputed(graph: TrainingGraph, forward: Collection[fx.Node]) -> set[fx.Node]:
    """Nodes of the forward that the backward computes a second time: marked so, and needed for a gradient."""
    gradients = [n for desc, n in zip(graph.outputs, graph.results, strict=True) if desc.kind == "gradient" and n is not None]
    needed = reached(gradients, lambda node: (n for n in node.all_input_nodes if n not in forward or is_recomputed(n)))
    return set(forward).intersection(needed)


def view_source(node: fx.Node) -> fx.Node:
    """The node whose storage `node` is a view of (itself, if it is no view)."""
    while node.op == "call_function" and is_view(node):
        source = node.args[0]
        if not isinstance(source, fx.Node):
            break
        node = source
    return node

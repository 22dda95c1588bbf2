"""Results of checkpointed regions that are kept for the backward, so that no region is computed again for what follows it.

Where the backward reads a cast of a region's result, or the mask of a clamp, Inductor's partitioner keeps neither: it computes
the cast again, and for it the region with its products. Eager mode keeps the result. torch.compile saves that memory and pays
FLOPs, which a budget counts.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from graphopt.analysis.flops import node_flops
from graphopt.analysis.saved import recomputed, view_source
from graphopt.compat import SAVE, is_kept, is_recomputed
from graphopt.graph import TrainingGraph, ancestors


def keep_region_outputs(graph: TrainingGraph) -> TrainingGraph:
    """The graph with results of regions marked to be saved where the backward would run products again that no gradient needs.

    `graph` stays as it is, and is returned where there is nothing to mark.
    """
    if not any(is_recomputed(n) and node_flops(n) != 0 for n in graph.graph.nodes):
        return graph
    graph = graph.clone()
    forward = ancestors(graph.forward_results())
    again = recomputed(graph, forward)
    left = {n for n in forward if n.op == "call_function" and is_recomputed(n) and n not in again}
    costly = {n for n in left if node_flops(n) != 0}
    read = [n for n in forward if not is_recomputed(n) and any(user not in forward or user in again for user in n.users)]
    for result in _reached(read, left):
        if _reached_from(result, left) & costly:
            view_source(result).meta.update(SAVE)
    return graph


def _reached(read: list[fx.Node], left: Collection[fx.Node]) -> list[fx.Node]:
    """Nodes among `left` from which pointwise nodes lead to those that the backward reads."""
    stack, seen = list(read), set(read)
    found = []
    while stack:
        node = stack.pop()
        if node in left:
            found.append(node)
        elif node.op == "call_function" and not is_kept(node) and node_flops(node) == 0:
            fresh = [source for source in node.all_input_nodes if source not in seen]
            seen.update(fresh)
            stack.extend(fresh)
    return found


def _reached_from(result: fx.Node, left: Collection[fx.Node]) -> set[fx.Node]:
    stack, seen = [result], {result}
    while stack:
        fresh = [source for source in stack.pop().all_input_nodes if source in left and source not in seen]
        seen.update(fresh)
        stack.extend(fresh)
    return seen

"""Products of checkpointed regions that are kept for the backward, so that none is computed again for what follows the region.

Where the backward reads a cast of a region's result, or the mask of a clamp, Inductor's partitioner keeps neither: it computes
the cast again, and for it the region with its products. Eager mode keeps the result. torch.compile saves that memory and pays
FLOPs, which a budget counts.
"""

from __future__ import annotations

from torch import Tensor, fx

from graphopt.analysis.flops import node_flops
from graphopt.analysis.saved import recomputed
from graphopt.compat import KEEP, SAVE, is_kept, is_recomputed
from graphopt.graph import TrainingGraph, ancestors, reached


def keep_last_products(graph: TrainingGraph) -> TrainingGraph:
    """The graph with products marked to be kept that the backward would otherwise run again, though no gradient needs that.

    `graph` stays as it is, and is returned where there is nothing to mark.
    """
    if not any(_is_repeatable(node) for node in graph.graph.nodes):
        return graph
    graph = graph.clone()
    forward = ancestors(graph.forward_results())
    again, kept = recomputed(graph, forward), {n for n in forward if is_kept(n)}
    read = [n for n in forward if not is_recomputed(n) and any(user not in forward or user in again for user in n.users)]

    def computed_again_from(node: fx.Node) -> list[fx.Node]:
        return [] if node in kept or node_flops(node) != 0 else [n for n in node.all_input_nodes if n not in again]

    for node in [n for n in reached(read, computed_again_from) if _is_repeatable(n)]:
        for result in [node] if isinstance(node.meta.get("val"), Tensor) else node.users:  # no tuple can be kept
            result.meta.update(KEEP)
        for source in kept.intersection(node.all_input_nodes):  # they are kept as a region starts with `node`
            source.meta.update(SAVE)
    return graph


def _is_repeatable(node: fx.Node) -> bool:
    return is_recomputed(node) and node_flops(node) != 0

"""What rewriting a joint graph needs beside replacing nodes: new nodes, an order in which the graph can run, and sizes that keep
nothing alive."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx

from graphopt.compat import expression, fake_mode_of, run_on_metadata

aten = torch.ops.aten


ORIGIN = ("nn_module_stack", "fwd_nn_module_stack", "stack_trace", "custom")
"""Metadata that says where in the model a node comes from; for the last, see `in_one_region`."""

CHECKPOINTED = ("recompute", "ac_graph_id")
"""Metadata that says to which checkpointed region a node belongs, and whether it is computed again."""


def in_one_region(nodes: Iterable[fx.Node]) -> bool:
    """Whether nodes run in one compiled graph. Where a model is several, they are planned as one, and each is rewritten alone."""
    return len({node.meta.get("custom", {}).get("region") for node in nodes}) <= 1


def insert_node(
    graph: fx.Graph,
    target: Any,
    args: tuple[Any, ...],
    anchor: fx.Node,
    kwargs: dict[str, Any] | None = None,
    inherited: tuple[str, ...] = ORIGIN,
) -> fx.Node:
    """A new node just before `anchor`, with its shape and with the metadata of `anchor` that is `inherited`."""
    with graph.inserting_before(anchor):
        node = graph.call_function(target, args, kwargs or {})
    node.meta = {k: anchor.meta[k] for k in inherited if k in anchor.meta}
    known = fake_mode_of([n.meta["val"] for n in node.all_input_nodes])
    mode = known or fake_mode_of([n.meta["val"] for n in graph.find_nodes(op="placeholder")])  # an operator that takes no tensor
    node.meta["val"] = run_on_metadata(target, args, kwargs or {}, mode)
    return node


def sort_nodes(graph: fx.Graph, position: Mapping[fx.Node, float]) -> None:
    """Move nodes so that each runs after what it reads, and otherwise in the order of `position`."""
    waiting = {node: len(node.all_input_nodes) for node in graph.nodes}
    ready = [(position.get(n, 0.0), i, n) for i, n in enumerate(graph.nodes) if not waiting[n]]
    heapq.heapify(ready)
    serial = len(waiting)
    last = graph._root
    while ready:
        _, _, node = heapq.heappop(ready)
        if last.next is not node:
            last.append(node)
        last = node
        for user in node.users:
            waiting[user] -= 1
            if not waiting[user]:
                serial += 1
                heapq.heappush(ready, (position.get(user, float("inf")), serial, user))


def simplify_sizes(graph: fx.Graph) -> None:
    """Read every size from a graph input or compute it from such sizes, so that asking for a size keeps no tensor alive."""
    known: dict[object, fx.Node] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, torch.SymInt):
            continue
        from_tensor = node.target is aten.sym_size.int and node.args[0].op != "placeholder"
        key = expression(value)
        if key in known:
            if from_tensor:
                node.replace_all_uses_with(known[key])
        elif not from_tensor:
            known[key] = node

"""Nodes that move a step's compressed gradients off the device while its backward runs, and wait for updates where they are read.

Each compressed gradient is passed to the host as soon as it is computed, in the order of the backward; every read of a compressed
weight in the forward goes through a gate that waits for that weight's own update and for no other (LSP-Offload, Alg. 3).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

import graphopt.ops.host_callback  # noqa: F401  registers the operators
from graphopt.compat import SAVE, fake_like
from graphopt.graph import TrainingGraph
from graphopt.ops.host_callback import TOKEN
from graphopt.transforms.edit import sort_nodes


def insert_offload(graph: TrainingGraph, names: Sequence[str], callback: int, gate_of: int) -> TrainingGraph:
    """A copy of `graph` with a gate at every weight in `names` and a host callback for its compressed gradient.

    Args:
        names: weights, compressed in `graph`; the position in here is the number of the site.
        callback, gate_of: receivers, see `graphopt.ops.host_callback`.
    """
    result = graph.clone()
    position = {node: float(i) for i, node in enumerate(result.graph.nodes)}
    sites = {name: i for i, name in enumerate(names)}
    for node, name in result.parameter_nodes().items():
        if name in sites and node.users:
            _insert_gate(result, node, gate_of, sites[name], position)
    gradients = {n: g for n, g in result.gradients().items() if n in result.compressed and n in sites}
    token: fx.Node | None = None
    for name in sorted(gradients, key=lambda name: position[gradients[name]]):
        node = gradients[name]
        with result.graph.inserting_after(node):
            if token is None:
                token = result.graph.call_function(
                    torch.ops.aten.full.default, ([], 0.0), {"dtype": torch.float32, "device": node.meta["val"].device}
                )
                token.meta["val"] = fake_like(node.meta["val"], (), torch.float32)
                position[token] = position[node] - 0.25
            called = result.graph.call_function(torch.ops.graphopt.host_callback.default, (node, token, callback, sites[name]))
        called.meta["val"] = token.meta["val"]
        position[called] = position[node] + 0.25
        token = called
    if token is not None:
        result.add_backward_output(TOKEN, token)
    sort_nodes(result.graph, position)
    result.module.recompile()
    return result


def _insert_gate(graph: TrainingGraph, weight: fx.Node, receiver: int, site: int, position: dict[fx.Node, float]) -> None:
    """Have everything that reads a weight read it through a gate, just before the first of them."""
    users = list(weight.users)
    first = min(users, key=lambda node: position[node])
    with graph.graph.inserting_before(first):
        gated = graph.graph.call_function(torch.ops.graphopt.gate.default, (weight, receiver, site))
    gated.meta = {"val": weight.meta["val"], **SAVE}
    position[gated] = position[first] - 0.25
    for user in users:
        user.replace_input_with(weight, gated)

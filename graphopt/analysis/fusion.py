"""Which results Inductor never stores: a model of its fusion, for graphs that are not compiled yet.

Inductor turns pointwise operators and reductions into loops, and inlines a pointwise result into every loop that reads it.
A result is stored only if something other than a loop reads it (a matrix product, a convolution, attention), if the graph
returns it, or if it is the outcome of a reduction. The model leaves out the limits that Inductor sets on how much it
inlines, which store a few more results; `graphopt bench memory` shows what that is worth.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from graphopt.analysis.liveness import is_view
from graphopt.compat import OpOverload, output_list

aten = torch.ops.aten
prims = torch.ops.prims

POINTWISE = frozenset(
    {
        aten.constant_pad_nd,
        aten.embedding,
        aten.full,
        aten.full_like,
        aten.gather,
        aten.index,
        aten.new_zeros,
        aten.scalar_tensor,
        aten.select_scatter,
        aten.slice_scatter,
        aten.where,
        prims.convert_element_type,
        prims.iota,
    }
)
"""Inlined like pointwise operators, though torch does not tag them so."""

INDUCTOR_POINTWISE = frozenset({"prims.fma", "prims.inductor_lookup_seed", "prims.inductor_random"})
"""The same, registered only once Inductor is loaded."""

REDUCTIONS = frozenset(
    {
        aten.all,
        aten.amax,
        aten.amin,
        aten.any,
        aten.argmax,
        aten.argmin,
        aten.max,
        aten.mean,
        aten.min,
        aten.prod,
        aten.sum,
        aten.var_mean,
    }
)
"""Loops whose result is stored."""


def fused_nodes(module: fx.GraphModule) -> set[fx.Node]:
    """Nodes of a decomposed, partitioned graph whose results fused kernels keep in registers."""
    returned = {n for n in output_list(module) if isinstance(n, fx.Node)}
    stored: set[fx.Node] = set()
    fused: set[fx.Node] = set()
    for node in reversed(module.graph.nodes):
        if node.op != "call_function":
            continue
        needs_storage = node in returned or any(user in stored or not _reads_in_a_loop(user) for user in node.users)
        if is_view(node) or node.target is operator.getitem:
            if needs_storage:
                stored.add(node)  # a view is stored where what it views is
        elif is_pointwise(node) and not needs_storage:
            fused.add(node)
    return fused


def is_pointwise(node: fx.Node) -> bool:
    """Whether Inductor can compute each element where it is read."""
    packet = getattr(node.target, "overloadpacket", node.target)
    if packet in POINTWISE or str(packet) in INDUCTOR_POINTWISE:
        return True
    return isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags


def _reads_in_a_loop(node: fx.Node) -> bool:
    packet = getattr(node.target, "overloadpacket", node.target)
    if not isinstance(node.target, OpOverload):
        return True  # arithmetic on sizes
    return packet in REDUCTIONS or is_pointwise(node) or is_view(node) or node.target is operator.getitem


def kernel_spans(module: fx.GraphModule) -> list[tuple[int, int]]:
    """For each call node, the first and last position of the kernel that it runs in.

    Inductor's C++ backend puts all consecutive loops into one function.
    """
    calls = [n for n in module.graph.nodes if n.op == "call_function" and n.target is not operator.getitem]
    spans: list[tuple[int, int]] = []
    start = 0
    while start < len(calls):
        end = start
        if _reads_in_a_loop(calls[start]):
            while end + 1 < len(calls) and _reads_in_a_loop(calls[end + 1]):
                end += 1
        spans += [(start, end)] * (end - start + 1)
        start = end + 1
    return spans

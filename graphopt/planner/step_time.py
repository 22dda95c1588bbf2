"""The time of a step predicted: measured products, and memory traffic of everything else.

A roofline (Williams et al., 2009) of the machine at hand, per operator: a matrix product takes what one of its shape was measured
to take, another operator with FLOPs takes them at the rate of a large product, and the rest is held up by the memory.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable

import torch
from torch import Tensor, fx

from graphopt.analysis.flop_formulas import node_flops
from graphopt.analysis.liveness import is_view
from graphopt.analysis.saved import view_source
from graphopt.compat import pytree
from graphopt.graph import TrainingGraph
from graphopt.planner.product_times import ProductTimes, machine

aten = torch.ops.aten


def machine_times(device: torch.device, dtype: torch.dtype) -> ProductTimes:
    """Times of products apart from those that orders of contraction are chosen by, which a checkpoint remembers.

    Integers and numbers of a byte, of which no random matrices can be drawn, are taken to be as fast as float32.
    """
    if dtype.itemsize == 1 or not (dtype.is_floating_point or dtype.is_complex):
        dtype = torch.float32
    return _times_of(device, dtype, machine(device, dtype))


@functools.cache
def _times_of(device: torch.device, dtype: torch.dtype, key: str) -> ProductTimes:
    return ProductTimes(device, dtype)


def step_seconds(
    graph: TrainingGraph, fuses: bool, times: Callable[[torch.device, torch.dtype], ProductTimes] = machine_times
) -> float:
    """Seconds of one forward and backward of a graph of static shapes; the optimizer's step and loading data are not in it.

    Args:
        fuses: neighbours without FLOPs are fused, as Inductor does: what only they exchange never goes through memory.
        times: of the machine, per device and dtype; products that it has not met are measured.
    """
    seconds = 0.0
    for node in graph.graph.nodes:
        if node.op != "call_function" or _takes_no_time(node):
            continue
        result = next((t for t in pytree.tree_leaves(node.meta.get("val")) if isinstance(t, Tensor)), None)
        if result is None:
            continue
        if flops := int(node_flops(node)):
            machine = times(result.device, result.dtype)
            if node.target in (aten.mm.default, aten.addmm.default):
                left, right = (operand.meta["val"] for operand in node.args[-2:])
                seconds += machine.product(*map(int, (*left.shape, right.shape[1])))
            else:
                seconds += flops / machine.peak
        else:
            seconds += _moved_bytes(graph, node, fuses) / times(result.device, torch.float32).bandwidth
    return seconds


def _moved_bytes(graph: TrainingGraph, node: fx.Node, fuses: bool) -> int:
    """Bytes that an operator reads and writes."""
    read = {view_source(n) for n in node.all_input_nodes}
    moved = [n for n in read if not (fuses and _fusible(n))]
    if not fuses or any(not _fusible(user) for user in _users(node)):
        moved.append(node)
    return sum(graph.bytes_of(n.meta.get("val")) for n in moved)


def _fusible(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        node = node.all_input_nodes[0]
    return node.op == "call_function" and not int(node_flops(node))


def _users(node: fx.Node) -> list[fx.Node]:
    """Who reads a node, through views of it."""
    found: list[fx.Node] = []
    for user in node.users:
        found.extend(_users(user) if _takes_no_time(user) else [user])
    return found


def _takes_no_time(node: fx.Node) -> bool:
    """Whether a node only looks at what another made: a view of it, or one of its results."""
    return node.target is operator.getitem or is_view(node)

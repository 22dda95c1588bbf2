"""Segments of the forward: stretches between places at which few bytes pass from what was computed to what is still to come.

A segment whose results are computed again in the backward keeps only those bytes alive (activation checkpointing). They are found
by the bytes that pass, not by modules or names.
"""

from __future__ import annotations

import itertools
import operator
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from graphopt.analysis.flop_formulas import node_flops
from graphopt.analysis.liveness import module_path
from graphopt.analysis.saved import is_saved, view_source
from graphopt.compat import OpOverload, is_in_place, is_recomputed
from graphopt.graph import TrainingGraph, ancestors, descendants

FINEST = 32
"""Part of all saved bytes, 1 / FINEST, that lies at least between two cuts."""

AROUND = 8
"""Part of all saved bytes, 1 / AROUND, before and after a cut within which it is compared with other places."""

MERGED = (1, 2, 4, 8)
"""Neighbouring segments that are computed again as one: with more, fewer bytes pass between them, and more are there at once."""

_TORCHS_OWN = frozenset({"aten", "prims"})
"""Namespaces of operators whose tags say whether they are random."""

WIDEST = 1.5
"""Bytes that pass a cut, over the least that pass anywhere around it, at most."""


@dataclass(frozen=True)
class Segment:
    """A stretch of the forward.

    Attributes:
        name: its position, or those of the segments that it is merged of, and the module in which it ends; for people.
        nodes: those that can be computed again, in order: neither random, nor of a custom operator, which might be, nor read by
            later segments.
        parameters: names of those that it reads first.
        saved_bytes: what the forward keeps of `nodes` for the backward, at the captured batch size.
        held_bytes: what it keeps of the segment's other nodes, whether `nodes` are computed again or not.
        flops: of `nodes`.
    """

    name: str
    nodes: tuple[fx.Node, ...]
    parameters: tuple[str, ...]
    saved_bytes: int
    held_bytes: int
    flops: int


def segments_named(graph: TrainingGraph, names: Collection[str]) -> tuple[Segment, ...]:
    """The segments of a graph's forward among which all of these names are; without merging where there are none such."""
    for merged in MERGED:
        segments = find_segments(graph, merged)
        if {segment.name for segment in segments}.issuperset(names):
            return segments
    return find_segments(graph)


def find_segments(graph: TrainingGraph, merged: int = 1) -> tuple[Segment, ...]:
    """The segments of a joint graph's forward, in order; empty if nothing could be computed again.

    Args:
        merged: neighbours that make one segment; see `MERGED`.
    """
    forward = ancestors(graph.forward_results())
    nodes = [n for n in graph.graph.nodes if n in forward and n.op == "call_function"]
    if not nodes:
        return ()
    saved = {n: graph.bytes_of(n.meta.get("val")) for n in nodes if is_saved(n, forward)}
    finest = _cuts(_passing(graph, nodes, forward), _running_total(graph, nodes, saved))
    cuts = finest[merged - 1 :: merged]
    ends = [*cuts, len(nodes)]
    segment_of = {n: bisect_right(cuts, i) for i, n in enumerate(nodes)}
    of_tangents = descendants(n for n, desc in zip(graph.placeholders, graph.inputs, strict=True) if desc.kind == "tangent")
    for node in graph.graph.nodes:  # views that only the backward reads would hold what they are views of
        if node.op == "call_function" and node not in segment_of and node not in of_tangents:
            made = [segment_of[n] for n in node.all_input_nodes if n in segment_of]
            if made:
                segment_of[node] = max(made)
    members: list[list[fx.Node]] = [[] for _ in ends]
    for node in graph.graph.nodes:
        if node in segment_of:
            members[segment_of[node]].append(node)
    results = set(graph.forward_results())
    first_read: dict[str, int] = {}
    for node, name in graph.parameter_nodes().items():
        readers = [segment_of[u] for u in node.users if u in forward and u in segment_of]
        first_read[name] = min([*readers, first_read.get(name, len(ends) - 1)])
    found = []
    for index, end in enumerate(ends):
        alone = [n for n in members[index] if n not in results and all(segment_of.get(u, index) == index for u in n.users)]
        inside = _whole_groups([n for n in alone if _gives_the_same_again(n) and not is_recomputed(n)])
        kept = {view_source(n) for n in inside if n in saved} & set(inside)
        held = {source for n in members[index] if n in saved and (source := view_source(n)).op == "call_function"} - kept
        found.append(
            Segment(
                f"{_position(index, merged, len(finest) + 1)} {module_path(nodes[end - 1])}".strip(),
                tuple(inside),
                tuple(name for name, first in first_read.items() if first == index),
                sum(graph.bytes_of(n.meta.get("val")) for n in kept),
                sum(graph.bytes_of(n.meta.get("val")) for n in held if segment_of.get(n) == index),
                sum(graph.at(node_flops(n), graph.batch_size) for n in inside),
            )
        )
    return tuple(found)


def _position(index: int, merged: int, count: int) -> str:
    """Of a segment among the finest, counted from 1, such as "3" or, for two that are merged, "3-4"."""
    first, last = index * merged + 1, min((index + 1) * merged, count)
    return str(first) if first == last else f"{first}-{last}"


def _whole_groups(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Nodes without operators of several results of which one is kept, and without their results: the partitioner could not split
    them."""
    known = set(nodes)
    apart = {n for n in nodes if isinstance(n.meta.get("val"), (tuple, list)) and not known.issuperset(n.users)}
    for node in nodes:
        if node.target is operator.getitem and (node.args[0] in apart or node.args[0] not in known):
            apart.add(node)
    return [n for n in nodes if n not in apart]


def _cuts(passing: Sequence[int], saved: Sequence[int]) -> list[int]:
    """Positions before which to cut: where fewest bytes pass, apart from each other by a part of what is saved.

    Args:
        passing: bytes that pass each position.
        saved: bytes saved before it.
    """
    total = saved[-1] if saved else 0
    inner = [i for i in range(1, len(passing)) if 0 < saved[i] < total]
    if not inner or not total:
        return []
    chosen: list[int] = []
    for i in sorted(inner, key=lambda i: (passing[i], i)):
        first = bisect_left(inner, saved[i] - total / AROUND, key=saved.__getitem__)
        behind = bisect_right(inner, saved[i] + total / AROUND, key=saved.__getitem__)
        least = min(passing[j] for j in inner[first:behind])
        if passing[i] <= WIDEST * least and all(abs(saved[i] - saved[j]) >= total / FINEST for j in chosen):
            chosen.append(i)
    return sorted(chosen)


def _passing(graph: TrainingGraph, nodes: Sequence[fx.Node], forward: set[fx.Node]) -> list[int]:
    """Bytes made before each position that the forward reads at it or later, or hands out."""
    position = {n: i for i, n in enumerate(nodes)}
    last = {n: i for i, n in enumerate(nodes)}
    for node in nodes:
        source = view_source(node)
        readers = [position[u] for u in node.users if u in position]
        if source in last:
            last[source] = max([last[source], *readers])
    for result in graph.forward_results():
        if (source := view_source(result)) in last:
            last[source] = len(nodes) - 1
    changes = [0] * (len(nodes) + 2)
    for node in nodes:
        if view_source(node) is node:
            size = graph.bytes_of(node.meta.get("val"))
            changes[position[node] + 1] += size
            changes[last[node] + 1] -= size
    return list(itertools.accumulate(changes[: len(nodes)]))


def _running_total(graph: TrainingGraph, nodes: Sequence[fx.Node], saved: dict[fx.Node, int]) -> list[int]:
    """Bytes saved for the backward before each position."""
    total, seen, running = 0, set(), []
    for node in nodes:
        running.append(total)
        source = view_source(node)
        if node in saved and source.op == "call_function" and source not in seen:
            seen.add(source)
            total += graph.bytes_of(source.meta.get("val"))
    return running


def _gives_the_same_again(node: fx.Node) -> bool:
    """Whether an operator is known to have no effects and to give equal results for equal inputs: one of torch's own."""
    if node.target is operator.getitem:
        source = node.args[0]
        return not isinstance(source, fx.Node) or source.op != "call_function" or _gives_the_same_again(source)
    if isinstance(node.target, OpOverload):
        random = torch.Tag.nondeterministic_seeded in node.target.tags
        return node.target.namespace in _TORCHS_OWN and not random and not is_in_place(node.target)
    return not isinstance(node.meta.get("val"), (Tensor, tuple, list))  # arithmetic of sizes

"""Boundaries: backward nodes through which the gradient of everything below them passes.

Sampling rows of such a node samples the whole backward below it (VCAS, section 4.1). They are dominators of the graph from the
outputs' gradients to the parameters' gradients, chosen between blocks that repeat: no names and no module classes are looked at.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import networkx
from graphopt.passes.base import numbered
from torch import Tensor, fx

from graphopt.analysis.batch_dims import NoRows, batch_dim, carries_batch, gradient_cone
from graphopt.analysis.flop_formulas import node_flops
from graphopt.analysis.liveness import can_be_view
from graphopt.graph import TrainingGraph, reached

WORTHWHILE = 0.02
"""Part of the backward's FLOPs that a boundary outside of repeated blocks must have before the next one."""

BRANCH = 0.1
"""Part of the backward's FLOPs that a branch (an encoder beside its decoder) must have to be looked at."""


@dataclass(frozen=True)
class Boundary:
    """A place where rows of the backward can be sampled.

    Attributes:
        name: what the parameters between this boundary and the next have in common; for people.
        node: the gradient whose rows are sampled.
        parent: position of the nearest boundary above it; None for the first.
        parameters: names of those whose gradient is computed from rows of `node` alone.
    """

    name: str
    node: fx.Node
    parent: int | None
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class _Place:
    """A possible boundary.

    Attributes:
        below: a bit mask of the parameters it dominates; `own` of those in the block that begins with it.
        flops: of what runs below it.
    """

    node: fx.Node
    below: int
    flops: int
    own: int = 0


def find_boundaries(graph: TrainingGraph) -> tuple[Boundary, ...]:
    """Boundaries of a joint graph with a symbolic batch, from the output to the input; empty if there are none."""
    tree = _DominatorTree(graph)
    chosen = sorted(tree.choose(tree.root), key=lambda place: tree.position[place.node])
    order = {place.node: i for i, place in enumerate(chosen)}
    parents = [tree.nearest(place.node, order) for place in chosen]
    names: list[str] = []
    for place in chosen:
        names.append(numbered(_common_name(tree.names_of(place.own or place.below)), names))
    return tuple(
        Boundary(name, place.node, parent, tree.names_of(place.below))
        for name, place, parent in zip(names, chosen, parents, strict=True)
    )


class _DominatorTree:
    """The dominator tree of a backward, with what each node dominates."""

    def __init__(self, graph: TrainingGraph) -> None:
        self.graph = graph
        cone = gradient_cone(graph)
        self.gradients = {name: node for name, node in graph.gradients().items() if node in cone}
        self.shapes = {p.name: p.shape for p in graph.parameters}
        self.names = list(self.gradients)
        needed = set(reached(self.gradients.values(), lambda node: cone.intersection(node.all_input_nodes)))
        self.root: object = "root"
        flow = networkx.DiGraph()
        flow.add_node(self.root)
        self.position = {node: i for i, node in enumerate(n for n in graph.graph.nodes if n in needed)}
        for node in self.position:
            sources = [n for n in node.all_input_nodes if n in needed]
            flow.add_edges_from((source, node) for source in sources)
            if not sources:
                flow.add_edge(self.root, node)
        self.dominator = dict(networkx.immediate_dominators(flow, self.root))
        self.dominator.pop(self.root, None)
        self.own_flops = {node: graph.at(node_flops(node), graph.batch_size) for node in self.position}
        self.flops: dict[object, int] = dict(self.own_flops)
        self.below: dict[object, int] = dict.fromkeys(self.position, 0)
        for i, node in enumerate(self.gradients.values()):
            self.below[node] |= 1 << i
        self.flops[self.root] = self.below[self.root] = 0
        depth: dict[fx.Node, int] = {}
        for node in self.position:
            depth[node] = 1 + max((depth[n] for n in node.all_input_nodes if n in depth), default=0)
        self.deepest: dict[object, int] = {n: depth[n] if carries_batch(graph, n.meta.get("val")) else 0 for n in depth}
        self.deepest[self.root] = 0
        self.children: dict[object, list[fx.Node]] = {}
        for node in reversed(self.position):
            above = self.dominator[node]
            self.flops[above] += self.flops[node]
            self.below[above] |= self.below[node]
            self.deepest[above] = max(self.deepest[above], self.deepest[node])
            self.children.setdefault(above, []).append(node)

    def choose(self, start: object) -> list[_Place]:
        """Boundaries below `start`: along the path to the deepest gradient with rows, and in the branches that leave it."""
        path: list[fx.Node] = []
        branches: list[fx.Node] = []
        children = self.children.get(start, [])
        if isinstance(start, fx.Node):
            path.append(start)
        while children:
            deepest = max(children, key=lambda node: (self.deepest[node], self.flops[node], -self.position[node]))
            branches += [n for n in children if n is not deepest and self.flops[n] >= BRANCH * self.flops[self.root]]
            path.append(deepest)
            children = self.children.get(deepest, [])
        chosen = self._between_blocks(self._places(path), keep_single=start is self.root)
        for branch in branches:
            found = self.choose(branch)
            chosen += found if len(found) > 1 else []  # only where it has blocks that repeat, not in the inside of one block
        return chosen

    def _places(self, path: Sequence[fx.Node]) -> list[_Place]:
        """The first node of a path with rows for each set of parameters below it, whole samples before flattened ones."""
        places: dict[int, tuple[int, _Place]] = {}
        for node in path:
            value = node.meta.get("val")
            if node.op != "call_function" or not isinstance(value, Tensor) or not value.is_floating_point():
                continue
            if not self.below[node] or can_be_view(node):
                continue
            try:
                rows = batch_dim(self.graph, value)
            except NoRows:
                continue
            if rows is None:
                continue
            place = _Place(node, self.below[node], self.flops[node] - self.own_flops[node])
            known = places.get(place.below)
            if known is None or (rows.inner == 1 and known[0] != 1):
                places[place.below] = (rows.inner, place)
        return [place for _, place in places.values()]

    def _between_blocks(self, places: list[_Place], keep_single: bool, end: tuple[int, int] = (0, 0)) -> list[_Place]:
        """The places at which repeated blocks begin; elsewhere, where `keep_single`, those with enough work before the next.

        Args:
            end: parameters and FLOPs below the last place's part of the path.
        """
        if not places:
            return []
        ends = [*((place.below, place.flops) for place in places[1:]), end]
        least = WORTHWHILE * self.flops[self.root]
        kinds = [self._kind(place.below & ~below) for place, (below, _) in zip(places, ends, strict=True)]
        run = longest_run(kinds)
        if run is not None and self._are_blocks(kinds, run, keep_single):
            start, period, count = run
            stop = start + count * period
            if stop < len(places) and kinds[stop] == kinds[start] and places[stop].flops - end[1] > least:
                count += 1  # the last block ends earlier: nothing below it is trained
            blocks = []
            for place, following in zip(places[start::period], [*places[start + period :: period], None], strict=False):
                blocks.append(replace(place, own=place.below & ~(following.below if following else end[0])))
            blocks = blocks[:count]
            return [
                *self._between_blocks(places[:start], keep_single, (blocks[0].below, blocks[0].flops)),
                *blocks,
                *self._between_blocks(places[stop:], False, end),
            ]
        return [
            replace(place, own=place.below & ~below)
            for place, (below, flops) in zip(places, ends, strict=True)
            if keep_single and place.flops - flops > least
        ]

    def _are_blocks(self, kinds: Sequence[tuple[tuple[int, ...], ...]], run: tuple[int, int, int], whole: bool) -> bool:
        """Whether what repeats has weights, not only biases and norms; in a branch two, as one layer may resemble the next."""
        start, period, _ = run
        weights = sum(len(shape) > 1 for kind in kinds[start : start + period] for shape in kind)
        return weights >= (1 if whole else 2)

    def _kind(self, mask: int) -> tuple[tuple[int, ...], ...]:
        return tuple(sorted(self.shapes[name] for name in self.names_of(mask)))

    def names_of(self, mask: int) -> tuple[str, ...]:
        """Parameters of a bit mask."""
        return tuple(name for i, name in enumerate(self.names) if mask >> i & 1)

    def nearest(self, node: fx.Node, order: dict[fx.Node, int]) -> int | None:
        """Position of the nearest of the nodes in `order` that dominate `node`."""
        above = self.dominator.get(node)
        while isinstance(above, fx.Node):
            if above in order:
                return order[above]
            above = self.dominator.get(above)
        return None


def longest_run(kinds: Sequence[object]) -> tuple[int, int, int] | None:
    """Where a sequence repeats a pattern two or more times in a row: (start, length of the pattern, repetitions).

    The run that covers most wins; among equals the shortest pattern, then the first.
    """
    best: tuple[int, int, int] | None = None
    size = len(kinds)
    for period in range(1, size // 2 + 1):
        start = 0
        while start + 2 * period <= size:
            count = 1
            while kinds[start + count * period : start + (count + 1) * period] == kinds[start : start + period] and (
                start + (count + 1) * period <= size
            ):
                count += 1
            if count > 1 and (best is None or count * period > best[1] * best[2]):
                best = (start, period, count)
            start += max(1, (count - 1) * period)
    return best


def _common_name(names: Sequence[str]) -> str:
    """The longest path of modules that all `names` share, else the first name."""
    parts = zip(*(name.split(".")[:-1] for name in names), strict=False)
    shared = itertools.takewhile(lambda position: len(set(position)) == 1, parts)
    return ".".join(position[0] for position in shared) or (names[0] if names else "input")

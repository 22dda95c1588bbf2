"""Computing parts of the forward again in the backward instead of keeping their results (activation checkpointing).

Of a segment of the forward (`graphopt.analysis.segments`) only what later segments read is kept; the backward runs the rest of it
once more, just before it needs it. Results of random operators are kept. With segments of s saved bytes each, n of them
recomputed, a step needs up to n s bytes less and costs their FLOPs twice (Chen et al., 2016).

Preserves: EXACT.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from graphopt.passes.base import Changes, Preserves, Site

from graphopt.analysis.segments import find_segments
from graphopt.compat import recompute_mark
from graphopt.errors import PassError
from graphopt.graph import TrainingGraph
from graphopt.rewriting import simplify_sizes


@dataclass(frozen=True)
class Recompute:
    """The recomputation.

    Attributes:
        segments: names of the segments to compute again. None: the planner chooses as few as `Budget(memory=...)` needs.
    """

    segments: tuple[str, ...] | None = None
    name = "recompute"
    preserves = Preserves.EXACT
    serves = ("memory",)

    def check(self, graph: TrainingGraph) -> None:
        """See that the segments that were named are among the graph's.

        Raises:
            PassError: they are not.
        """
        if isinstance(self.segments, str):
            raise PassError(f"recompute: segments={self.segments!r} is one name; give a tuple of names.")
        _require(self.segments or (), [segment.name for segment in find_segments(graph)])

    def applicable(self, graph: TrainingGraph) -> list[Site]:
        """Every segment of the forward that keeps anything for the backward; the name says where it ends."""
        return [Site(segment.name) for segment in find_segments(graph) if segment.saved_bytes]

    def apply(self, graph: TrainingGraph, decisions: Collection[str]) -> Changes:
        """Have the backward compute the segments in `decisions` again.

        Raises:
            PassError: an unknown segment.
        """
        segments = {segment.name: (i, segment) for i, segment in enumerate(find_segments(graph), 1)}
        _require(decisions, segments)
        simplify_sizes(graph.graph)  # no size is read off a tensor that is no longer there
        taken = max((int(n.meta.get("ac_graph_id") or 0) for n in graph.graph.nodes), default=0)
        for name in decisions:
            index, segment = segments[name]
            for node in segment.nodes:
                node.meta.update(recompute_mark(taken + index))
        graph.eliminate_dead_code()
        left = {name: "kept for the backward" for name, (_, s) in segments.items() if name not in decisions and s.saved_bytes}
        return Changes(tuple(name for name in segments if name in decisions), left)


def _require(names: Iterable[str], known: Collection[str]) -> None:
    unknown = sorted(set(names).difference(known))
    if unknown:
        raise PassError(f"the forward has no segment {unknown[0]!r}: it has {', '.join(known) or 'none'}.")

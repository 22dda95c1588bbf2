"""Computing parts of the forward again in the backward instead of keeping their results (activation checkpointing).

Of a segment of the forward (`graphopt.analysis.segments`) only what later segments read is kept; the backward runs the rest of it
once more, just before it needs it. Results of random operators are kept. With segments of s saved bytes each, n of them
recomputed, a step needs up to n s bytes less and costs their FLOPs twice (Chen et al., 2016).

Preserves: EXACT.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphopt.passes.base import Changes, Pass, Preserves, Site
from graphopt.passes.fields import require_names
from graphopt.passes.technique import Found, Offers, Planning, Technique

from graphopt.analysis.segments import find_segments, segments_named
from graphopt.budget import Budget
from graphopt.compat import recompute_mark
from graphopt.errors import PassError
from graphopt.graph import TrainingGraph
from graphopt.transforms.edit import simplify_sizes

if TYPE_CHECKING:
    from graphopt.planner.plan import Plan


@dataclass(frozen=True)
class Segments:
    """The segments of the forward to compute again, by name, each `merged` of so many neighbours."""

    names: tuple[str, ...]
    merged: int = 1

    @property
    def key(self) -> Hashable:
        """See `Decision`."""
        return self.names


@dataclass(frozen=True)
class Recompute(Technique):
    """The recomputation.

    Attributes:
        segments: names of the segments to compute again. None: the planner chooses as few as `Budget(memory=...)` needs.
    """

    segments: tuple[str, ...] | None = None
    name = "recompute"
    preserves = Preserves.EXACT
    serves = ("memory",)
    by_part = True
    decides = Segments
    unneeded = "what is trained fits the memory without it"

    def __post_init__(self) -> None:
        require_names(self, "segments")

    def check(self, budget: Budget, passes: Sequence[Pass]) -> None:
        """See that something says what to compute again."""
        if budget.memory is None and self.segments is None:
            raise PassError("recompute needs the names of segments, or a Budget(memory=...) to choose them for.")

    def before_selection(self, plan: Plan, planning: Planning) -> Plan:
        """See that the segments that were named are among the graph's.

        Raises:
            PassError: they are not.
        """
        named = self.segments or ()
        _require(named, [segment.name for segment in segments_named(planning.graph, named)])
        return plan

    def offers(self, plan: Plan, graph: TrainingGraph) -> Offers:
        """See `Technique`."""
        return Offers(recomputes=self.segments is None)

    @classmethod
    def offered(cls, graph: TrainingGraph) -> Recompute:
        """See `Technique`."""
        return cls()

    def adopt(self, plan: Plan, found: Found) -> Plan:
        """See `Technique`."""
        return plan.decided(self.name, Segments(found.recomputed, found.merged)) if self.segments is None else plan

    def decide(self, plan: Plan, captured: TrainingGraph, graph: TrainingGraph) -> tuple[tuple[str, ...], tuple[()]]:
        """The segments to compute again; all of them in a graph that has not the same ones, as for another sequence length."""
        chosen = plan.decisions.get(self.name, Segments(()))
        wanted = chosen.names if self.segments is None else self.segments
        segments = find_segments(graph, chosen.merged) if self.segments is None else segments_named(graph, wanted)
        if {segment.name for segment in segments}.issuperset(wanted):
            return tuple(wanted), ()
        return tuple(segment.name for segment in segments if segment.saved_bytes), ()

    def applicable(self, graph: TrainingGraph) -> list[Site]:
        """Every segment of the forward that keeps anything for the backward; the name says where it ends."""
        return [Site(segment.name) for segment in find_segments(graph) if segment.saved_bytes]

    def apply(self, graph: TrainingGraph, decisions: Collection[str]) -> Changes:
        """Have the backward compute the segments in `decisions` again.

        Raises:
            PassError: an unknown segment.
        """
        segments = {segment.name: (i, segment) for i, segment in enumerate(segments_named(graph, decisions), 1)}
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

"""Leaving out rows that nobody reads, as a technique.

Preserves: EXACT.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphopt.passes.base import Changes, PassReport, Preserves, Site
from graphopt.passes.dead_rows.demand import Demand, find_demands
from graphopt.passes.dead_rows.rewrite import narrow
from graphopt.passes.state import State
from graphopt.passes.technique import Planning, Section, Technique

from graphopt.analysis.flops import flop_profile
from graphopt.errors import PassError
from graphopt.graph import TrainingGraph

if TYPE_CHECKING:
    from graphopt.planner.plan import Plan

LEAST = 0.005
"""Part of a step's FLOPs that must be saved."""


@dataclass(frozen=True)
class DeadRows(Technique):
    """Computing only the rows of tensors that are read, where a model selects a few of them.

    A classifier that reads the first token needs the last layer's feed-forward, its norms, and the queries of its attention for
    that token alone; in the backward, the gradients of all other rows are zero up to there.
    """

    name = "dead_rows"
    preserves = Preserves.EXACT
    serves = ()
    by_part = True
    unneeded = "no rows are selected above which others could be left out"

    def applicable(self, graph: TrainingGraph) -> list[Site]:
        """What reads only some rows, by the name of its weight."""
        return [Site(name) for name in _by_name(_worthwhile(graph))]

    def before_selection(self, plan: Plan, planning: Planning) -> Plan:
        """Leave a plan where there is nothing to do."""
        if not planning.auto or self.applicable(planning.graph):
            return plan
        return plan.without(self, self.unneeded)

    def apply(self, graph: TrainingGraph, decisions: Collection[str]) -> Changes:
        """Compute only what is read by the sites in `decisions`.

        Raises:
            PassError: an unknown site.
        """
        known = demands = _by_name(_worthwhile(graph))
        unknown = sorted(set(decisions).difference(known))
        if unknown:
            raise PassError(f"{unknown[0]} reads all rows: some rows are read alone by {', '.join(known) or 'nothing'}.")
        before, changed, left = len(graph.graph.nodes), [], {}
        for name in known:
            if name not in decisions or name not in demands:
                left[name] = "kept in full"
                continue
            whole = graph.clone()
            try:
                narrow(graph, demands[name])
                changed.append(name)
            except PassError as error:
                graph.module, left[name] = whole.module, str(error)
            if len(known) > 1:  # the graph has other nodes now
                demands = _by_name(_worthwhile(graph))
        return Changes(tuple(changed), left, before - len(graph.graph.nodes))

    def section(
        self, plan: Plan, graph: TrainingGraph, reports: Sequence[PassReport], ran: Sequence[PassReport], state: State | None
    ) -> Section:
        """Per site, which rows it reads."""
        rows = {name: str(demand.rows) for name, demand in _by_name(_worthwhile(graph)).items()}
        changed = {name for report in ran if report.name == self.name for name in report.changes.changed}
        facts = {name: which for name, which in rows.items() if name in changed}
        return Section(
            {"rows": facts} if facts else {}, tuple(f"dead rows        {name} reads {which}" for name, which in facts.items())
        )


def _worthwhile(graph: TrainingGraph) -> list[Demand]:
    demands = find_demands(graph)
    least = LEAST * flop_profile(graph).step if demands else 0
    return [demand for demand in demands if demand.flops >= least]


def _by_name(demands: Sequence[Demand]) -> dict[str, Demand]:
    """Demands by name; the second of one name gets a number."""
    found: dict[str, Demand] = {}
    for demand in demands:
        number = sum(known.partition(" #")[0] == demand.name for known in found)
        found[f"{demand.name} #{number + 1}" if number else demand.name] = demand
    return found

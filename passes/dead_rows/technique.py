"""Leaving out rows that nobody reads, as a technique.

Preserves: EXACT.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from graphopt.passes.base import Changes, PassReport, Preserves, Site, numbered
from graphopt.passes.dead_rows.batch_labels import BatchLabels
from graphopt.passes.dead_rows.demand import Demand, find_demands
from graphopt.passes.dead_rows.labels import ROOM, STEPS, Labelled, counted
from graphopt.passes.dead_rows.places import MOST
from graphopt.passes.dead_rows.rewrite import Narrowing
from graphopt.passes.fields import require_number
from graphopt.passes.state import State
from graphopt.passes.technique import Planning, Section, Technique

from graphopt.analysis.flops import flop_profile
from graphopt.analysis.kept import kept
from graphopt.errors import PassError
from graphopt.graph import TrainingGraph
from graphopt.transforms.symbolic_zeros import for_loss_alone

if TYPE_CHECKING:
    from graphopt.planner.plan import Plan
    from graphopt.runtime.module import OptimizedModule

LEAST = 0.005
"""Part of a step's FLOPs that must be saved."""


@dataclass(frozen=True)
class DeadRows(Technique):
    """Computing only the rows of tensors that are read, where a model selects a few of them.

    A classifier that reads the first token needs the last layer's feed-forward, its norms, and the queries of its attention for
    that token alone; in the backward, the gradients of all other rows are zero up to there. A loss that ignores some labels
    reads the other rows: a step has places for a part of each sample's rows, and a batch with more is computed in full.

    Attributes:
        labelled: the part of each sample's rows whose label counts, at most; None: as in the example batch, and some more.
    Raises:
        PassError: `labelled` is no part.
    """

    labelled: float | None = None

    name = "dead_rows"
    preserves = Preserves.EXACT
    serves = ()
    by_part = True
    decides = Labelled
    unneeded = "no rows are selected above which others could be left out"

    def __post_init__(self) -> None:
        if self.labelled is not None:
            require_number(self, "labelled", lambda value: 0 < value <= 1, "above 0 and at most 1: a part of the rows")

    def applicable(self, graph: TrainingGraph) -> list[Site]:
        """What reads only some rows, by the name of its weight."""
        return [Site(name) for name in _by_name(_worthwhile(graph, self.labelled))]

    def before_selection(self, plan: Plan, planning: Planning) -> Plan:
        """Decide for how many rows with a label there are places; leave a plan where there is nothing to do."""
        if (decision := self._decision(plan, planning)) is not None:
            found, without = (len(_found(planning.graph, part)) for part in (decision.part, None))
            if found > without:
                return plan.decided(self.name, decision)
        if not planning.auto or planning.graph.hands_out or self.applicable(planning.graph):
            return plan
        return plan.without(self, self.unneeded)

    def for_all_outputs(self, plan: Plan) -> Plan:
        """All rows whose label is ignored: another output may bring gradients for them."""
        return plan if self._part(plan) is None else plan.decided(self.name, Labelled(STEPS, ()))

    def decide(self, plan: Plan, captured: TrainingGraph, graph: TrainingGraph) -> tuple[Any, tuple[()]]:
        """By site, the part of the rows whose label may count."""
        part = self._part(plan)
        return tuple((name, part) for name in _by_name(_found(graph, part))), ()

    def _part(self, plan: Plan) -> float | None:
        decision = plan.decisions.get(self.name)
        return self.labelled if decision is None else decision.part

    def _decision(self, plan: Plan, planning: Planning) -> Labelled | None:
        """None where nothing is known of a batch's labels, or where more of them may not cost more."""
        sampled = any(p.preserves is Preserves.UNBIASED for p in plan.passes)
        if planning.inputs is None or plan.memory is not None or sampled or self.labelled is not None:
            return None
        graph, (names, tensors, samples) = planning.graph, planning.inputs
        if any(tensor.device.type != "cpu" for tensor in tensors):  # to count labels, a step would wait for the one before
            return None
        most = counted(graph, dict(enumerate(tensors)), samples)
        if most is None:
            return None
        steps = max(math.ceil(STEPS * rows / length + ROOM) for rows, length in most)
        return Labelled(steps, names) if steps <= STEPS * MOST else None

    def start(self, opt: OptimizedModule) -> State | None:
        """What counts the labels of every batch, where a step has places for some; a plan that is loaded may be the first."""
        return BatchLabels(opt) if self.labelled is None else None

    def apply(self, graph: TrainingGraph, decisions: Collection[Any]) -> Changes:
        """Compute only what is read by the sites in `decisions`: names, or pairs with the part of the rows with a label.

        Raises:
            PassError: an unknown site.
        """
        pairs: dict[str, float | None] = dict(each if isinstance(each, tuple) else (each, self.labelled) for each in decisions)
        part = next(iter(pairs.values()), self.labelled)
        if part is not None and pairs:
            alone = for_loss_alone(graph).clone()
            graph.module, graph.inputs, graph.refused = alone.module, alone.inputs, alone.refused
        known = demands = _by_name(_worthwhile(graph, part))
        unknown = sorted(set(pairs).difference(known))
        if unknown:
            raise PassError(f"{unknown[0]} reads all rows: some rows are read alone by {', '.join(known) or 'nothing'}.")
        changed, left = [], {}
        least = _least(graph)
        for name in known:
            if name not in pairs or name not in demands:
                left[name] = "kept in full"
                continue
            whole = graph.clone()
            try:
                Narrowing(graph, demands[name]).apply()
                changed.append(name)
            except PassError as error:
                graph.module, left[name] = whole.module, str(error)
            if len(known) > 1:  # the graph has other nodes now, and is cheaper
                demands = _by_name(_worthwhile(graph, part, least), changed)
        return Changes(tuple(changed), left)

    def section(
        self, plan: Plan, graph: TrainingGraph, reports: Sequence[PassReport], ran: Sequence[PassReport], state: State | None
    ) -> Section:
        """Per site, which rows it reads."""
        rows = {name: str(demand.rows) for name, demand in _by_name(_found(graph, self._part(plan))).items()}
        changed = {name for report in ran if report.name == self.name for name in report.changes.changed}
        facts = {name: which for name, which in rows.items() if name in changed}
        lines = tuple(f"dead rows        {name} reads {which}" for name, which in facts.items())
        notes = (
            ("a batch in which a sample has more rows with a label is computed in full",) if plan.decisions.get(self.name) else ()
        )
        return Section({"rows": facts} if facts else {}, lines, notes)


def _found(graph: TrainingGraph, labelled: float | None) -> list[Demand]:
    """`_worthwhile`, of a graph that is not changed any more."""
    return kept(graph, "demands", (labelled, graph.hands_out), lambda: _worthwhile(graph, labelled))


def _worthwhile(graph: TrainingGraph, labelled: float | None, least: float | None = None) -> list[Demand]:
    """What saves enough; nothing where others may read rows that the graph knows nothing of.

    Args:
        labelled: see `find_demands`; where labels are ignored, nothing but the loss may be differentiated.
        least: FLOPs; None: `_least` of the graph.
    """
    if graph.hands_out:
        return []
    demands = find_demands(graph if labelled is None else for_loss_alone(graph), labelled)
    if demands and least is None:
        least = _least(graph)
    return [demand for demand in demands if least is None or demand.flops >= least]


def _least(graph: TrainingGraph) -> float:
    return LEAST * flop_profile(graph).step


def _by_name(demands: Sequence[Demand], carried_out: Sequence[str] = ()) -> dict[str, Demand]:
    """Demands by name; the second of one name gets a number.

    Args:
        carried_out: names of others, which came before and are in the graph no more.
    """
    found: dict[str, Demand] = {}
    for demand in demands:
        found[numbered(demand.name, (*carried_out, *found))] = demand
    return found

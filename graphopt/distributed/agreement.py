"""What ranks have to agree on: a plan."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

from graphopt.distributed.ranks import Ranks
from graphopt.errors import NothingToPlan, PassError
from graphopt.graph import TrainingGraph
from graphopt.passes import Pass, Preserves
from graphopt.passes.technique import technique
from graphopt.planner.plan import Plan


def plan_of_rank_0(plan: Plan, ranks: Ranks, chosen: Sequence[Pass], what: str) -> Plan:
    """Rank 0's plan, carried out by this rank's own passes.

    Args:
        plan: this rank's.
        chosen: the passes of which a plan has those that are needed.
    """
    if not ranks.several:
        return plan
    theirs = ranks.same(_decided(plan), what)
    names = theirs.pop("names")
    own = {p.name: p for p in chosen} | {p.name: p for p in plan.passes}
    decisions = {**plan.decisions, **theirs.pop("decisions")}
    return replace(plan.with_passes([own[name] for name in names]), decisions=decisions, **theirs)


def for_ranks(passes: tuple[Pass, ...], ranks: Ranks, auto: bool) -> tuple[Pass, ...]:
    """The passes that several ranks can use.

    Raises:
        PassError: the caller has named another.
    """
    others = [p.name for p in passes if ranks.several and p.preserves is Preserves.PROJECTED]
    if others and not auto:
        raise PassError(
            f"{others[0]} keeps gradients where DistributedDataParallel does not see them, so that every rank would train by its "
            f"own: leave {others[0]} out, or train on one process."
        )
    return tuple(p for p in passes if p.name not in others)


def require_same_graph(graph: TrainingGraph, ranks: Ranks) -> None:
    """Raise `NothingToPlan`, on every rank, where batches lead to other parameters on some."""
    found = ranks.gather(sorted(p.name for p in graph.trainable), "capturing the model")
    other = next((rank for rank, names in enumerate(found) if names != found[0]), None)
    if other is not None:
        names = sorted(set(found[0]) ^ set(found[other]))
        raise NothingToPlan(f"the batches of ranks 0 and {other} take different ways through the model: one uses {names[0]}.")


def _decided(plan: Plan) -> dict[str, Any]:
    for rewrite in plan.passes:
        plan = technique(rewrite).alone(plan)  # no numbers that mean something in one process alone
    return {
        "names": [p.name for p in plan.passes],
        "train": plan.train,
        "selection": plan.selection,
        "importance": plan.importance,
        "not_separable": plan.not_separable,
        "not_needed": dict(plan.not_needed),
        "decisions": dict(plan.decisions),
    }


def in_common(plan: Plan) -> Hashable:
    """What of a plan must be equal on all ranks: which gradients there are, and what they are."""
    return None if plan.train is None else tuple(sorted(plan.train)), tuple(p.name for p in plan.passes)

"""Putting in force what is trained together with how many terms are kept; see `graphopt.planner.joint_ratios`."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from graphopt.errors import BudgetError
from graphopt.graph import TrainingGraph
from graphopt.planner.joint_ratios import Variances, candidates, with_ratios
from graphopt.planner.plan import Plan

if TYPE_CHECKING:
    from graphopt.runtime.module import OptimizedModule

TOLERANCE = 0.05
"""Gain in importance for which another choice is put in force, as for another selection: a change costs a compilation."""

SLACK = 2.0
"""A weight's variance may grow by this much above its limit before another choice is made: two batches tell it no better."""


def choose(
    opt: OptimizedModule, batch: Any, graph: TrainingGraph, batch_size: int, seen: Variances, tolerance: float, may_change: bool
) -> None:
    """Choose, and put in force what gains enough; ratios whose variance is too large now are not left in force.

    Args:
        graph, batch_size: of `batch`.
        seen: measured just now; where it is not finite, everything stays.
        tolerance: variance that sampling may add, as a part of the mini-batch's own.
        may_change: another choice may be compiled; else the exact selection may take the place of the present one.
    Raises:
        BudgetError: see `with_ratios`; PassError: the passes cannot carry out the choice. The present plan stays in force.
    """
    if not all(math.isfinite(v) for v in (*seen.own.values(), *(v for added in seen.added.values() for v in added))):
        return
    now, trainable = opt.plan, frozenset(p.name for p in graph.trainable)
    within = seen.part(now) <= tolerance and seen.largest_part(now) <= SLACK * tolerance
    holds = not now.ratios or (now.sampled_batch == batch_size and within)
    if not (may_change or holds):
        opt.note("ratios were chosen anew too often: from now on, what needs no sampling is trained")
    new = with_ratios(now, graph, batch_size, seen, tolerance) if may_change else now.exact_selection()
    if holds and _importance(new, trainable) <= (1 + TOLERANCE) * _importance(now, trainable):
        return
    if new.ratios and (reason := opt.mixing_under(new, batch) or _too_large(new, opt.graph, batch_size)):
        opt.note(f"no more tensors are trained by sampling: {reason}")
        new = now.exact_selection()
    if new.key != now.key:
        new.rewrite(graph, batch_size)  # it can be carried out
        opt.adopt(new)


def require_memory(plan: Plan, graph: TrainingGraph, batch_size: int) -> None:
    """See that a pass over all tensors that may be trained stays within the budget's memory.

    Raises:
        BudgetError: it does not.
    """
    if plan.memory is None:
        return
    everything = replace(plan, train=candidates(plan)).before_sampling()
    peak = plan.memory.peak_once(graph, everything.key, lambda: everything.rewrite(graph, batch_size)[0], batch_size)
    if peak > plan.memory.peak_bytes:
        raise BudgetError(
            f"measuring the variances of all tensors that may be trained takes {peak:,} bytes, and the budget has "
            f"{plan.memory.peak_bytes:,}: give it as many, use a smaller batch, or leave out jointly=True"
        )


def _too_large(plan: Plan, graph: TrainingGraph, batch_size: int) -> str:
    """Why a plan that fits batches like the last does not fit those that the budget was given for; "" if it does."""
    if plan.memory is None or not graph.symbolic:
        return ""
    peak = plan.memory.peak_of(plan.rewrite(graph, batch_size)[0], batch_size)
    return "" if peak <= plan.memory.peak_bytes else f"a step of the example's shape would need {peak:,} bytes"


def _importance(plan: Plan, trainable: frozenset[str]) -> float:
    return plan.importance.of(trainable & (plan.train or frozenset())) if plan.importance is not None else 0.0

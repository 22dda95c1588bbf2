"""Selecting tensors anew while a model trains (GreenTrainer does so every epoch; see `OptimizedModule.reselect`)."""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from graphopt.analysis.flops import FlopProfile, flop_profile
from graphopt.calls import Call, as_call
from graphopt.distributed.agreement import plan_of_rank_0
from graphopt.errors import BudgetError, ImportanceError, InputError, PassError, RankError, first_line
from graphopt.frontend.batch import batch_size
from graphopt.frontend.region import frozen_names
from graphopt.graph import TrainingGraph
from graphopt.passes.technique import technique
from graphopt.planner.flops_limit import FlopsLimit
from graphopt.planner.importance import Importance
from graphopt.planner.memory_plan import within_memory
from graphopt.planner.plan import Plan
from graphopt.planner.rating import Rater, rated_by_all, selecting_of

if TYPE_CHECKING:
    from graphopt.runtime.module import OptimizedModule

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reselection:
    """What `OptimizedModule.reselect` did.

    Attributes:
        changed: a new selection is in force.
        gain: importance of the new selection over the current one's, as a fraction of the new; NaN where it was not measured.
        seconds: measuring importance and selecting.
    """

    changed: bool
    gain: float
    seconds: float


New = tuple[Plan, TrainingGraph, FlopProfile]
"""A plan to put in force, and the captured graph with its profile that it was made on."""


def select_anew(
    opt: OptimizedModule, batch: Any, optimizer: torch.optim.Optimizer | None, tolerance: float
) -> tuple[Reselection, New | None]:
    """Measure importance on `batch` and select; nothing is changed yet.

    Args:
        batch, optimizer, tolerance: see `OptimizedModule.reselect`.
    Returns:
        The outcome, and what to put in force where it changed.
    Raises:
        InputError: the batch is not one that the model could be called with, or the tolerance is none.
    """
    if not isinstance(tolerance, (int, float)) or not tolerance >= 0:
        raise InputError(f"tolerance={tolerance!r} must be a fraction of at least 0, for instance 0.05.")
    start = time.perf_counter()
    try:
        call = opt.ranks.together(lambda: Call(*as_call(batch)), WHAT)
        if opt.plan.selection is None or opt.plan.budget.flops is None:
            return _without_selection(opt, call, optimizer, start)
        limit = opt.ranks.together(lambda: _limit(opt, call), WHAT)
        names = opt.ranks.together(limit.reachable, WHAT)
    except (InputError, RankError):
        raise
    except Exception as error:  # training never dies of an optimisation
        return _kept(error, start)
    plan, graph, profile = opt.plan, limit.graph, limit.captured
    try:
        rater = Rater(plan.passes, opt._graphopt_model, *call, graph, optimizer, opt.loss_given, opt.ranks)
        importance = rater.rate(limit.profile, names, plan.importance)
        found = opt.ranks.together(lambda: _better(opt, limit, importance, tolerance, call), WHAT)
    except (BudgetError, ImportanceError, PassError, torch.OutOfMemoryError) as error:
        return _kept(error, start)
    seconds = time.perf_counter() - start
    changed, gain = opt.ranks.same((found[0] is not None, found[1]), WHAT)
    better = plan_of_rank_0(found[0] or opt.plan, opt.ranks, opt.plan.passes, WHAT) if changed else None
    return Reselection(better is not None, gain, seconds), None if better is None else (better, graph, profile)


WHAT = "selecting anew"


def _without_selection(
    opt: OptimizedModule, call: Call, optimizer: torch.optim.Optimizer | None, start: float
) -> tuple[Reselection, New | None]:
    """Where all tensors are trained, nothing is selected; where some were frozen or unfrozen, the plan's graph is another.

    A limit on memory may then leave some untrained, of those that it left out before, too.
    """
    before, selecting = opt.plan, selecting_of(opt.plan.passes)
    if before.memory is not None and (selecting is None or selecting.train is None):  # else the user has said what is trained
        before = replace(before, train=None, selection=None, importance=None)
    if opt.ranks.all(_none_frozen_since(opt) or before.train is not None, WHAT):
        return Reselection(False, 0.0, time.perf_counter() - start), None
    graph = opt.ranks.together(lambda: _captured(opt, call), WHAT)

    def rate() -> Importance:
        profile = FlopsLimit(before, graph, flop_profile(graph)).profile
        rater = Rater(before.passes, opt._graphopt_model, *call, graph, optimizer, opt.loss_given, opt.ranks)
        return rater.rate(profile, profile.order)

    rated = rated_by_all(before, graph, rate, opt.ranks)
    plan = opt.ranks.together(lambda: _carried_out(opt, within_memory(before, graph, rated), graph, call), WHAT)
    plan = plan_of_rank_0(plan, opt.ranks, before.passes, WHAT)
    return Reselection(True, 0.0, time.perf_counter() - start), (plan, graph, flop_profile(graph))


def _limit(opt: OptimizedModule, call: Call) -> FlopsLimit:
    graph = _captured(opt, call)
    return FlopsLimit(opt.plan, graph, opt.flops if graph is opt.graph else flop_profile(graph))


def _better(
    opt: OptimizedModule, limit: FlopsLimit, importance: Importance, tolerance: float, call: Call
) -> tuple[Plan | None, float]:
    """A plan that is better by more than `tolerance`, and the gain; None where that in force stays."""
    graph, known = limit.graph, frozenset(limit.captured.order)
    selection = limit.select(importance)
    if not selection.names:
        logger.warning("keeping the last selection: no tensor's step would lower the loss on this batch")
        return None, 0.0
    added = {p.name for p in graph.parameters}.difference(p.name for p in opt.graph.parameters)  # trained, and not counted
    now = frozenset(p.name for p in opt.graph.trainable if opt.plan.train is None or p.name in opt.plan.train)
    within = not added and now <= known and limit.step_flops(now) <= limit.most
    current = importance.of(now)
    gain = _gain(selection.value, current)
    if within and (gain <= tolerance or frozenset(selection.names) == now):
        return None, gain
    plan = replace(opt.plan, train=frozenset(selection.names), selection=selection, importance=importance)
    try:
        if plan.memory is not None:
            plan = within_memory(plan, graph, lambda: importance)
            gain = _gain(importance.of(plan.train or known), current)
            if within and graph is opt.graph and (gain <= tolerance or plan.key == opt.plan.key):
                return None, gain
        plan = _carried_out(opt, plan, graph, call)
    except (PassError, BudgetError) as error:
        logger.warning("keeping the last selection: the passes cannot carry out the new one: %s", error)
        return None, gain
    return plan, gain


def _captured(opt: OptimizedModule, call: Call) -> TrainingGraph:
    if opt.captures.several_graphs and _none_frozen_since(opt):
        return opt.graph  # recording takes a run of the model
    return opt.captures.planned_on(*call)


def _none_frozen_since(opt: OptimizedModule) -> bool:
    """Whether the parameters that require a gradient are those of the plan's graph."""
    frozen = frozen_names(opt._graphopt_model)
    return all(p.trainable != (p.name in frozen) for p in opt.graph.parameters)


def _carried_out(opt: OptimizedModule, plan: Plan, graph: TrainingGraph, call: Call) -> Plan:
    """The plan with what techniques decide for another graph or selection; its rewrite is tried."""
    for rewrite in plan.passes:
        plan = technique(rewrite).reselected(plan, graph, lambda plan: opt.captures.not_separable(plan, *call))
    plan.rewrite(graph, batch_size(*call, opt.captures.batch_dim))
    return plan


def _gain(value: float, current: float) -> float:
    return (value - current) / abs(value) if value else 0.0


def _kept(error: Exception, start: float) -> tuple[Reselection, None]:
    logger.warning("keeping the last selection: %s", first_line(error))
    return Reselection(False, math.nan, time.perf_counter() - start), None

"""Selecting tensors anew while a model trains (GreenTrainer does so every epoch; see `OptimizedModule.reselect`)."""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from graphopt.analysis.flops import FlopProfile, flop_profile
from graphopt.calls import as_call
from graphopt.distributed.agreement import plan_of_rank_0
from graphopt.distributed.ranks import Ranks
from graphopt.errors import BudgetError, ImportanceError, InputError, PassError, RankError, first_line
from graphopt.frontend.region import frozen_names
from graphopt.graph import TrainingGraph
from graphopt.loss import LossFunction
from graphopt.passes.technique import technique
from graphopt.planner.flops_limit import FlopsLimit
from graphopt.planner.importance import Importance
from graphopt.planner.memory_plan import within_memory
from graphopt.planner.plan import Plan
from graphopt.planner.rating import rate_tensors, selecting_of
from graphopt.runtime.captures import Captures

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


@dataclass(frozen=True)
class NewPlan:
    """A plan to put in force, and the captured graph with its profile that it was made on."""

    plan: Plan
    graph: TrainingGraph
    profile: FlopProfile


@dataclass(frozen=True)
class InForce:
    """What a model is trained by now.

    Attributes:
        selected: names of the parameters that are trained.
        graph, profile: that `plan` was made on.
        ranks: that train the model together.
    """

    model: nn.Module
    captures: Captures
    plan: Plan
    selected: frozenset[str]
    graph: TrainingGraph
    profile: FlopProfile
    loss: LossFunction | None
    ranks: Ranks = field(default_factory=Ranks.alone)

    def captured(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TrainingGraph:
        """The joint graph for such a batch."""
        if self.captures.several_graphs and self.none_frozen_since:
            return self.graph  # recording takes a run of the model
        return self.captures.planned_on(args, kwargs)

    @property
    def none_frozen_since(self) -> bool:
        """Whether the parameters that require a gradient are those of the graph."""
        frozen = frozen_names(self.model)
        return all(p.trainable != (p.name in frozen) for p in self.graph.parameters)


def select_anew(
    now: InForce, batch: Any, optimizer: torch.optim.Optimizer | None, tolerance: float
) -> tuple[Reselection, NewPlan | None]:
    """Measure importance on `batch` and select; nothing is changed yet.

    Args:
        batch, optimizer, tolerance: see `OptimizedModule.reselect`.
    Returns:
        The outcome, and what to put in force where it changed.
    Raises:
        InputError: the batch is not one that the model could be called with.
    """
    start = time.perf_counter()
    try:
        if now.plan.selection is None or now.plan.budget.flops is None:
            return _without_selection(now, *as_call(batch), optimizer, start)
        limit, args, kwargs = now.ranks.together(lambda: _limit(now, batch), WHAT)
        names = now.ranks.together(limit.reachable, WHAT)
    except (InputError, RankError):
        raise
    except Exception as error:  # training never dies of an optimisation
        return _kept(error, start)
    plan, graph, profile = now.plan, limit.graph, limit.captured
    try:
        importance = rate_tensors(
            plan.passes, now.model, args, kwargs, graph, limit.profile, names, optimizer, now.loss, plan.importance, now.ranks
        )
        found = now.ranks.together(lambda: _better(now, limit, importance, tolerance, args, kwargs), WHAT)
    except (BudgetError, ImportanceError, PassError, torch.OutOfMemoryError) as error:
        return _kept(error, start)
    seconds = time.perf_counter() - start
    changed, gain = now.ranks.same((found[0] is not None, found[1]), WHAT)
    better = plan_of_rank_0(found[0] or now.plan, now.ranks, now.plan.passes, WHAT) if changed else None
    return Reselection(better is not None, gain, seconds), None if better is None else NewPlan(better, graph, profile)


WHAT = "selecting anew"


def _without_selection(
    now: InForce, args: tuple[Any, ...], kwargs: dict[str, Any], optimizer: torch.optim.Optimizer | None, start: float
) -> tuple[Reselection, NewPlan | None]:
    """Where all tensors are trained, nothing is selected; where some were frozen or unfrozen, the plan's graph is another.

    A limit on memory may then leave some untrained, of those that it left out before, too.
    """
    before, selecting = now.plan, selecting_of(now.plan.passes)
    if before.memory is not None and (selecting is None or selecting.train is None):  # else the user has said what is trained
        before = replace(before, train=None, selection=None, importance=None)
    if now.ranks.all(now.none_frozen_since or before.train is not None, WHAT):
        return Reselection(False, 0.0, time.perf_counter() - start), None
    graph = now.ranks.together(lambda: now.captured(args, kwargs), WHAT)

    def rate() -> Importance:
        profile = FlopsLimit(before, graph, flop_profile(graph)).profile
        return rate_tensors(
            before.passes, now.model, args, kwargs, graph, profile, profile.order, optimizer, now.loss, ranks=now.ranks
        )

    plan = now.ranks.together(lambda: _carried_out(now, within_memory(before, graph, rate), graph, args, kwargs), WHAT)
    plan = plan_of_rank_0(plan, now.ranks, before.passes, WHAT)
    return Reselection(True, 0.0, time.perf_counter() - start), NewPlan(plan, graph, flop_profile(graph))


def _limit(now: InForce, batch: Any) -> tuple[FlopsLimit, tuple[Any, ...], dict[str, Any]]:
    """The limit for such a batch, and the batch as a call."""
    args, kwargs = as_call(batch)
    graph = now.captured(args, kwargs)
    profile = now.profile if graph is now.graph else flop_profile(graph)
    return FlopsLimit(now.plan, graph, profile), args, kwargs


def _better(
    now: InForce, limit: FlopsLimit, importance: Importance, tolerance: float, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Plan | None, float]:
    """A plan that is better by more than `tolerance`, and the gain; None where that in force stays."""
    graph, known = limit.graph, frozenset(limit.captured.order)
    selection = limit.select(importance)
    if not selection.names:
        logger.warning("keeping the last selection: no tensor's step would lower the loss on this batch")
        return None, 0.0
    added = {p.name for p in graph.parameters}.difference(p.name for p in now.graph.parameters)  # trained, and not counted
    within = not added and now.selected <= known and limit.step_flops(now.selected) <= limit.most
    current = importance.of(now.selected)
    gain = _gain(selection.value, current)
    if within and (gain <= tolerance or frozenset(selection.names) == now.selected):
        return None, gain
    plan = replace(now.plan, train=frozenset(selection.names), selection=selection, importance=importance)
    try:
        if plan.memory is not None:
            plan = within_memory(plan, graph, lambda: importance)
            gain = _gain(importance.of(plan.train or known), current)
            if within and graph is now.graph and (gain <= tolerance or plan.key == now.plan.key):
                return None, gain
        plan = _carried_out(now, plan, graph, args, kwargs)
    except (PassError, BudgetError) as error:
        logger.warning("keeping the last selection: the passes cannot carry out the new one: %s", error)
        return None, gain
    return plan, gain


def _carried_out(now: InForce, plan: Plan, graph: TrainingGraph, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
    """The plan with what techniques decide for another graph or selection; its rewrite is tried."""
    for rewrite in plan.passes:
        plan = technique(rewrite).reselected(plan, graph, lambda plan: now.captures.not_separable(plan, args, kwargs))
    plan.rewrite(graph, now.captures.batch_size(args, kwargs))
    return plan


def _gain(value: float, current: float) -> float:
    return (value - current) / abs(value) if value else 0.0


def _kept(error: Exception, start: float) -> tuple[Reselection, None]:
    logger.warning("keeping the last selection: %s", first_line(error))
    return Reselection(False, math.nan, time.perf_counter() - start), None

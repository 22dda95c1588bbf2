"""From a captured graph and a budget to a plan: what each pass that was asked for decides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from graphopt.analysis.flops import flop_profile
from graphopt.budget import Budget
from graphopt.calls import flatten_call
from graphopt.compat import fake_mode_of
from graphopt.distributed.ranks import Ranks
from graphopt.errors import ImportanceError
from graphopt.graph import TrainingGraph
from graphopt.loss import LossFunction
from graphopt.lower import Backend
from graphopt.passes import BY_NAME, Pass
from graphopt.passes.technique import Planning, technique
from graphopt.planner.flops_limit import FlopsLimit, check_given
from graphopt.planner.importance import Importance
from graphopt.planner.memory_limit import MemoryLimit
from graphopt.planner.memory_plan import within_memory
from graphopt.planner.plan import Plan
from graphopt.planner.rating import Rater, rated_by_all, selecting_of, without_gradients

BEYOND = 0.1
"""Part of the FLOPs that a raised budget has beyond what reaches the steepest matrix: that one alone trains no network."""


def make_plan(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    graph: TrainingGraph,
    budget: Budget,
    passes: tuple[Pass, ...],
    optimizer: torch.optim.Optimizer | None,
    loss: LossFunction | None,
    backend: Backend,
    not_separable: Callable[[Plan], str],
    auto: bool = False,
    ranks: Ranks | None = None,
) -> Plan:
    """Decide for every pass; see `optimize`.

    Args:
        not_separable: see `Planning`.
        auto: passes that have nothing to do are left out.
        ranks: that train the model together; the plan is still each rank's own, with gradients of all.
    """
    left_out = {n: why for n, make in BY_NAME.items() if isinstance(why := make.wanted(budget), str)} if auto else {}
    if budget.memory is not None:
        passes = without_gradients(passes)  # a full backward may be just what does not fit
    plan = Plan(budget, passes, memory=MemoryLimit.of(budget, backend, optimizer, graph), not_needed=left_out)
    call = flatten_call(args, kwargs)
    known = graph.out_spec is not None and fake_mode_of(call.tensors) is None and not any(t.is_meta for t in call.tensors)
    inputs = (call.names, call.tensors, graph.batch_size) if known and (ranks is None or ranks.size == 1) else None
    planning = Planning(graph, {**dict(model.named_parameters()), **dict(model.named_buffers())}, auto, not_separable, inputs)
    for rewrite in passes:
        plan = technique(rewrite).before_selection(plan, planning)
    rater = Rater(plan.passes, model, args, kwargs, graph, optimizer, loss, ranks)
    plan = _with_selection(plan, rater)

    def rate() -> Importance:
        profile = FlopsLimit(plan, graph, flop_profile(graph)).profile
        return rater.rate(profile, profile.order)

    plan = within_memory(plan, graph, rated_by_all(plan, graph, rate, ranks))
    for rewrite in plan.passes:
        plan = technique(rewrite).after_selection(plan, planning)
    return plan


def _with_selection(plan: Plan, rater: Rater) -> Plan:
    """The plan with the tensors to train, where they are given or the budget limits FLOPs and not all can be trained."""
    graph, ranks, selecting = rater.graph, rater.ranks or Ranks.alone(), selecting_of(plan.passes)
    if selecting is not None and selecting.train is not None:
        check_given(selecting.train, plan, graph)
        return replace(plan, train=frozenset(selecting.train))
    asked = plan.budget.flops
    if asked is None:
        return plan
    limit = FlopsLimit(plan, graph, flop_profile(graph))
    from_asked = None
    if plan.budget.or_more and (sensible := ranks.same(limit.sensible, "selecting")) > asked:
        from_asked = "", asked
        plan = replace(plan, budget=replace(plan.budget, flops=sensible))
        limit = replace(limit, plan=plan)
    if ranks.same(limit.everything_fits, "selecting"):
        return plan
    importance = rater.rate(limit.profile, limit.reachable())
    selection = limit.select(importance)
    if not selection.names:
        raise ImportanceError(
            "no tensor's next step would lower the loss on the example batch. Pass a batch from the training data, or "
            "optimizer=None to rate tensors by their squared gradient."
        )
    missed = ranks.same(selection.missed, "selecting") if plan.budget.or_more else None
    if missed is not None:
        name, reaching = missed
        raised = replace(plan, budget=replace(plan.budget, flops=min(1.0, round(reaching + BEYOND, 2)), or_more=False))
        plan = _with_selection(raised, rater)
        told = plan.selection and replace(plan.selection, raised=(name, asked))
        return replace(plan, budget=replace(plan.budget, or_more=True), selection=told)
    selection = replace(selection, raised=from_asked)
    return replace(plan, train=frozenset(selection.names), selection=selection, importance=importance)

"""From a captured graph and a budget to a plan: what each pass that was asked for decides."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from graphopt.analysis.flops import flop_profile
from graphopt.analysis.lora_sites import find_lora_sites
from graphopt.budget import Budget
from graphopt.errors import ImportanceError, PassError
from graphopt.graph import TrainingGraph
from graphopt.loss import LossFunction
from graphopt.lower import Backend
from graphopt.passes import GreenTrainer, Lsp, Pass, Recompute, RunLora, Vcas
from graphopt.planner.contraction import merge_errors
from graphopt.planner.flops_limit import FlopsLimit, check_given
from graphopt.planner.importance import Importance
from graphopt.planner.joint_plan import Means, within_memory
from graphopt.planner.memory_limit import MemoryLimit
from graphopt.planner.plan import SAMPLING_LEFT_OUT, Plan
from graphopt.planner.rating import rate_tensors, without_gradients


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
    auto: bool = False,
) -> Plan:
    """Decide for every pass; see `optimize`.

    Args:
        auto: passes that have nothing to do are left out.
    """
    for rewrite in passes:
        if isinstance(rewrite, Recompute):
            rewrite.check(graph)
    if budget.memory is not None:
        passes = without_gradients(passes)  # a full backward may be just what does not fit
    imprecise: dict[str, float] = {}
    if any(isinstance(p, RunLora) for p in passes):
        sites = find_lora_sites(graph)
        if auto and not sites.layers and not sites.left_alone:
            passes = tuple(p for p in passes if not isinstance(p, RunLora))
        imprecise = merge_errors(graph, {**dict(model.named_parameters()), **dict(model.named_buffers())})
    left_out = {"vcas": SAMPLING_LEFT_OUT} if auto and budget.flops is not None and budget.variance is not None else {}
    limit = MemoryLimit.of(budget, backend, optimizer)
    plan = Plan(budget, passes, imprecise=imprecise, memory=limit, not_needed=left_out)
    plan = _with_selection(plan, model, args, kwargs, graph, optimizer, loss)
    freeze = auto or any(isinstance(p, GreenTrainer) and p.train is None for p in passes)

    def rate() -> Importance:
        profile = flop_profile(graph)
        return rate_tensors(passes, model, args, kwargs, graph, profile, profile.order, optimizer, loss)

    # Gradients are compressed only where the caller has named the pass: they need an optimizer of their own.
    return within_memory(plan, graph, Means(freeze), rate)


def compressed_weights(plan: Plan, compression: Lsp, graph: TrainingGraph) -> tuple[str, ...]:
    """The weights whose gradient is compressed whenever it is computed, whatever is selected and sampled from step to step.

    Raises:
        PassError: there is none; or the tensors to train were given, and a weight that was named, or every weight, is not among
            them.
    """
    names = tuple(site.name for site in compression.applicable(graph))
    if plan.train is None or plan.selection is not None:  # a selection may change: whatever it may train has a subspace
        return names
    trained = tuple(name for name in names if name in plan.train)
    if not trained or (compression.weights is not None and trained != names):
        cut = next(name for name in names if name not in plan.train)
        raise PassError(f"lsp cannot compress the gradient of {cut}: greentrainer does not train it. Train it, or leave it out.")
    return trained


def check_sampling(plan: Plan, graph: TrainingGraph, reason: str) -> Plan:
    """The plan, knowing why the backward cannot be sampled, if so.

    Args:
        reason: see `mixing_reason`.
    Raises:
        PassError: it cannot, although the caller asked for it by stating ratios; or they do not fit the model.
    """
    for rewrite in plan.passes:
        if isinstance(rewrite, Vcas) and not rewrite.adaptive:
            if reason:
                remedy = "Pass an example of at least 2 samples" if graph.batch_size == 1 else "Remove the vcas pass"
                raise PassError(f"rows of this model's backward cannot be sampled: {reason}. {remedy}.")
            rewrite.ratios(plan.before_sampling().rewrite(graph)[0])
    return replace(plan, mixing=reason)


def _with_selection(
    plan: Plan,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    graph: TrainingGraph,
    optimizer: torch.optim.Optimizer | None,
    loss: LossFunction | None,
) -> Plan:
    """The plan with the tensors to train, where they are given or the budget limits FLOPs and not all can be trained."""
    given = [p.train for p in plan.passes if isinstance(p, GreenTrainer) and p.train is not None]
    if given:
        check_given(given[0], plan, graph)
        return replace(plan, train=frozenset(given[0]))
    if plan.budget.flops is None:
        return plan
    limit = FlopsLimit(plan, graph, flop_profile(graph))
    if limit.everything_fits:
        return plan
    importance = rate_tensors(plan.passes, model, args, kwargs, graph, limit.profile, limit.reachable(), optimizer, loss)
    selection = limit.select(importance)
    if not selection.names:
        raise ImportanceError(
            "no tensor's next step would lower the loss on the example batch. Pass a batch from the training data, or "
            "optimizer=None to rate tensors by their squared gradient."
        )
    return replace(plan, train=frozenset(selection.names), selection=selection, importance=importance)

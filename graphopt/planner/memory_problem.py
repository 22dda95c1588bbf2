"""The program for a limit on memory: what a graph's tensors and segments cost, and the plan that a solution means."""

from __future__ import annotations

import math
from dataclasses import replace

from graphopt.analysis.flops import FlopProfile
from graphopt.analysis.optimizers import optimizer_memory
from graphopt.analysis.segments import find_segments
from graphopt.graph import TrainingGraph
from graphopt.passes.technique import Found, Offers, technique
from graphopt.planner.costs import backward_costs
from graphopt.planner.importance import Importance
from graphopt.planner.plan import Plan
from graphopt.planner.problem import Allocation, Problem, TensorBytes
from graphopt.planner.selection import Selection

FEWEST = 1e-3
"""Importance that every tensor has at least, as a part of the largest, where nothing limits FLOPs: all training is wanted."""


def offers_of(plan: Plan, graph: TrainingGraph) -> Offers:
    """What the techniques of a plan offer together."""
    found = [technique(p).offers(plan, graph) for p in plan.passes]
    smaller = {name: gradient for offers in reversed(found) for name, gradient in offers.smaller.items()}
    return Offers(
        any(offers.leaves_untrained for offers in found),
        any(offers.recomputes for offers in found),
        smaller,
        min((offers.kept_value for offers in found), default=1.0),
        frozenset().union(*(offers.held for offers in found)),
    )


def adopted(plan: Plan, found: Found) -> Plan:
    """The plan with what was found, each technique taking its own."""
    for rewrite in plan.passes:
        plan = technique(rewrite).adopt(plan, found)
    return plan


def make_problem(
    plan: Plan,
    graph: TrainingGraph,
    profile: FlopProfile,
    importance: Importance | None,
    offers: Offers,
    merged: int = 1,
) -> Problem:
    """The numbers of a graph; see `Problem`.

    Args:
        plan: whose limit says which optimizer is used, and whose budget whether all is to be trained.
        offers: of the plan's techniques.
        merged: neighbouring segments that are computed again as one.
    """
    assert plan.memory is not None
    costs = backward_costs(profile)
    segments = find_segments(graph, merged)
    segment_of = {name: i for i, segment in enumerate(segments) for name in segment.parameters}
    parameters = {p.name: p for p in graph.parameters}
    trained = [parameters[n] for n in costs.names if n not in offers.held]
    states: dict[str, int] = {}
    for name, _, size in optimizer_memory(plan.memory.optimizer, trained, graph.example.device).states:
        states[name] = states.get(name, 0) + size
    tensors = []
    for name, formed in zip(costs.names, costs.weight_grad_flops, strict=True):
        small = offers.smaller.get(name)
        gradient = 0 if name in offers.held else math.prod(parameters[name].shape) * parameters[name].dtype.itemsize
        more = 0 if small is None else max(0, small.flops - formed)  # now and then a step forms the gradient itself
        bytes_, state = None if small is None else small.bytes, states.get(name, 0)
        tensors.append(TensorBytes(gradient, state, segment_of.get(name, 0), bytes_, more))
    once = dict(zip(graph.inputs, graph.placeholders, strict=True))  # tied weights are there under each of their names
    fixed = sum(graph.bytes_of(n.meta["val"]) for desc, n in once.items() if desc.kind in ("parameter", "buffer", "input"))
    values = {} if importance is None else importance.values
    if plan.budget.flops is None:  # all of it is to be trained, unless it does not fit
        largest = max(values.values(), default=1.0) or 1.0
        rated = tuple(max(values.get(n, 0.0), FEWEST * largest) for n in costs.names)
    else:
        rated = tuple(max(values.get(n, 0.0), 0.0) for n in costs.names)
    kinds = tuple((segment.saved_bytes, segment.flops) for segment in segments)
    held = tuple(segment.held_bytes for segment in segments)
    segment_names = tuple(segment.name for segment in segments)
    return Problem(costs, rated, tuple(tensors), kinds, held, fixed, offers.kept_value, merged, segment_names)


def planned(
    plan: Plan,
    graph: TrainingGraph,
    problem: Problem,
    allocation: Allocation,
    importance: Importance | None,
    keep_selection: bool = False,
) -> Plan:
    """`plan` with a solution's decisions.

    Args:
        keep_selection: what is trained stays as the plan says.
    """
    names = problem.costs.names
    recomputed = tuple(problem.segment_names[i] for i in allocation.recomputed if problem.segments[i][0])
    smaller = tuple(sorted(names[k] for k in allocation.compressed))
    trained = tuple(names[k] for k in allocation.train)
    if not keep_selection and (len(trained) < len(names) or plan.train is not None):
        value = math.fsum(problem.importance[k] for k in allocation.train)
        cost = problem.costs.cost(allocation.train)
        before = (None, None) if plan.selection is None else (plan.selection.missed, plan.selection.raised)
        selection = Selection(trained, cost, value, "one program for FLOPs and memory", *before)
        plan = replace(plan, train=frozenset(trained), selection=selection, importance=importance)
    return adopted(plan, Found(smaller, recomputed, problem.merged))

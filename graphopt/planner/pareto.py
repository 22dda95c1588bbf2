"""What a model's training step can cost: the best plans over FLOPs and memory, with the importance that they keep."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from graphopt.analysis.flops import flop_profile
from graphopt.budget import Budget
from graphopt.errors import BudgetError
from graphopt.graph import TrainingGraph
from graphopt.passes import BY_NAME, in_order
from graphopt.planner.capacity import capacity
from graphopt.planner.costs import smallest_ratio
from graphopt.planner.memory_limit import MemoryLimit
from graphopt.planner.memory_problem import make_problem, offers_of, planned
from graphopt.planner.plan import Plan
from graphopt.planner.problem import Problem, evaluate
from graphopt.planner.solver import solve

STEPS = 6
"""Limits that are tried in each dimension."""


@dataclass(frozen=True)
class Point:
    """One plan.

    Attributes:
        flops_ratio: FLOPs of its step, what is computed again included, over full training's.
        peak_bytes: predicted, optimizer state included.
        importance: part of all importance that it keeps; a compressed gradient keeps 1 - threshold^2 of its own.
        trained, compressed, recomputed: how many tensors and segments.
    """

    flops_ratio: float
    peak_bytes: int
    importance: float
    trained: int
    compressed: int
    recomputed: int


def trade_offs(
    graph: TrainingGraph,
    backend: str,
    optimizer: Any,
    advance: Callable[[], object] = lambda: None,
) -> tuple[Point, ...]:
    """Plans of which none is worse than another in FLOPs, bytes and importance at once, from the cheapest FLOPs on.

    Args:
        backend, optimizer: see `MemoryLimit`.
        advance: called `STEPS` squared times, once per pair of limits.
    """
    profile, limit = flop_profile(graph), MemoryLimit(0, backend, optimizer)
    importance = capacity(graph, profile)
    offered = [rewrite for kind in BY_NAME.values() if (rewrite := kind.offered(graph)) is not None]
    bare = Plan(Budget(), in_order(offered), memory=limit)
    problem = make_problem(bare, graph, profile, importance, offers_of(bare, graph))
    found: dict[tuple[tuple[int, ...], ...], Point] = {}
    total = sum(problem.importance) or 1.0
    for flops_limit, memory_limit in _limits(smallest_ratio(problem.costs), problem):
        advance()
        allocation = solve(problem, flops_limit, memory_limit, time_limit=2.0)
        if allocation is None:
            continue
        key = (allocation.train, allocation.compressed, allocation.recomputed)
        if key in found:
            continue
        plan = planned(bare, graph, problem, allocation, importance)
        rewritten, reports = plan.rewrite(graph)
        kept = sum(problem.importance[k] for k in allocation.train)
        kept -= (1 - problem.kept_value) * sum(problem.importance[k] for k in allocation.compressed)
        found[key] = Point(
            problem.costs.part(reports[-1].step_flops_after),
            limit.peak_of(rewritten, graph.batch_size),
            kept / total,
            len(allocation.train),
            len(allocation.compressed),
            len(allocation.recomputed),
        )
    if not found:
        raise BudgetError("no plan of this model was found that trains anything.")
    simplest_last = sorted(found.values(), key=lambda p: -p.compressed - p.recomputed)
    points = {(p.flops_ratio, p.peak_bytes, p.importance): p for p in simplest_last}
    return tuple(points[at] for at in sorted(points) if not any(_better(q, points[at]) for q in points.values()))


def _limits(smallest: float, problem: Problem) -> Iterator[tuple[int, int]]:
    """Pairs of FLOPs and bytes, from what the cheapest plans need to what full training does."""
    everything = range(len(problem.tensors))
    _, most = evaluate(problem, everything, (), ())
    least_plan = solve(problem, smallest_memory=True)
    least = most if least_plan is None else least_plan.peak_bytes
    again = sum(flops for _, flops in problem.segments)
    most_flops = problem.costs.step_flops + again
    least_flops = int(smallest * problem.costs.step_flops) + 1
    for i in range(STEPS):
        for j in range(STEPS):
            flops = least_flops + (most_flops - least_flops) * i // (STEPS - 1)
            yield flops, least + (most - least) * j // (STEPS - 1)


def _better(one: Point, other: Point) -> bool:
    ours = (-one.flops_ratio, -one.peak_bytes, one.importance)
    theirs = (-other.flops_ratio, -other.peak_bytes, other.importance)
    return ours != theirs and all(a >= b for a, b in zip(ours, theirs, strict=True))

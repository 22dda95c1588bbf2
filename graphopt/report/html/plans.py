"""Plans for the page's slider: what each budget on FLOPs trains, by the solver that `optimize` uses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from graphopt.analysis.flops import FlopProfile
from graphopt.errors import BudgetError
from graphopt.graph import TrainingGraph
from graphopt.planner.flops_limit import default_limit
from graphopt.planner.plan import Plan
from graphopt.planner.selection import select

STEP = 0.02
"""Distance of the budgets."""

RESOLUTION = 20_000
"""Of the knapsack, which is solved for each of them."""


def solved_plans(
    plan: Plan, graph: TrainingGraph, flops: FlopProfile, values: Mapping[str, float], ratio: float
) -> list[dict[str, Any]]:
    """Budgets from the smallest that trains anything to full training, each with the names of what it trains.

    `used` is the part of a full step's FLOPs that the plan takes. What exact passes save before tensors are selected is
    counted; what others save later is not. The plan in force stands at its own budget.

    Args:
        flops: of the captured graph.
        values: by which tensors are selected.
        ratio: FLOPs of the step of the plan in force over full training's.
    """
    costs = default_limit(graph, flops).costs
    ordered = [max(0.0, values.get(name, 0.0)) for name in costs.names]
    total = math.fsum(ordered) or 1.0
    found = []
    for k in range(math.ceil(costs.part(costs.forward_flops) / STEP), round(1 / STEP) + 1):
        budget = round(k * STEP, 4)
        try:
            chosen = select(costs, ordered, budget, solver="knapsack", resolution=RESOLUTION)
        except BudgetError:  # it leaves too little for any gradient
            continue
        names = chosen.names if costs.affordable(budget) < costs.backward_flops else costs.names
        used = costs.part(costs.forward_flops + costs.cost([costs.names.index(name) for name in names]))
        found.append(_solved(budget, used, names, values, total, False))
    asked = plan.budget.flops
    if asked is not None and plan.train is not None:
        names = tuple(name for name in costs.names if name in plan.train)
        found = [p for p in found if abs(p["flops"] - asked) > STEP / 4]
        found.append(_solved(asked, ratio, names, values, total, True))
    return sorted(found, key=lambda p: p["flops"])


def _solved(
    budget: float, used: float, names: tuple[str, ...], values: Mapping[str, float], total: float, in_force: bool
) -> dict[str, Any]:
    value = math.fsum(max(0.0, values.get(name, 0.0)) for name in names) / total
    return {"flops": budget, "used": used, "value": value, "trained": names, "in_force": in_force}

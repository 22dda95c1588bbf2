"""Which tensors to train: the most important ones whose backward fits the budget (GreenTrainer, section 3)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from graphopt.errors import BudgetError, ImportanceError
from graphopt.planner.costs import BackwardCosts, smallest_ratio
from graphopt.planner.knapsack import chain_knapsack, fill
from graphopt.planner.problem import Problem, TensorBytes
from graphopt.planner.solver import solve

RESOLUTION = 100_000
"""T_q: steps of the knapsack's budget."""


@dataclass(frozen=True)
class Selection:
    """A set of tensors to train.

    Attributes:
        names: of the tensors (m in the paper).
        backward_flops: exact FLOPs of the backward nodes of the captured graph that stay alive (`backward_cone`, sigma(m)).
        value: sum of the importance.
        solver: what found it.
        missed: the matrix in which the loss is by far the steepest, where the budget does not reach it, and the fraction that
            does.
        raised: the same where the budget was raised to train that matrix well, and the fraction that it was raised from; "" for
            the matrix where it left less than a quarter of the backward.
    """

    names: tuple[str, ...]
    backward_flops: int
    value: float
    solver: str
    missed: tuple[str, float] | None = None
    raised: tuple[str, float] | None = None


def select(
    costs: BackwardCosts,
    importance: Sequence[float],
    flops_ratio: float,
    *,
    spare_flops: int = 0,
    quick: bool = False,
    resolution: int = RESOLUTION,
) -> Selection:
    """The most important tensors whose step costs at most `flops_ratio` of full training.

    Args:
        importance: I_k, aligned with `costs.names`; scale does not matter. Tensors with I_k <= 0 are not chosen, unless
            `flops_ratio` is 1, which trains everything.
        flops_ratio: rho, in (0, 1].
        spare_flops: by which the step may exceed that, because later passes save as much; below 0 if they cost more.
        quick: only by the knapsack, which is exact on chains; else also by a MILP, exact to `FEWER_FLOPS` on any graph.
        resolution: T_q of the knapsack.
    Returns:
        A selection that never exceeds the budget; empty if no importance is positive.
    Raises:
        BudgetError: out of range, or too small to train anything; names the smallest feasible ratio.
        ImportanceError: NaN or infinite.
    """
    if not 0 < flops_ratio <= 1:
        raise BudgetError(f"flops={flops_ratio!r} must be above 0 and at most 1.")
    if not all(math.isfinite(i) for i in importance):
        raise ImportanceError("importance must be finite.")
    if flops_ratio == 1 and spare_flops >= 0:
        return _selection(costs, importance, range(len(costs.names)), "everything")
    limit = costs.affordable(flops_ratio) + spare_flops
    if limit < min(costs.cost([i]) for i in range(len(costs.names))):
        raise infeasible(costs, flops_ratio)
    chosen = fill(costs, importance, limit, chain_knapsack(costs, importance, limit, resolution))
    by_knapsack = _selection(costs, importance, chosen, "knapsack")
    if quick:
        return by_knapsack
    wanted, free = tuple(max(i, 0.0) for i in importance), (TensorBytes(0, 0, 0),) * len(costs.names)
    problem = Problem(costs, wanted, free, ((0, 0),), (0,), 0)  # bytes do not count
    solved = solve(problem, costs.forward_flops + limit, may_recompute=False, time_limit=2.0)
    chosen = fill(costs, importance, limit, () if solved is None else solved.train)
    return max(by_knapsack, _selection(costs, importance, chosen, "milp"), key=lambda s: (s.value, -s.backward_flops))


def infeasible(costs: BackwardCosts, flops_ratio: float) -> BudgetError:
    """The error for a budget too small to train anything."""
    forward = costs.part(costs.forward_flops)
    what = "is below the forward pass alone" if flops_ratio < forward else "leaves too little for any gradient beyond the forward"
    return BudgetError(
        f"flops={flops_ratio:.4g} {what} ({forward:.3f} of a full step). Smallest feasible: {smallest_ratio(costs)}."
    )


def _selection(costs: BackwardCosts, importance: Sequence[float], chosen: Sequence[int], solver: str) -> Selection:
    return Selection(
        names=tuple(costs.names[i] for i in sorted(chosen)),
        backward_flops=costs.cost(chosen),
        value=math.fsum(importance[i] for i in chosen),
        solver=solver,
    )

"""What a budget on FLOPs buys: the value of the best selection at every fraction, and where a little more buys much."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from graphopt.errors import BudgetError
from graphopt.planner.costs import BackwardCosts, smallest_ratio
from graphopt.planner.selection import select

STEP = 0.02
"""Distance of the fractions that are tried."""

REACH = 0.1
"""How much more of a full step a suggestion may take."""

STEEP = 1.5
"""A cliff or a suggestion gains at least so many times, per FLOP, what its surroundings gain."""


@dataclass(frozen=True)
class Worth:
    """The best selection at one fraction.

    Attributes:
        flops: fraction of a full step's FLOPs, the budget.
        value: of what it trains, as a part of everything's.
        trained: how many tensors.
    """

    flops: float
    value: float
    trained: int


def worth_of_flops(
    costs: BackwardCosts, values: Sequence[float], ratios: Sequence[float] = (), spare_flops: int = 0
) -> tuple[Worth, ...]:
    """The best selections from the smallest budget to full training; by the quick solver, which is exact on chains.

    Args:
        values: of the tensors, as in `costs.names`.
        ratios: further fractions to look at.
        spare_flops: by which a step may exceed its fraction, as later passes save them.
    """
    total = math.fsum(max(value, 0.0) for value in values) or 1.0
    least = smallest_ratio(costs, spare_flops)
    tried = {least, 1.0, *(r for r in ratios if r > least), *(k * STEP for k in range(1, round(1 / STEP)) if k * STEP > least)}
    found = []
    for ratio in sorted({round(r, 6) for r in tried}):
        try:
            selection = select(costs, values, ratio, spare_flops=spare_flops, quick=True)
        except BudgetError:  # a rounding below the smallest
            continue
        found.append(Worth(ratio, selection.value / total, len(selection.names)))
    return tuple(found)


def cliffs(curve: Sequence[Worth]) -> tuple[float, ...]:
    """Fractions that gain much more than those next to them, and than average: just below, something large no longer fits."""
    gains = [_gain(below, above) for below, above in itertools.pairwise(curve)]
    around = zip([0.0, *gains], gains, [*gains[1:], 0.0], strict=False)
    average = _gain(curve[0], curve[-1]) if curve else 0.0
    steep = [k for k, (before, gain, after) in enumerate(around) if gain >= max(STEEP * max(before, after), average) > 0]
    return tuple(curve[k + 1].flops for k in steep)


def next_better(curve: Sequence[Worth], flops: float) -> Worth | None:
    """The fraction a little above `flops` that gains most per FLOP; None where none gains much more than the others there.

    Args:
        curve: contains `flops`, or starts above it.
    """
    now = max((w for w in curve if w.flops <= flops + 1e-6), key=lambda w: w.flops, default=None)
    above = [] if now is None else [w for w in curve if now.flops < w.flops <= now.flops + REACH + 1e-9]
    if now is None or not above:
        return None
    best = max(above, key=lambda w: _gain(now, w))
    return best if best.value > now.value and _gain(now, best) >= STEEP * _gain(now, above[-1]) else None


def _gain(below: Worth, above: Worth) -> float:
    return (above.value - below.value) / max(above.flops - below.flops, STEP / 4)

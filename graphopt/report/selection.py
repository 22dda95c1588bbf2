"""Why these tensors are trained: the rule, what simple rules would have been worth by it, and which budget would buy more."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from graphopt.analysis.flops import FlopProfile
from graphopt.planner.costs import BackwardCosts, backward_costs
from graphopt.planner.guidance import Worth, cliffs, next_better, worth_of_flops
from graphopt.planner.plan import Plan
from graphopt.planner.simple_rules import SIMPLE_RULES
from graphopt.report.units import in_percent


@dataclass(frozen=True)
class SelectionSummary:
    """See the module.

    Attributes:
        rule: what the selection maximised.
        value: of what is trained, as a part of everything's.
        alternatives: the same of simple rules at the same FLOPs.
        cliffs: fractions of a full step's FLOPs just below which a large part no longer fits.
        next_better: the fraction above the budget's that gains most per FLOP, with its value; None where none stands out.
        missed: the matrix in which the loss is by far the steepest and that the budget does not reach, as where inputs are unlike
            those of pre-training, and the fraction that reaches it; None where there is none.
        raised: that matrix where the budget was raised to train it well, and the fraction that was asked for; "" for the matrix
            where that left less than a quarter of the backward.
    """

    rule: str
    value: float
    alternatives: dict[str, float]
    cliffs: tuple[float, ...]
    next_better: Worth | None
    missed: tuple[str, float] | None = None
    raised: tuple[str, float] | None = None


def summarise_selection(plan: Plan, flops: FlopProfile) -> SelectionSummary | None:
    """What there is to say about a plan's selection; None where nothing was selected.

    Args:
        flops: of the captured graph, in which the selection was made.
    """
    if plan.selection is None or plan.importance is None or plan.budget.flops is None:
        return None
    values = tuple(max(0.0, plan.importance.values.get(name, 0.0)) for name in flops.order)
    shapes = {row.name: row.shape for row in flops.tensors}
    alternatives, curve = _compared(backward_costs(flops), values, tuple(shapes[n] for n in flops.order), plan.budget.flops)
    value = math.fsum(v for name, v in zip(flops.order, values, strict=True) if name in set(plan.selection.names))
    total = math.fsum(values) or 1.0
    better, chosen = next_better(curve, plan.budget.flops), plan.selection
    rule, others = plan.importance.source, dict(alternatives)
    return SelectionSummary(rule, value / total, others, cliffs(curve), better, chosen.missed, chosen.raised)


@functools.lru_cache(maxsize=8)  # a report may be asked for in every step
def _compared(
    costs: BackwardCosts, values: tuple[float, ...], shapes: tuple[tuple[int, ...], ...], ratio: float
) -> tuple[tuple[tuple[str, float], ...], tuple[Worth, ...]]:
    by_name: Mapping[str, tuple[int, ...]] = dict(zip(costs.names, shapes, strict=True))
    total, limit = math.fsum(values) or 1.0, costs.affordable(ratio)
    found = []
    for name, rule in SIMPLE_RULES.items():
        found.append((name, math.fsum(values[k] for k in rule(costs, by_name, limit)) / total))
    return tuple(found), worth_of_flops(costs, values, (ratio,))


def selection_lines(summary: SelectionSummary) -> list[str]:
    """The summary for people."""
    others = ", ".join(f"{name} {in_percent(value)}" for name, value in summary.alternatives.items())
    lines = [
        f"selected by      {summary.rule}",
        f"  value          {in_percent(summary.value)} of everything's; {others}",
    ]
    if summary.cliffs:
        lines.append(f"  cliffs         a large part no longer fits below flops={', '.join(f'{c:.2f}' for c in summary.cliffs)}")
    if (better := summary.next_better) is not None:
        lines.append(f"  next better    flops={better.flops:.2f} would train {in_percent(better.value)}")
    if summary.missed is not None:
        name, flops = summary.missed
        lines.append(f"  out of reach   the loss is by far the steepest in {name}: try flops={flops:.2f} or more")
    if summary.raised is not None:
        name, flops = summary.raised
        why = f"does not reach {name}, in which the loss is by far the steepest" if name else "leaves little of the backward"
        lines.append(f"  raised         from flops={flops:.2f}: {why}")
    return lines

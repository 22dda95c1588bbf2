"""Why these tensors are trained: the rule, what simple rules would have been worth by it, and which budget would buy more."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from graphopt.analysis.flops import FlopProfile
from graphopt.graph import TrainingGraph
from graphopt.planner.costs import BackwardCosts
from graphopt.planner.flops_limit import FlopsLimit
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


_known: weakref.WeakKeyDictionary[fx.GraphModule, dict[tuple[str, ...], BackwardCosts]] = weakref.WeakKeyDictionary()


def selection_problem(plan: Plan, graph: TrainingGraph, captured: FlopProfile) -> BackwardCosts:
    """The problem that a plan's selection solves; kept, as a report may be asked for in every step."""
    found = _known.setdefault(graph.module, {})
    passes = tuple(p.name for p in plan.passes)
    if passes not in found:
        found[passes] = FlopsLimit(plan, graph, captured).costs
    return found[passes]


def summarise_selection(plan: Plan, graph: TrainingGraph, captured: FlopProfile) -> SelectionSummary | None:
    """What there is to say about a plan's selection; None where nothing was selected.

    Args:
        graph: that the plan was made on.
        captured: FLOPs of full training.
    """
    if plan.selection is None or plan.importance is None or plan.budget.flops is None:
        return None
    costs, trained = selection_problem(plan, graph, captured), frozenset(plan.selection.names)
    values = tuple(max(0.0, plan.importance.values.get(name, 0.0)) for name in costs.names)
    shapes = {row.name: row.shape for row in captured.tensors}
    chosen = [k for k, name in enumerate(costs.names) if name in trained]
    spare = max(0, costs.cost(chosen) - costs.affordable(plan.budget.flops))  # that passes after the selection save
    alternatives, curve = _compared(costs, values, tuple(shapes[n] for n in costs.names), plan.budget.flops, spare)
    value, total = math.fsum(values[k] for k in chosen), math.fsum(values) or 1.0
    better, selection = next_better(curve, plan.budget.flops), plan.selection
    rule, others = plan.importance.source, dict(alternatives)
    return SelectionSummary(rule, value / total, others, cliffs(curve), better, selection.missed, selection.raised)


@functools.lru_cache(maxsize=8)  # a report may be asked for in every step
def _compared(
    costs: BackwardCosts, values: tuple[float, ...], shapes: tuple[tuple[int, ...], ...], ratio: float, spare_flops: int
) -> tuple[tuple[tuple[str, float], ...], tuple[Worth, ...]]:
    by_name: Mapping[str, tuple[int, ...]] = dict(zip(costs.names, shapes, strict=True))
    total, limit = math.fsum(values) or 1.0, costs.affordable(ratio) + spare_flops
    found = []
    for name, rule in SIMPLE_RULES.items():
        found.append((name, math.fsum(values[k] for k in rule(costs, by_name, limit)) / total))
    return tuple(found), worth_of_flops(costs, values, (ratio,), spare_flops)


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

"""Why these tensors are trained: the rule, what simple rules would have been worth by it, and which budget would buy more."""

from __future__ import annotations

import math
from dataclasses import dataclass

from graphopt.analysis.flops import FlopProfile
from graphopt.analysis.kept import kept
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


def selection_problem(plan: Plan, graph: TrainingGraph, captured: FlopProfile) -> BackwardCosts:
    """The problem that a plan's selection solves; kept, as a report may be asked for in every step."""
    return kept(graph, "selection", tuple(p.name for p in plan.passes), lambda: FlopsLimit(plan, graph, captured).costs)


def summarise_selection(plan: Plan, graph: TrainingGraph, captured: FlopProfile) -> SelectionSummary | None:
    """What there is to say about a plan's selection; None where nothing was selected.

    Args:
        graph: that the plan was made on.
        captured: FLOPs of full training.
    """
    if plan.selection is None or plan.importance is None or plan.budget.flops is None:
        return None
    costs, trained = selection_problem(plan, graph, captured), frozenset(plan.selection.names)
    values, ratio = tuple(max(0.0, plan.importance.values.get(name, 0.0)) for name in costs.names), plan.budget.flops
    chosen, total = [k for k, name in enumerate(costs.names) if name in trained], math.fsum(values) or 1.0
    spare = max(0, costs.cost(chosen) - costs.affordable(ratio))  # that passes after the selection save

    def compared() -> tuple[dict[str, float], tuple[Worth, ...]]:
        shapes, limit = {row.name: row.shape for row in captured.tensors}, costs.affordable(ratio) + spare
        found = {name: math.fsum(values[k] for k in rule(costs, shapes, limit)) / total for name, rule in SIMPLE_RULES.items()}
        return found, worth_of_flops(costs, values, (ratio,), spare)

    alternatives, curve = kept(graph, "compared", (tuple(p.name for p in plan.passes), values, ratio, spare), compared)
    return SelectionSummary(
        plan.importance.source,
        math.fsum(values[k] for k in chosen) / total,
        dict(alternatives),
        cliffs(curve),
        next_better(curve, ratio),
        plan.selection.missed,
        plan.selection.raised,
    )


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

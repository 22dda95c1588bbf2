"""A row per tensor: what its gradient costs, what training it is worth, and why it is trained or not."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from graphopt.analysis.flops import FlopProfile
from graphopt.analysis.kept import kept
from graphopt.graph import TrainingGraph
from graphopt.planner.costs import BackwardCosts
from graphopt.planner.plan import Plan
from graphopt.report.selection import selection_problem
from graphopt.report.units import in_percent

Status = Literal["trained", "frozen", "unused", "not given", "worth nothing", "out of reach", "does not fit", "left out"]


@dataclass(frozen=True)
class TensorRow:
    """One parameter of the model.

    Attributes:
        name, shape: of the parameter.
        trained: whether its gradient is computed.
        weight_grad_flops: t_dw, FLOPs of its own gradient.
        input_grad_flops: t_dy, FLOPs of passing the gradient through its layer to those below.
        extra: the part of a full step's FLOPs that would be saved without it, if it is trained; that it would add, if it is not.
            What exact passes save before tensors are selected, as by dead rows, is allowed for.
        importance: by which tensors were selected, scaled to a maximum of 1; None where it was not rated.
        value: the same as a part of all tensors' together.
        status: why it is trained or not, in a word; `why` says it with figures.
    """

    name: str
    shape: tuple[int, ...]
    trained: bool
    weight_grad_flops: int
    input_grad_flops: int
    extra: float
    importance: float | None
    value: float | None
    status: Status
    why: str


def tensor_rows(plan: Plan, graph: TrainingGraph, captured: FlopProfile, flops: FlopProfile, ratio: float) -> list[TensorRow]:
    """Every parameter, in the order of the model.

    Args:
        graph: that the plan was made on.
        captured: FLOPs of full training, at the captured batch size.
        flops: the same at the batch size of the report.
        ratio: FLOPs of the step over full training's.
    """
    selecting = selection_problem(plan, graph, captured)
    alone = kept(graph, "alone", tuple(p.name for p in plan.passes), lambda: _sums(selecting.names, selecting.classes))
    trained = frozenset(selecting.names) if plan.train is None else plan.train & frozenset(selecting.names)
    extra = _sums(selecting.names, _needed_by_none_or_one(selecting, trained))
    values = {} if plan.importance is None else plan.importance.values
    total = math.fsum(max(0.0, value) for value in values.values()) or 1.0
    wanted = {p.name: p.trainable for p in graph.parameters}
    left = math.inf if plan.budget.flops is None else plan.budget.flops - ratio
    rows = []
    status: Status
    for row in flops.tensors:
        importance = values.get(row.name)
        value = None if importance is None else max(0.0, importance) / total
        adds = selecting.part(extra.get(row.name, 0))
        if row.name in trained:
            status, why = "trained", _why_trained(plan, adds, value)
        elif row.name in alone:
            by_itself = selecting.part(selecting.forward_flops + alone[row.name])
            status, why = _why_not(plan, adds, by_itself, importance, left)
        elif wanted.get(row.name, False):
            status, why = "unused", "no gradient of the loss reaches it"
        else:
            status, why = "frozen", "the model itself freezes it (requires_grad is False)"
        own, passed = row.weight_grad_flops, row.input_grad_flops
        rows.append(TensorRow(row.name, row.shape, row.name in trained, own, passed, adds, importance, value, status, why))
    return rows


def _sums(names: Sequence[str], classes: Collection[tuple[int, int]]) -> dict[str, int]:
    """By name, the FLOPs of the classes that have its bit."""
    return {name: sum(flops for mask, flops in classes if mask >> k & 1) for k, name in enumerate(names)}


def _needed_by_none_or_one(costs: BackwardCosts, trained: frozenset[str]) -> list[tuple[int, int]]:
    """Classes that nothing needs that is trained, with all that would; and those that one tensor needs, with that one."""
    inside = sum(1 << k for k, name in enumerate(costs.names) if name in trained)
    return [(mask & inside or mask, flops) for mask, flops in costs.classes if (mask & inside).bit_count() <= 1]


def _why_trained(plan: Plan, extra: float, value: float | None) -> str:
    if plan.train is None:
        return "everything is trained"
    if plan.selection is None and value is None:
        return "given to be trained"
    worth = "" if value is None else f"{in_percent(value)} of the value "
    return f"chosen: {worth}for {in_percent(extra)} of the FLOPs"


def _why_not(plan: Plan, extra: float, alone: float, importance: float | None, left: float) -> tuple[Status, str]:
    """Why a tensor with a gradient is not trained.

    Args:
        extra, alone: FLOPs that it would add, and those of a step that trains nothing else, as parts of a full step's.
        left: of the budget, as such a part.
    """
    if plan.selection is None and plan.importance is None:
        return "not given", "not among the tensors given to be trained"
    if importance is not None and importance < 0:
        return "worth nothing", "its next step would raise the loss on the example batch"
    if importance == 0:
        return "worth nothing", "its gradient is zero, or comes from few of the rows, or the optimizer does not hold it"
    if plan.budget.flops is not None and alone > plan.budget.flops and extra > left:
        return "out of reach", f"training it alone would take {in_percent(alone)} of a full step's FLOPs"
    if extra > left:
        return "does not fit", f"it would add {in_percent(extra)} of a full step's FLOPs; {in_percent(max(0.0, left))} is left"
    limits = " and ".join(sorted(plan.budget.stated())) or "budget"
    return "left out", f"what is trained is worth more within the {limits}"


def counted(rows: list[TensorRow]) -> Mapping[str, int]:
    """How many tensors have each status, in the order of `Status`."""
    found = dict.fromkeys(Status.__args__, 0)  # type: ignore[attr-defined]
    for row in rows:
        found[row.status] += 1
    return {status: count for status, count in found.items() if count}

"""One case of `graphopt bench breadth`: the same model trained three times on the same batch, and what differs."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from graphopt.bench.cases import Row, attempt, begin

STEPS = 2
"""Of each run; the second shows what has to be compiled again."""

BUDGET = 0.7
"""FLOPs of a step, as a fraction of full training's."""

TOLERANCE = 1e-3
"""Relative difference of losses and gradients that counts as none."""

FLOOR = 1e-4
"""Gradients smaller than this part of the model's largest one are compared with that part: they are rounding errors."""

COUNTING = 0.03
"""By how much torch's own counter of FLOPs, which knows of products and convolutions alone, may exceed the budget."""

CANNOT_COUNT = ("Expected gradient function to be set", "'NotImplementedType' object is not subscriptable")
"""How the counter fails in modules that run backwards inside forward (reformer), and in graphs with ordered effects (boft)."""

VERDICTS = ("ok", "ok, partly planned", "ok, over budget", "refused", "wrong", "uncompiled", "torch.compile fails", "case fails")

Made = tuple[nn.Module, dict[str, Any]]


@dataclass
class Case:
    """A model and a batch that it returns a loss for.

    Attributes:
        make: builds both, the same ones for the same seed.
        effects: what forward leaves behind outside of parameters, from the model, as tensors or plain values; of a list what
            the steps append counts.
        group: a heading of the table.
        budget: of `optimize`.
        vary: arguments that are others in each step, from its number.
    """

    make: Callable[[], Made]
    group: str
    effects: Callable[[Any], Any] | None = None
    budget: float = BUDGET
    vary: Callable[[int], Mapping[str, Any]] | None = None


@dataclass
class Trained:
    """What steps of one run gave.

    Attributes:
        losses: per step.
        gradients: per step; None where there is none.
        hidden: gradients of tensors that are no registered parameters; see `hidden_parameters`.
        effects: of the steps together.
        left: effects before the first step.
    """

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)
    hidden: list[list[Tensor | None]] = field(default_factory=list)
    effects: Any = None
    left: Any = None


def seed_everything(seed: int) -> None:
    """Of torch, numpy and Python."""
    import numpy

    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def made(case: Case) -> Made:
    """Equal models and batches, however often this is called; in training mode, without dropout."""
    seed_everything(0)
    model, batch = case.make()
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    return model.train(), batch


def loss_of(output: Any) -> Tensor:
    """The loss in a model's output: the output itself, its `loss`, or its first element."""
    if isinstance(output, Tensor):
        return output
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return output[0] if loss is None else loss


def hidden_parameters(model: nn.Module) -> list[Tensor]:
    """Tensors that a case's model trains without having registered them; it lists them in `hidden_parameters`."""
    return list(getattr(model, "hidden_parameters", list)())


def train(case: Case, model: nn.Module, call: Callable[..., Any], batch: Mapping[str, Any]) -> Trained:
    """Some training steps through `call`, each from the same weights."""
    found = Trained(left=case.effects(model) if case.effects else None)
    for number in range(STEPS):
        for parameter in (*model.parameters(), *hidden_parameters(model)):
            parameter.grad = None
        seed_everything(1)
        loss = loss_of(call(**batch, **(case.vary(number) if case.vary else {})))
        loss.backward()
        found.losses.append(float(loss.detach()))
        found.gradients.append({name: _kept(parameter.grad) for name, parameter in model.named_parameters()})
        found.hidden.append([_kept(parameter.grad) for parameter in hidden_parameters(model)])
    found.effects = case.effects(model) if case.effects else None
    return found


def _kept(gradient: Tensor | None) -> Tensor | None:
    """A copy that can be compared, whatever its layout is."""
    return None if gradient is None else gradient.detach().to_dense().clone()


def matrix_flops(case: Case, model: nn.Module, call: Callable[..., Any], batch: Mapping[str, Any]) -> int | None:
    """FLOPs of the products and convolutions of one more step, as torch's own counter sees them; None where it `CANNOT_COUNT`."""
    from torch.utils.flop_counter import FlopCounterMode

    from graphopt.bench.cpu_formulas import cpu_formulas

    try:
        with FlopCounterMode(display=False, custom_mapping=cpu_formulas()) as counter:
            seed_everything(1)
            loss_of(call(**batch, **(case.vary(STEPS - 1) if case.vary else {}))).backward()
        return counter.get_total_flops()
    except (AssertionError, TypeError) as error:
        if not any(text in str(error) for text in CANNOT_COUNT):
            raise
        return None


def difference(found: Tensor | None, wanted: Tensor | None, floor: float) -> float:
    """The largest difference of two gradients, over the largest wanted value; a missing one is zero."""
    if found is None and wanted is None:
        return 0.0
    like = wanted if wanted is not None else found
    assert like is not None
    first, second = (torch.zeros_like(like) if t is None else t for t in (found, wanted))
    if first.numel() == 0:
        return 0.0
    distance = (first.double() - second.double()).abs().max().item()
    if distance != distance:  # a NaN: the same where both have it
        same = torch.equal(first.isnan(), second.isnan())
        return 0.0 if same and torch.equal(first.nan_to_num(), second.nan_to_num()) else float("inf")
    return distance / max(second.abs().max().item(), floor, 1e-30) if distance else 0.0


def compare(found: Trained, wanted: Trained, names: frozenset[str] | None = None) -> dict[str, Any]:
    """How two runs differ.

    Args:
        names: the gradients that count; None: all.
    """
    loss = max(
        0.0 if a == b or (a != a and b != b) else abs(a - b) / max(abs(b), 1e-12)
        for a, b in zip(found.losses, wanted.losses, strict=True)
    )
    worst, where = 0.0, ""
    for ours, theirs in zip(found.gradients, wanted.gradients, strict=True):
        sizes = [g.abs().max().item() for g in theirs.values() if g is not None and g.numel()]
        floor = FLOOR * max((s for s in sizes if s == s), default=0.0)
        for name, gradient in theirs.items():
            if names is not None and name not in names:
                continue
            distance = difference(ours.get(name), gradient, floor)
            if distance > worst:
                worst, where = distance, name
    for hidden, others in zip(found.hidden, wanted.hidden, strict=True):
        for number, (gradient, other) in enumerate(zip(hidden, others, strict=True)):
            distance = difference(gradient, other, 0.0)
            if distance > worst:
                worst, where = distance, f"hidden parameter {number}"
    return {"loss": loss, "gradient": worst, "where": where, "effects": describe_effects(found, wanted)}


def describe_effects(found: Trained, wanted: Trained) -> str:
    """How what two runs leave behind differs; "" if it does not."""
    ours, theirs = added(found), added(wanted)
    return "" if _close(ours, theirs) else f"{ours} instead of {theirs}"


def added(run: Trained) -> Any:
    """Effects of the steps; of a list what they appended."""
    after, before = plain(run.effects), plain(run.left)
    return after[len(before) :] if isinstance(after, list) and isinstance(before, list) else after


def plain(value: Any) -> Any:
    """Tensors as numbers, for JSON."""
    if isinstance(value, Tensor):
        return float(value.detach().double().sum())
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return value if value is None or isinstance(value, (int, float, str)) else repr(type(value))


def _close(a: Any, b: Any) -> bool:
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(_close(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float) or isinstance(b, float):
        return isinstance(a, (int, float)) and isinstance(b, (int, float)) and abs(a - b) <= 1e-4 * max(abs(a), abs(b), 1e-3)
    return bool(a == b)


def measure(case: Case, optimize: Callable[..., Any] | None = None) -> dict[str, Any]:
    """Train a case in eager mode, by torch.compile and by graphopt, and give a verdict.

    Args:
        optimize: in place of `graphopt.optimize`.
    """
    import graphopt

    optimize = optimize or graphopt.optimize
    row: dict[str, Any] = {"group": case.group, "budget": case.budget}

    def eagerly() -> Row:
        eager = reference(partial(made, case), partial(train, case), TOLERANCE)
        check_case(eager)
        model, batch = made(case)
        return {"run": eager, "matrix_flops": matrix_flops(case, model, model, batch)}

    def compiled() -> Row:
        model, batch = made(case)
        return compare(train(case, model, torch.compile(model, backend="aot_eager"), batch), eager)

    def ours() -> Row:
        model, batch = made(case)
        row["phase"] = "optimize"
        example = {**batch, **(case.vary(0) if case.vary else {})}
        opt = optimize(model, example, budget=case.budget, backend="aot_eager")
        row["phase"] = "step"
        trained = train(case, model, opt, batch)
        counted = matrix_flops(case, model, opt, batch)
        return {**judged(opt, trained, eager), "counted_ratio": counted / wanted if counted and wanted else None}

    begin({**row, "verdict": "case fails"})
    first = attempt(eagerly)
    if "error" in first:
        return {**row, "verdict": "case fails", "error": first["error"]}
    eager, wanted = first["run"], first["matrix_flops"]
    begin({**row, "verdict": "torch.compile fails"})
    plain = attempt(compiled)
    plain["ok"] = "error" not in plain and not (max(plain["loss"], plain["gradient"]) > TOLERANCE)
    row["torch_compile"] = plain
    begin({**row, "verdict": "refused"})
    row["graphopt"] = attempt(ours)
    row["verdict"] = verdict(plain, row["graphopt"], case.budget)
    return row


def reference(make: Callable[[], Made], trained: Callable[..., Trained], tolerance: float) -> Trained:
    """A run in eager mode; raises `ValueError` if another one differs."""
    first, second = (trained(model, model, batch) for model, batch in (make(), make()))
    repeated = compare(second, first)
    if not max(repeated["loss"], repeated["gradient"]) <= tolerance:
        raise ValueError(f"the case does not repeat itself: {repeated}")
    return first


def check_case(eager: Trained) -> None:
    """Raise `ValueError` if a case trains nothing that could be compared."""
    if not all(map(math.isfinite, eager.losses)):
        raise ValueError(f"the losses in eager mode are {eager.losses}")
    if not any(g is not None and g.abs().max() > 0 for g in eager.gradients[0].values() if g is None or g.numel()):
        raise ValueError("no parameter has a gradient in eager mode")


def judged(opt: Any, trained: Trained, eager: Trained) -> dict[str, Any]:
    """What is recorded of an optimised model that was trained."""
    from graphopt.runtime.disabled import DisabledModule

    selected = frozenset(opt.selected)
    disabled = isinstance(opt, DisabledModule)  # nothing could be planned
    known = selected if disabled else {p.name for p in opt.graph.parameters}
    extra = sorted({n for step in trained.gradients for n, g in step.items() if g is not None and n not in selected})
    report = opt.report
    regions = getattr(opt.last_step, "regions", None)
    return {
        **compare(trained, eager, selected),
        "selected": len(selected),
        "trainable": len(eager.gradients[0]),
        "unselected_gradients": [n for n in extra if n in known],
        "unknown_gradients": [n for n in extra if n not in known],
        "flops_ratio": report.flops_ratio,
        "regions": None if regions is None else len(regions),
        "steps_compiled": opt._running is not None if disabled else opt.last_step is not None,
        "model_runs": opt.model_runs,
        "notes": list(report.notes),
    }


def verdict(compiled: Mapping[str, Any], ours: Mapping[str, Any], budget: float = BUDGET) -> str:
    """One of `VERDICTS`."""
    if not compiled["ok"]:
        return "torch.compile fails"
    if "error" in ours:
        return "refused"
    tolerance = max(TOLERANCE, 10 * compiled["gradient"])
    if not (ours["loss"] <= tolerance and ours["gradient"] <= tolerance) or ours["unselected_gradients"]:
        return "wrong"
    if ours["effects"] and not compiled["effects"]:
        return "wrong"
    if ours["model_runs"] or not ours["steps_compiled"]:
        return "uncompiled"
    within = ours["flops_ratio"] <= budget + 1e-6 and (ours["counted_ratio"] or 0.0) <= budget + COUNTING
    if not within:
        return "ok, over budget"
    return "ok, partly planned" if ours["unknown_gradients"] else "ok"

"""`graphopt bench breadth`: many tiny models, and whether graphopt trains what plain torch.compile trains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from graphopt.bench import breadth_habits as habits
from graphopt.bench.breadth_adapters import ADAPTERS
from graphopt.bench.breadth_others import OTHERS
from graphopt.bench.breadth_run import VERDICTS, Case, Made, measure
from graphopt.bench.breadth_transformers import TRANSFORMERS
from graphopt.bench.cases import Benchmark, Row, chosen, print_faults
from graphopt.report.tables import table


def _habit(make: Callable[[], nn.Module]) -> Callable[[], Made]:
    return lambda: (make(), {"x": torch.randn(16, habits.WIDTH), "labels": torch.randint(0, 5, (16,))})


def _filling() -> Made:
    habits.OUTSIDE.clear()
    return _habit(lambda: habits.Habit(habits.filling))()


def _packed() -> Made:
    batch = {"tokens": torch.randint(0, 50, (4, 9)), "lengths": torch.tensor([5, 9, 3, 7]), "labels": torch.randint(0, 5, (4,))}
    return habits.Packed(), batch


def _case(make: Callable[[], nn.Module], effects: Callable[[Any], Any] | None = None) -> Case:
    return Case(_habit(make), "ordinary Python in forward", effects)


def _between(function: Callable[[Tensor], Tensor]) -> Case:
    return _case(lambda: habits.Habit(function))


HABITS: dict[str, Case] = {
    "plain": _case(habits.Habit),
    "print": _between(habits.printing),
    "logging": _between(habits.logging_values),
    "time": _case(habits.Timing),
    "random": _between(habits.random_noise),
    "item-check": _between(habits.checking),
    "check-in-layers": _case(habits.Looping),
    "print-in-loop": _case(habits.Breaking),
    "nan-check": _between(habits.nan_checking),
    "mask-index": _between(habits.masking),
    "nonzero": _between(habits.nonzero),
    "unique": _between(habits.unique),
    "float-argument": Case(
        _habit(habits.Warming), "ordinary Python in forward", vary=lambda step: {"temperature": 1.0 + 0.5 * step}
    ),
    "counter": _case(habits.Counting, lambda model: model.calls),
    "stored-tensor": _case(habits.Storing, lambda model: model.activation),
    "stored-penalty": _case(habits.Penalising, lambda model: model.penalty),
    "outside-list": Case(_filling, "ordinary Python in forward", lambda model: list(habits.OUTSIDE)),
    "hook": _case(habits.Hooked, lambda model: list(model.collected)),
    "global": _between(habits.reading),
    "try-except": _case(habits.Trying),
    "try-except-shape": _between(habits.trying_shapes),
    "hidden-module": _case(habits.Hiding),
    "numpy-attribute": _case(habits.Numpy),
    "packed-lstm": Case(_packed, "ordinary Python in forward"),
}

SPEECH = (
    "wav2vec2-ctc", "wav2vec2-ctc-padded", "wav2vec2-classify", "hubert-ctc", "hubert-classify", "wavlm-classify",
    "unispeech-ctc", "sew-ctc",
)  # fmt: skip
"""Their forward asks for the gradient of what it makes of the sound, so that the gradient passes through all of the model."""

LARGER = {
    **dict.fromkeys(SPEECH, 0.8),
    **dict.fromkeys(("switch-transformers", "lora-gpt2", "adaption-prompt"), 0.75),
    "reformer": 0.85,
    **dict.fromkeys(("vb-lora", "shira", "wave-ft"), 1.0),  # their gradients cost no product
}
"""Budgets of cases for which `BUDGET` is infeasible, as the error says that they otherwise end with."""

_EVERY = {**HABITS, **TRANSFORMERS, **ADAPTERS, **OTHERS}
CASES: dict[str, Case] = {name: replace(case, budget=LARGER.get(name, case.budget)) for name, case in _EVERY.items()}

BENCHMARK = Benchmark("breadth", lambda name: measure(CASES[name]), VERDICTS)


def run(cases: Sequence[str] | None, folder: Path, jobs: int, console: Console, timeout: float) -> dict[str, Any]:
    """Run the cases that are not yet finished; see `Benchmark.run`.

    Args:
        cases: their names or patterns; None: all.
    """
    return BENCHMARK.run(chosen("case", cases, CASES), folder, jobs, console, timeout)


def show(results: dict[str, Any], console: Console) -> None:
    """Print a table per group, what is not as it should be, and how often there was each verdict."""
    columns = ("case", "verdict", "FLOPs", "tensors", "graphs", "gradients differ", "s")
    groups: dict[str, list[Row]] = {}
    for row in results["rows"]:
        groups.setdefault(CASES[row["case"]].group, []).append(row)
    for group, rows in groups.items():
        console.print(table(columns, map(_cells, rows), words=2, title=group))
    print_faults(results, why, console)


def _cells(row: Row) -> tuple[object, ...]:
    ours = row.get("graphopt", {})
    if "gradient" not in ours:
        return row["case"], row["verdict"], None, None, None, None, f"{row['seconds']:.0f}"
    return (
        row["case"], row["verdict"], f"{ours['flops_ratio']:.0%}", f"{ours['selected']}/{ours['trainable']}", ours["regions"],
        f"{ours['gradient']:.0e}", f"{row['seconds']:.0f}",
    )  # fmt: skip


def why(row: Row) -> str:
    """What led to a verdict, in one line."""
    ours, compiled = row.get("graphopt", {}), row.get("torch_compile", {})
    if row["verdict"] == "torch.compile fails":
        said = compiled.get("error") or (f"gradients differ by {compiled['gradient']:.1g}" if compiled else row.get("error", ""))
        also = ours.get("error") or (f"differs by {ours['gradient']:.1g}" if "gradient" in ours else "")
        return f"{said}; graphopt: {also}" if also else said
    if row["verdict"] == "wrong":
        parts = [
            f"loss differs by {ours['loss']:.1g}" if ours["loss"] else "",
            f"{ours['where']} by {ours['gradient']:.1g}" if ours["gradient"] else "",
            f"gradients though not selected: {', '.join(ours['unselected_gradients'][:5])}"
            if ours["unselected_gradients"]
            else "",
            f"left behind: {ours['effects']}" if ours["effects"] else "",
        ]
        return "; ".join([*filter(None, parts), *ours["notes"]])
    if row["verdict"] in ("ok, partly planned", "ok, over budget"):
        counted = f", {ours['counted_ratio']:.1%} as counted" if ours["counted_ratio"] else ""
        unknown = f"trained though in no plan: {', '.join(ours['unknown_gradients'][:5])}" if ours["unknown_gradients"] else ""
        parts = [f"{ours['flops_ratio']:.1%} as planned{counted}, of {row['budget']:.0%}", unknown]
        return "; ".join([*filter(None, parts), *ours["notes"]])
    return str(row.get("error") or ours.get("error") or "; ".join(ours.get("notes", ())))

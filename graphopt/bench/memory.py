"""`graphopt bench memory`: the predicted peak of a training step against the measured one, and that against torch.compile's.

On the CPU the measured peak is the largest running sum of the allocator's own events (torch.profiler's memory events) during
one step; on CUDA it is what `torch.cuda.max_memory_allocated` grows by. What exists for the whole step (parameters, states, the
batch) is part of both: it is counted from the tensors themselves. cuBLAS's workspaces stay from the first step on; they are not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from rich.console import Console
from rich.progress import Progress

import graphopt
from graphopt.analysis.optimizers import named_optimizer
from graphopt.analysis.step_memory import step_memory
from graphopt.bench import steps
from graphopt.bench.cases import chosen
from graphopt.bench.memory_models import MODELS
from graphopt.bench.peak import held_bytes
from graphopt.bench.step_models import Made
from graphopt.bench.steps import Call, Ready, Variant, eager, optimized, prepare
from graphopt.integrations.models import quiet_transformers
from graphopt.report.tables import table


@dataclass(frozen=True)
class Case:
    """One row: a model with a batch size, how it is run, and its optimizer."""

    model: str
    backend: Literal["eager", "inductor"]
    optimizer: str
    batch: int
    checkpointing: bool = False


CASES = (
    Case("mlp", "eager", "sgd", 64),
    Case("mlp", "inductor", "adamw", 64),
    Case("cnn", "eager", "momentum", 16),
    Case("cnn", "inductor", "adamw", 16),
    Case("bert", "eager", "adamw", 8),
    Case("bert", "inductor", "adamw-foreach", 8),
    Case("gpt2", "eager", "adamw-fused", 8),
    Case("gpt2", "inductor", "sgd", 4),
    Case("opt", "eager", "adamw-foreach", 8),
    Case("opt", "inductor", "adamw", 8),
    Case("llama", "eager", "adamw", 8),
    Case("llama", "eager", "adamw", 8, checkpointing=True),
    Case("llama", "inductor", "adamw", 8),
    Case("llama", "inductor", "adamw", 8, checkpointing=True),
    Case("t5", "eager", "adam", 8),
    Case("t5", "inductor", "momentum", 8),
    Case("vit", "eager", "adamw", 16),
    Case("vit", "inductor", "adamw", 16),
)


def run(models: list[str] | None, console: Console) -> dict[str, Any]:
    """Measure every case, or those of some models.

    Raises:
        InputError: an unknown model.
    """
    quiet_transformers()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    named = chosen("model", models, MODELS)
    cases = [case for case in CASES if case.model in named]
    rows = []
    with Progress(console=console) as bar:
        task = bar.add_task("measuring", total=len(cases))
        for case in cases:
            bar.update(task, description=f"{case.model}, {case.backend}")
            rows.append(measure(case, device))
            bar.advance(task)
    errors = [abs(row["error"]) for row in rows]
    beside = [row["beside_torch_compile"] for row in rows if row["beside_torch_compile"] is not None]
    return {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "rows": rows,
        "largest_error": max(errors),
        "mean_error": sum(errors) / len(errors),
        "most_beside_torch_compile": max(beside, default=None),
    }


def measure(case: Case, device: str = "cpu") -> dict[str, Any]:
    """Predicted and measured peak of one case, and torch.compile's, in bytes."""
    theirs: int | None = None
    if case.backend == "eager":
        ready, held = _ready(case, eager, device)
        predicted = graphopt.analyze(ready.model, ready.inputs, backend="eager", optimizer=case.optimizer).memory
    else:  # with what is rewritten by default
        ready, held = _ready(case, optimized(backend=case.backend), device)
        assert ready.opt is not None
        predicted = step_memory(ready.opt.plan.rewrite(ready.opt.graph)[0], case.backend, case.optimizer)
        compiled, held_by_theirs = _ready(case, lambda model, *_: torch.compile(model, backend=case.backend), device)
        theirs = held_by_theirs + compiled.peak
    measured = held + ready.peak
    return {
        "model": case.model,
        "backend": case.backend,
        "checkpointing": case.checkpointing,
        "optimizer": case.optimizer,
        "batch": case.batch,
        "predicted": predicted.peak_bytes,
        "measured": measured,
        "torch_compile": theirs,
        "beside_torch_compile": None if theirs is None else measured / theirs - 1,
        "error": predicted.peak_bytes / measured - 1,
        "error_without_static": (predicted.peak_bytes - predicted.static_bytes) / ready.peak - 1,
        "phase": predicted.peak_phase,
    }


def _ready(case: Case, call: Call, device: str) -> tuple[Ready, int]:
    """A way to train, and bytes that exist for the whole step."""

    def make() -> Made:
        model, inputs = MODELS[case.model](case.batch)
        if case.checkpointing:
            model.gradient_checkpointing_enable()  # type: ignore[operator]
        return model.train(), inputs

    torch.compiler.reset()
    ready = prepare(steps.Case(make, cold=False), Variant(call, named_optimizer(case.optimizer, torch.device(device))), device)
    return ready, held_bytes(ready.model, ready.inputs, ready.optimizer)


def show(results: dict[str, Any], console: Console) -> None:
    """Print the table."""
    title = f"peak memory of one training step, torch {results['torch']}, {results['device']}"
    columns = (
        "model", "run by", "optimizer", "peak in", "batch", "predicted MB", "measured MB", "error", "without static",
        "torch.compile",
    )  # fmt: skip
    console.print(table(columns, map(_cells, results["rows"]), words=4, title=title))
    count = len(results["rows"])
    console.print(f"largest error {results['largest_error']:.2%}, mean {results['mean_error']:.2%}, over {count} cases")
    if results["most_beside_torch_compile"] is not None:
        console.print(f"measured, at most {results['most_beside_torch_compile']:+.2%} of torch.compile's")


def _cells(row: dict[str, Any]) -> tuple[object, ...]:
    beside = row["beside_torch_compile"]
    return (
        row["model"], row["backend"] + (", checkpointing" if row["checkpointing"] else ""), row["optimizer"], row["phase"],
        row["batch"], f"{row['predicted'] / 1e6:.3f}", f"{row['measured'] / 1e6:.3f}", f"{row['error']:+.2%}",
        f"{row['error_without_static']:+.2%}", None if beside is None else f"{beside:+.2%}",
    )  # fmt: skip

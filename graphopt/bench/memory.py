"""`graphopt bench memory`: the predicted peak of a training step against the measured one, and that against torch.compile's.

On the CPU the measured peak is the largest running sum of the allocator's own events (torch.profiler's memory events) during
one step; on CUDA it is what `torch.cuda.max_memory_allocated` grows by. What exists for the whole step (parameters, states, the
batch) is part of both: it is counted from the tensors themselves. cuBLAS's workspaces stay from the first step on; they are not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from rich.console import Console
from rich.progress import Progress

import graphopt
from graphopt.analysis.optimizers import named_optimizer
from graphopt.analysis.step_memory import step_memory
from graphopt.bench.cases import chosen
from graphopt.bench.memory_models import MODELS
from graphopt.bench.peak import peak_of
from graphopt.bench.tables import table
from graphopt.integrations.models import quiet_transformers

WARMUP = 2


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
    model, inputs = _made(case, device)
    step: Callable[..., Any] = model
    theirs: int | None = None
    if case.backend == "eager":
        predicted = graphopt.analyze(model, inputs, backend="eager", optimizer=case.optimizer).memory
    else:  # with what is rewritten by default
        step = opt = graphopt.optimize(model, inputs, backend=case.backend)
        predicted = step_memory(opt.plan.rewrite(opt.graph)[0], case.backend, case.optimizer)
    held, measured = _peak(case, model, inputs, step, device)
    if case.backend != "eager":
        model, inputs = _made(case, device)
        theirs = _peak(case, model, inputs, torch.compile(model, backend=case.backend), device)[1]
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
        "error_without_static": (predicted.peak_bytes - predicted.static_bytes) / (measured - held) - 1,
        "phase": predicted.peak_phase,
    }


def _made(case: Case, device: str) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    torch.compiler.reset()
    model, inputs = MODELS[case.model](case.batch)
    model = model.to(torch.device(device)).train()
    if case.checkpointing:
        model.gradient_checkpointing_enable()  # type: ignore[operator]
    return model, {k: v.to(device) for k, v in inputs.items()}


def _peak(
    case: Case, model: torch.nn.Module, inputs: dict[str, torch.Tensor], step: Callable[..., Any], device: str
) -> tuple[int, int]:
    """Bytes that exist for the whole step, and the most that exist at once."""
    optimizer = named_optimizer(case.optimizer, torch.device(device))([p for p in model.parameters() if p.requires_grad])

    def train() -> None:
        step(**inputs).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(WARMUP):
        train()
    states = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    held = held_bytes([*model.parameters(), *model.buffers(), *inputs.values(), *states])
    return held, peak_of(train, device, held)


def held_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of tensors that exist before and after a step, each storage once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


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

"""`graphopt bench loops`: ordinary training loops of other libraries, and whether graphopt trains in them as it should."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn
from torch.utils.data import DataLoader

from graphopt.bench import loops_trl
from graphopt.bench.cases import Benchmark, Row, chosen, print_faults
from graphopt.bench.loops_models import ADAM, Mlp, bert, points, rows
from graphopt.bench.loops_run import OVER, VERDICTS, Case, Loop, cases_of, measure
from graphopt.bench.loops_trainers import accelerated, lightning, trainer
from graphopt.report.tables import table


def accumulating(loop: Loop) -> None:
    """Gradients of two batches, clipping, a schedule, an evaluation in between, and weights that are saved and loaded."""
    model = Mlp()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    batches = list(DataLoader(points(), 4))
    step = loop.optimized(model, batches[0], optimizer)
    for number, batch in enumerate(batches):
        loss = step(**batch)
        (loss / 2).backward()
        loop.losses.append(float(loss.detach()))
        if number % 2 == 1:
            torch.nn.utils.clip_grad_norm_(step.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if number == 3:
            step.eval()
            with torch.no_grad():
                loop.losses.append(float(step(**batches[0])))
            step.train()
            saved = loop.folder / "weights.pt"
            torch.save(step.state_dict(), saved)
            step.load_state_dict(torch.load(saved, weights_only=True))


def mixed_precision(loop: Loop) -> None:
    """Autocast with a scaler of gradients."""
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    step: Any = None
    for batch in DataLoader(points(), 4):
        with torch.autocast("cpu", torch.bfloat16):
            step = loop.optimized(model, batch, optimizer) if step is None else step
            loss = step(**batch)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        loop.losses.append(float(loss.detach()))


def hooked(loop: Loop, register: int, remove: int = 100) -> None:
    """Hooks that collect what layers give.

    Args:
        register, remove: before which steps; the model is optimised before step 1.
    """
    model = bert()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    batches = list(DataLoader(rows(20), 4))
    handles: list[Any] = []

    def collect(_: nn.Module, inputs: Any, output: Any) -> None:
        loop.effects.append(output.detach().clone())

    step: Any = None
    for number, batch in enumerate(batches):
        if number == register:
            layers = model.bert.encoder.layer
            handles = [layer.output.dense.register_forward_hook(collect) for layer in layers]
        if number == remove:
            for handle in handles:
                handle.remove()
        if step is None:
            step = loop.optimized(model, batch, optimizer)
            loop.effects.clear()  # what was made to plan
        loss = step(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loop.losses.append(float(loss.detach()))


CASES: dict[str, Case] = {
    **cases_of("PyTorch", plain_accumulation=accumulating, plain_mixed_precision=mixed_precision),
    **cases_of(
        "PyTorch",
        "transformers",
        hooks=partial(hooked, register=0),
        hooks_removed=partial(hooked, register=0, remove=2),
    ),
    **cases_of("PyTorch", told=(OVER,), hooks_added=partial(hooked, register=2)),  # what they collect, no plan knew of
    **cases_of(
        "transformers",
        *("transformers", "accelerate"),
        trainer_callback=trainer,
        trainer_causal=partial(trainer, causal=True, gradient_accumulation_steps=2),
        trainer_bf16=partial(trainer, bf16=True, activation_checkpointing=True),
        trainer_own_loss=partial(trainer, own_loss=True),
        trainer_own_loss_bf16=partial(trainer, own_loss=True, bf16=True),
        trainer_model=partial(trainer, optimised=True),
        trainer_model_causal=partial(trainer, optimised=True, causal=True, gradient_accumulation_steps=2),
    ),
    **cases_of(
        "accelerate",
        *("transformers", "accelerate"),
        accelerate=accelerated,
        accelerate_bf16=partial(accelerated, precision="bf16"),
    ),
    **cases_of(
        "Lightning",
        *("pytorch_lightning", "transformers"),
        lightning=lightning,
        lightning_accumulation=partial(lightning, accumulate_grad_batches=2),
        lightning_bf16=partial(lightning, precision="bf16-mixed"),
    ),
    **loops_trl.CASES,
}
"""By name."""

BENCHMARK = Benchmark("loops", lambda name: measure(CASES[name]), VERDICTS)


def run(cases: Sequence[str] | None, folder: Path, jobs: int, console: Console, timeout: float) -> dict[str, Any]:
    """Run the cases that are not yet finished; see `Benchmark.run`.

    Args:
        cases: their names or patterns; None: all.
    """
    return BENCHMARK.run(chosen("case", cases, CASES), folder, jobs, console, timeout)


def show(results: dict[str, Any], console: Console) -> None:
    """Print a table, what is not as it should be, and how often there was each verdict."""
    columns = ("library", "case", "verdict", "FLOPs", "tensors", "graphs", "s")
    console.print(table(columns, map(_cells, results["rows"]), words=3))
    print_faults(results, why, console)


def _cells(row: Row) -> tuple[object, ...]:
    figures: tuple[object, ...] = (None, None, None)
    if "flops_ratio" in row:
        figures = f"{row['flops_ratio']:.0%}", f"{row['selected']}/{row['trainable']}", row["compilations"]
    return CASES[row["case"]].group, row["case"], row["verdict"], *figures, f"{row['seconds']:.0f}"


def why(row: Row) -> str:
    """What led to a verdict, in one line."""
    return ": ".join(filter(None, (row.get("run"), row["error"])))

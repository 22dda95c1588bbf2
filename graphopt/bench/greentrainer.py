"""`graphopt bench greentrainer`: what the dy-only cut saves, against eager and `torch.compile`, in one run.

A step is forward, backward and AdamW. All variants of a model are compiled first and then timed in turn; medians are reported.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from torch import nn

import graphopt
from graphopt.bench.cases import chosen
from graphopt.bench.glosses import pretrained_minilm
from graphopt.bench.tables import table
from graphopt.bench.timing import WARMUP, in_turn, now, this_device
from graphopt.compat.inductor import fresh_compiler_cache
from graphopt.planner.costs import BackwardCosts
from graphopt.planner.selection import RESOLUTION, select

BUDGETS = (0.7, 0.5, 0.4)


@dataclass
class Variant:
    """One way to train a model: its step, optimizer and figures."""

    name: str
    step: Callable[..., Any]
    optimizer: torch.optim.Optimizer
    flops: int
    compile_seconds: float
    passes_seconds: float
    phases: list[tuple[float, float, float]]

    @property
    def seconds(self) -> float:
        """Median of a whole step."""
        return statistics.median(sum(step) for step in self.phases)


def run(models: list[str] | None, repeats: int, console: Console) -> dict[str, Any]:
    """Measure every variant of every model.

    Args:
        models: of "minilm" (pre-trained weights, batch 32 x 32) and "gpt2" (12 layers, random weights); all by default.
        repeats: timed rounds.
    Raises:
        InputError: an unknown model.
    """
    device, name = this_device()
    results: dict[str, Any] = {
        "torch": torch.__version__,
        "device": name,
        "repeats": repeats,
        "models": [],
        "selection": time_selection(),
    }
    with Progress(console=console) as bar:
        for model in chosen("model", models, MODELS):
            results["models"].append({"model": model, "rows": measure(model, repeats, device, bar)})
    return results


def measure(model_name: str, repeats: int, device: str, bar: Progress) -> list[dict[str, Any]]:
    """The table of one model: a dict per variant."""
    task = bar.add_task(f"{model_name}: compiling", total=2 + len(BUDGETS) + WARMUP + repeats)
    variants = []
    inputs: dict[str, torch.Tensor] = {}
    for kind in ("eager", "torch.compile", *BUDGETS):
        model, inputs = MODELS[model_name](device)
        variants.append(_variant(kind, model, inputs))
        bar.advance(task)
    bar.update(task, description=f"{model_name}: timing")
    steps = {variant.name: lambda v=variant: _timed_step(v, inputs, device) for variant in variants}
    for name, phases in in_turn(steps, repeats, lambda: bar.advance(task)).items():
        next(v for v in variants if v.name == name).phases += phases
    full = next(v for v in variants if v.name == "torch.compile")
    return [_row(variant, full) for variant in variants]


def _variant(kind: Any, model: nn.Module, inputs: dict[str, torch.Tensor]) -> Variant:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    flops = graphopt.analyze(model, inputs).flops.step
    torch.compiler.reset()
    start = time.perf_counter()
    with fresh_compiler_cache():
        if kind == "eager":
            step: Callable[..., Any] = model
        elif kind == "torch.compile":
            step = torch.compile(model)
        else:
            step = graphopt.optimize(model, inputs, budget=kind, optimizer=optimizer)
        step(**inputs).loss.backward()
    optimizer.zero_grad()
    elapsed = time.perf_counter() - start
    if isinstance(step, graphopt.OptimizedModule):
        report = step.report
        return Variant(f"flops={kind}", step, optimizer, report.step_flops, elapsed, report.rewrite_seconds, [])
    return Variant(str(kind), step, optimizer, flops, elapsed if kind != "eager" else 0.0, 0.0, [])


def _timed_step(variant: Variant, inputs: dict[str, torch.Tensor], device: str) -> tuple[float, float, float]:
    """Seconds of forward, backward and optimizer."""
    marks = [now(device)]
    loss = variant.step(**inputs).loss
    marks.append(now(device))
    loss.backward()
    marks.append(now(device))
    variant.optimizer.step()
    variant.optimizer.zero_grad()
    marks.append(now(device))
    return marks[1] - marks[0], marks[2] - marks[1], marks[3] - marks[2]


def trained_once(step: Callable[..., Any], inputs: dict[str, torch.Tensor], model: nn.Module) -> Callable[[], None]:
    """Forward and backward, as a call."""

    def call() -> None:
        step(**inputs).loss.backward()
        model.zero_grad()

    return call


def _row(variant: Variant, full: Variant) -> dict[str, Any]:
    flops_ratio, time_ratio = variant.flops / full.flops, variant.seconds / full.seconds
    forward, backward, optimizer = (statistics.median(phase) for phase in zip(*variant.phases, strict=True))
    return {
        "variant": variant.name,
        "step_flops": variant.flops,
        "flops_ratio": flops_ratio,
        "seconds": variant.seconds,
        "forward_seconds": forward,
        "backward_seconds": backward,
        "optimizer_seconds": optimizer,
        "time_ratio": time_ratio,
        "time_saved_per_flops_saved": (1 - time_ratio) / (1 - flops_ratio) if flops_ratio < 1 else None,
        "compile_seconds": variant.compile_seconds,
        "passes_seconds": variant.passes_seconds,
        "passes_share": variant.passes_seconds / variant.compile_seconds if variant.compile_seconds else None,
    }


def time_selection(tensors: int = 516) -> dict[str, float | int]:
    """Median seconds of selecting among `tensors` tensors on a chain, at the default resolution T_q."""
    per_layer = [(0, 0), (4, 4)] * 2 + [(0, 0)] * 3 + [(1, 2)] + [(0, 0), (1, 1)] * 3 + [(0, 0)] * 2
    costs = [(0, 0)] * 2 + per_layer * ((tensors - 4) // len(per_layer)) + [(0, 0), (20, 0)]
    unit = 10**10
    n = len(costs)
    classes = [(frozenset([i]), w * unit) for i, (w, _) in enumerate(costs) if w]
    classes += [(frozenset(range(i + 1, n)), y * unit) for i, (_, y) in enumerate(costs) if y and i + 1 < n]
    problem = BackwardCosts(
        tuple(map(str, range(n))), sum(w for w, _ in costs) * unit, tuple(classes), tuple(w * unit for w, _ in costs)
    )
    importance = np.random.default_rng(0).exponential(size=n).tolist()
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        select(problem, importance, 0.5, solver="knapsack")
        seconds.append(time.perf_counter() - start)
    return {"tensors": n, "resolution": RESOLUTION, "seconds": statistics.median(seconds)}


def show(results: dict[str, Any], console: Console) -> None:
    """Print the tables."""
    console.print(
        f"torch {results['torch']}, {results['device']}, median of {results['repeats']} steps (forward, backward, AdamW)"
    )
    for block in results["models"]:
        columns = (
            "", "FLOPs ratio", "s/step", "fw / bw / opt", "time ratio", "time / FLOPs saved", "compile s", "passes s", "share",
        )  # fmt: skip
        console.print(table(columns, map(_cells, block["rows"]), title=block["model"]))
    found = results["selection"]
    console.print(f"selection among {found['tensors']} tensors at T_q = {found['resolution']:,}: {found['seconds']:.3f} s")


def _cells(row: dict[str, Any]) -> tuple[object, ...]:
    saved, share = row["time_saved_per_flops_saved"], row["passes_share"]
    return (
        row["variant"], f"{row['flops_ratio']:.3f}", f"{row['seconds']:.3f}",
        " / ".join(f"{row[f'{phase}_seconds']:.2f}" for phase in ("forward", "backward", "optimizer")),
        f"{row['time_ratio']:.3f}", None if saved is None else f"{saved:.2f}",
        f"{row['compile_seconds']:.1f}", f"{row['passes_seconds']:.2f}", None if share is None else f"{share:.1%}",
    )  # fmt: skip


def _minilm(device: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    model = pretrained_minilm(num_labels=45)
    ids = torch.randint(999, 30_000, (32, 32))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.randint(0, 45, (32,))}
    return model.to(torch.device(device)).train(), {k: v.to(device) for k, v in inputs.items()}


def _gpt2(device: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(n_embd=384, n_layer=12, n_head=6, vocab_size=8192, n_positions=128, eos_token_id=0, bos_token_id=0)
    model: nn.Module = GPT2LMHeadModel(config)
    ids = torch.randint(0, 8192, (8, 128))
    return model.to(torch.device(device)).train(), {"input_ids": ids.to(device), "labels": ids.clone().to(device)}


MODELS: dict[str, Callable[[str], tuple[nn.Module, dict[str, torch.Tensor]]]] = {"minilm": _minilm, "gpt2": _gpt2}

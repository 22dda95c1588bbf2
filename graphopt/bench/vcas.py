"""`graphopt bench vcas`: sampled backwards at fixed ratios against exact training with `torch.compile`, in one run.

A step is forward and backward. All variants of a model are compiled first and then timed in turn; medians are reported. The
ratios are those that save about the stated part of the step's FLOPs: by keeping rows at the boundaries, or as many rows there as
terms in every weight's gradient.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import nn

import graphopt
from graphopt.bench.cases import chosen
from graphopt.bench.glosses import pretrained_minilm
from graphopt.bench.greentrainer import trained_once
from graphopt.bench.tables import table
from graphopt.bench.timing import WARMUP, medians, this_device
from graphopt.calls import as_call
from graphopt.capture import capture_to_run
from graphopt.compat.inductor import fresh_compiler_cache
from graphopt.graph import TrainingGraph
from graphopt.integrations.models import quiet_transformers
from graphopt.passes import run_pass
from graphopt.passes.vcas import Vcas

VARIANTS = {
    "rows, 20 %": (0.20, False),
    "rows, 35 %": (0.35, False),
    "rows, 50 %": (0.50, False),
    "rows and terms, 50 %": (0.50, True),
}
"""Part of the step's FLOPs to save, and whether weights' gradients are sampled, too."""

BATCH = 32


def run(models: list[str] | None, repeats: int, console: Console) -> dict[str, Any]:
    """Time every variant of every model.

    Args:
        models: of `MODELS`; all by default.
        repeats: timed rounds.
    Raises:
        InputError: an unknown model.
    """
    device, name = this_device()
    quiet_transformers()
    rows: list[dict[str, Any]] = []
    with Progress(console=console) as bar:
        models = chosen("model", models, MODELS)
        task = bar.add_task("", total=len(models) * (1 + len(VARIANTS) + WARMUP + repeats))
        for model in models:
            bar.update(task, description=model)
            rows += measure(model, repeats, device, lambda: bar.advance(task))
    return {"torch": torch.__version__, "device": name, "repeats": repeats, "batch": BATCH, "rows": rows}


def measure(name: str, repeats: int, device: str, progress: Callable[[], None]) -> list[dict[str, Any]]:
    """The rows of one model."""
    model, inputs = MODELS[name](device)
    graph = capture_to_run(model, *as_call(inputs))
    steps: dict[str, Callable[..., Any]] = {}
    flops: dict[str, int] = {}
    samplers = {kind: sampler_for(graph, *wanted) for kind, wanted in VARIANTS.items()}
    compiling: dict[str, float] = {}
    for kind in ("torch.compile", *VARIANTS):
        torch.compiler.reset()
        start = time.perf_counter()
        with fresh_compiler_cache():
            if kind in VARIANTS:
                step: Callable[..., Any] = graphopt.optimize(model, inputs, passes=[samplers[kind][1]])
            else:
                step = torch.compile(model)
            step(**inputs).loss.backward()
        compiling[kind] = time.perf_counter() - start
        flops[kind] = step.report.step_flops if isinstance(step, graphopt.OptimizedModule) else flop_step(graph)
        steps[kind] = step
        progress()
    seconds = medians({kind: trained_once(step, inputs, model) for kind, step in steps.items()}, repeats, device, progress)
    exact_seconds, exact_flops = seconds["torch.compile"], flops["torch.compile"]
    rows = []
    for kind, median in seconds.items():
        time_saved, flops_saved = 1 - median / exact_seconds, 1 - flops[kind] / exact_flops
        rows.append(
            {
                "model": name,
                "variant": kind,
                "ratio": samplers[kind][0] if kind in samplers else 1.0,
                "seconds": median,
                "step_flops": flops[kind],
                "flops_saved": flops_saved,
                "time_saved": time_saved,
                "quotient": time_saved / flops_saved if flops_saved else None,
                "compile_seconds": compiling[kind],
            }
        )
    return rows


def flop_step(graph: TrainingGraph) -> int:
    """FLOPs of the exact step."""
    return run_pass(Vcas(), graph, {})[1].step_flops_before


def sampler_for(graph: TrainingGraph, saving: float, terms: bool) -> tuple[float, Vcas]:
    """The largest multiple of 1 / 32, kept of rows (and of terms alike), that saves at least `saving` of the step's FLOPs."""
    low, high = 1, 31
    while low < high:
        middle = (low + high + 1) // 2
        rewrite = Vcas(keep_rows=middle / 32, keep_tokens=middle / 32 if terms else 1.0)
        report = run_pass(rewrite, graph, rewrite.ratios(graph))[1]
        if 1 - report.step_flops_after / report.step_flops_before >= saving:
            low = middle
        else:
            high = middle - 1
    return low / 32, Vcas(keep_rows=low / 32, keep_tokens=low / 32 if terms else 1.0)


def show(results: dict[str, Any], console: Console) -> None:
    """Print the table."""
    console.print(
        f"torch {results['torch']}, {results['device']}, batch {results['batch']}, median of {results['repeats']} steps"
    )
    columns = ("model", "variant", "kept", "s/step", "FLOPs saved", "time saved", "time / FLOPs saved", "compile s")
    console.print(table(columns, map(_cells, results["rows"]), words=2))


def _cells(row: dict[str, Any]) -> tuple[object, ...]:
    saved: tuple[object, ...] = (None, None, None)
    if row["quotient"] is not None:
        saved = f"{row['flops_saved']:.1%}", f"{row['time_saved']:.1%}", f"{row['quotient']:.2f}"
    return row["model"], row["variant"], f"{row['ratio']:.2f}", f"{row['seconds']:.3f}", *saved, f"{row['compile_seconds']:.0f}"


def _minilm(device: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    model = pretrained_minilm(num_labels=45)
    return model.to(torch.device(device)).train(), _text(device, 64, 45)


def _bert(device: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(num_hidden_layers=4)
    config.num_labels = 3
    model: nn.Module = BertForSequenceClassification(config)
    return model.to(torch.device(device)).train(), _text(device, 64, 3)


def _vit(device: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    config = ViTConfig(num_hidden_layers=4)
    config.num_labels = 10
    model: nn.Module = ViTForImageClassification(config)
    inputs = {"pixel_values": torch.randn(BATCH, 3, 224, 224), "labels": torch.randint(0, 10, (BATCH,))}
    return model.to(torch.device(device)).train(), {k: v.to(device) for k, v in inputs.items()}


def _text(device: str, length: int, labels: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(999, 30_000, (BATCH, length))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.randint(0, labels, (BATCH,))}
    return {k: v.to(device) for k, v in inputs.items()}


MODELS: dict[str, Callable[[str], tuple[nn.Module, dict[str, torch.Tensor]]]] = {
    "minilm": _minilm,
    "bert-base (4 layers)": _bert,
    "vit-base (4 layers)": _vit,
}

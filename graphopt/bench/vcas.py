"""`graphopt bench vcas`: sampled backwards at fixed ratios against exact training with `torch.compile`, in one run.

A step is forward and backward. The ratios are those that save about the stated part of the step's FLOPs: by keeping rows at the
boundaries, or as many rows there as terms in every weight's gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import Console

from graphopt.bench import steps
from graphopt.bench.cases import chosen
from graphopt.bench.glosses import pretrained_minilm
from graphopt.bench.step_models import Made, classified, network, pictures
from graphopt.bench.steps import COMPILED, Case, Variant, compiled, optimized
from graphopt.calls import as_call
from graphopt.capture import capture_to_run
from graphopt.graph import TrainingGraph
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
    cases = {name: case_of(MODELS[name]) for name in chosen("model", models, MODELS)}
    return steps.run(cases, repeats, console, batch=BATCH)


def case_of(make: Callable[[], Made]) -> Case:
    """A model with every variant."""
    model, inputs = make()
    graph = capture_to_run(model, *as_call(inputs))
    samplers = {kind: sampler_for(graph, *wanted) for kind, wanted in VARIANTS.items()}
    sampled = {kind: Variant(optimized(passes=[sampler]), None) for kind, sampler in samplers.items()}
    kept = {COMPILED: 1.0} | {kind: sampler.keep_rows for kind, sampler in samplers.items()}
    return Case(make, {COMPILED: Variant(compiled, None), **sampled}, more=lambda kind, _: {"ratio": kept[kind]})


def sampler_for(graph: TrainingGraph, saving: float, terms: bool) -> Vcas:
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
    return Vcas(keep_rows=low / 32, keep_tokens=low / 32 if terms else 1.0)


def show(results: dict[str, Any], console: Console) -> None:
    """Print the table."""
    columns = {"kept": steps.number("ratio", ".2f")}
    steps.show_rows(results, f"forward and backward, batch {results['batch']}", columns, console)


def _minilm() -> Made:
    return pretrained_minilm(num_labels=45), classified(BATCH, 64, 45)


def _bert() -> Made:
    return network("Bert", "ForSequenceClassification", num_hidden_layers=4, num_labels=3), classified(BATCH, 64, 3)


def _vit() -> Made:
    return network("ViT", "ForImageClassification", num_hidden_layers=4, num_labels=10), pictures(BATCH, 10)


MODELS: dict[str, Callable[[], Made]] = {"minilm": _minilm, "bert-base (4 layers)": _bert, "vit-base (4 layers)": _vit}

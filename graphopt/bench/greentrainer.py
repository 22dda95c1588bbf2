"""`graphopt bench greentrainer`: what the dy-only cut saves, against eager and `torch.compile`, in one run.

A step is forward, backward and AdamW.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from rich.console import Console

from graphopt.bench import steps
from graphopt.bench.cases import chosen
from graphopt.bench.glosses import pretrained_minilm
from graphopt.bench.step_models import Made, classified, continued, network
from graphopt.bench.steps import COMPILED, Case, Ready, Row, Variant, compiled, eager, optimized
from graphopt.planner.costs import BackwardCosts
from graphopt.planner.selection import RESOLUTION, select

VARIANTS = {
    "eager": Variant(eager), COMPILED: Variant(compiled),
    **{f"flops={budget}": Variant(optimized(budget=budget)) for budget in (0.7, 0.5, 0.4)},
}  # fmt: skip


def _minilm() -> Made:
    return pretrained_minilm(num_labels=45), classified(32, 32, 45)


def _gpt2() -> Made:
    sizes = {"n_embd": 384, "n_layer": 12, "n_head": 6, "vocab_size": 8192, "n_positions": 128}
    return network("GPT2", "LMHeadModel", **sizes, eos_token_id=0, bos_token_id=0), continued(8, 128, 8192)


MODELS = {"minilm": _minilm, "gpt2": _gpt2}


def run(models: list[str] | None, repeats: int, console: Console) -> dict[str, Any]:
    """Measure every variant of every model.

    Args:
        models: of "minilm" (pre-trained weights, batch 32 x 32) and "gpt2" (12 layers, random weights); all by default.
        repeats: timed rounds.
    Raises:
        InputError: an unknown model.
    """
    cases = {name: Case(MODELS[name], VARIANTS, phases=True, more=_passes) for name in chosen("model", models, MODELS)}
    return steps.run(cases, repeats, console, selection=time_selection())


def _passes(kind: str, ready: Mapping[str, Ready]) -> Row:
    opt = ready[kind].opt
    return {"passes_seconds": None if opt is None else opt.report.rewrite_seconds}


def time_selection(tensors: int = 516) -> dict[str, float | int]:
    """Median seconds of selecting among `tensors` tensors on a chain, at the default resolution T_q."""
    per_layer = [(0, 0), (4, 4)] * 2 + [(0, 0)] * 3 + [(1, 2)] + [(0, 0), (1, 1)] * 3 + [(0, 0)] * 2
    costs = [(0, 0)] * 2 + per_layer * ((tensors - 4) // len(per_layer)) + [(0, 0), (20, 0)]
    unit = 10**10
    n = len(costs)
    classes = [(1 << i, w * unit) for i, (w, _) in enumerate(costs) if w]
    classes += [((1 << n) - (1 << i + 1), y * unit) for i, (_, y) in enumerate(costs) if y and i + 1 < n]
    problem = BackwardCosts(
        tuple(map(str, range(n))), sum(w for w, _ in costs) * unit, tuple(classes), tuple(w * unit for w, _ in costs)
    )
    importance = np.random.default_rng(0).exponential(size=n).tolist()
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        select(problem, importance, 0.5, quick=True)
        seconds.append(time.perf_counter() - start)
    return {"tensors": n, "resolution": RESOLUTION, "seconds": statistics.median(seconds)}


def show(results: dict[str, Any], console: Console) -> None:
    """Print the table."""
    phases = {"fw ms": "forward", "bw ms": "backward", "opt ms": "optimizer"}
    columns = {title: steps.number(f"{phase}_seconds", ",.1f", 1e3) for title, phase in phases.items()}
    columns["passes s"] = steps.number("passes_seconds", ".2f")
    steps.show_rows(results, "forward, backward, AdamW", columns, console)
    found = results["selection"]
    console.print(f"selection among {found['tensors']} tensors at T_q = {found['resolution']:,}: {found['seconds']:.3f} s")

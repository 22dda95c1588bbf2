"""Steps of a model that are run in several ways and timed in turn: what the benchmarks of single steps have in common.

A case is a model with a batch, a variant is a way to train it. Each variant has a model of its own with the same weights. All
variants of a case are compiled first, and their memory is measured; then they take turns. A row has the medians of a variant, and
their ratios to those of the case's reference.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import nn

import graphopt
from graphopt.analysis.step_memory import step_memory
from graphopt.bench.peak import held_bytes, peak_of
from graphopt.bench.step_models import Made
from graphopt.bench.timing import WARMUP, in_turn, now, this_device, timed
from graphopt.compat.inductor import fresh_compiler_cache
from graphopt.integrations.models import quiet_transformers
from graphopt.report.tables import table

Row = dict[str, Any]
Column = Callable[[Row], str | None]
Call = Callable[[nn.Module, dict[str, torch.Tensor], torch.optim.Optimizer | None], Callable[..., Any]]
"""From a model, a batch and the optimizer to what is called in the model's place."""

COMPILED = "torch.compile"

RATIOS = {
    "time_ratio": "seconds", "peak_ratio": "peak", "setup_ratio": "setup_seconds",
    "forward_backward_ratio": "forward_backward_seconds",
}  # fmt: skip
"""Fields of a row, and of what they are the ratio to the reference's."""


def fused_adamw(parameters: Any) -> torch.optim.Optimizer:
    """The optimizer of every variant that has no other."""
    return torch.optim.AdamW(parameters, lr=1e-5, fused=True)


@dataclass(frozen=True)
class Variant:
    """A way to train a model.

    Attributes:
        optimizer: makes it from the parameters that are trained; None: a step is forward and backward alone. Where gradients are
            compressed, `make_optimizer` makes it from AdamW instead.
    """

    call: Call
    optimizer: Callable[..., torch.optim.Optimizer] | None = fused_adamw


def eager(model: nn.Module, *_: Any) -> Callable[..., Any]:
    """The model as it is."""
    return model


def compiled(model: nn.Module, *_: Any) -> Callable[..., Any]:
    """`torch.compile`."""
    return torch.compile(model)


def optimized(**options: Any) -> Call:
    """`graphopt.optimize` with some options; without passes among them, it is given the optimizer, too."""

    def call(model: nn.Module, inputs: dict[str, torch.Tensor], optimizer: torch.optim.Optimizer | None) -> Callable[..., Any]:
        known: dict[str, Any] = {} if "passes" in options else {"optimizer": optimizer}
        return graphopt.optimize(model, inputs, **known, **options)

    return call


@dataclass(frozen=True)
class Case:
    """A model that is trained in several ways.

    Attributes:
        make: the model in training mode, and its batch.
        reference: the variant that ratios are of.
        phases: forward, backward and optimizer are timed each; a GPU is waited for between them.
        whole: peaks have in them what exists for the whole step: weights, states and the batch.
        cold: nothing that was compiled before is used.
        autocast: a model in float32 computes in bfloat16.
        keeps: what the model returns, such as logits, is kept until the backward is over; otherwise the loss alone.
        more: further fields of a row, from the name of a variant and all that are ready.
    """

    make: Callable[[], Made]
    variants: Mapping[str, Variant] = field(default_factory=dict)
    reference: str = COMPILED
    phases: bool = False
    whole: bool = False
    cold: bool = True
    autocast: bool = False
    keeps: bool = False
    more: Callable[[str, Mapping[str, Ready]], Row] = lambda name, ready: {}


@dataclass
class Ready:
    """A variant that has made its first steps.

    Attributes:
        step: called as the model is.
        seconds: of setting up, and of those steps.
        held, peak: bytes that exist for the whole step, and the most that exist at once; see `Case.whole`.
    """

    case: Case
    model: nn.Module
    inputs: dict[str, torch.Tensor]
    step: Callable[..., Any]
    optimizer: torch.optim.Optimizer | None
    precision: contextlib.AbstractContextManager[Any]
    seconds: float = 0.0
    held: int = 0
    peak: int = 0

    @property
    def opt(self) -> graphopt.OptimizedModule | None:
        """The optimised model, if it is one."""
        return self.step if isinstance(self.step, graphopt.OptimizedModule) else None

    def train(self, mark: Callable[[], object] = lambda: None) -> None:
        """A step; `mark` is called after forward and after backward."""
        with self.precision:
            output = self.step(**self.inputs)
        loss = output if isinstance(output, torch.Tensor) else output.loss
        if not self.case.keeps:
            del output
        mark()
        loss.backward()
        mark()
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.model.zero_grad()

    def phases(self, device: str) -> list[float]:
        """Seconds of forward, backward and optimizer."""
        marks = [now(device)]
        self.train(lambda: marks.append(now(device)))
        return [after - before for before, after in pairwise([*marks, now(device)])]

    def predicted_bytes(self) -> int | None:
        """The peak that is predicted for a step, as it is measured; None where none is."""
        if self.opt is None or self.opt.last_step is None or "lsp" in self.opt.states:
            return None
        memory = step_memory(self.opt.last_step.graph, "inductor", self.optimizer)
        return memory.peak_bytes - (0 if self.case.whole else memory.static_bytes)


def prepare(case: Case, variant: Variant, device: str) -> Ready:
    """Make a variant ready: its first steps compile.

    Raises:
        GraphoptError: it is refused.
    """
    torch.manual_seed(0)
    before = _allocated(device)
    with torch.device(device):
        model, inputs = case.make()
    optimizer = None if variant.optimizer is None else variant.optimizer([p for p in model.parameters() if p.requires_grad])
    half = case.autocast and next(model.parameters()).dtype == torch.float32
    precision = torch.autocast(device, torch.bfloat16) if half else contextlib.nullcontext()
    begin = now(device)
    with fresh_compiler_cache() if case.cold else contextlib.nullcontext():
        with precision:
            step = variant.call(model, inputs, optimizer)
        if isinstance(step, graphopt.OptimizedModule) and "lsp" in step.states:
            optimizer = step.make_optimizer(torch.optim.AdamW, lr=1e-5, fused=True)
        ready = Ready(case, model, inputs, step, optimizer, precision)
        for _ in range(WARMUP):
            ready.train()
    ready.seconds = now(device) - begin
    ready.held = _allocated(device) - before if device == "cuda" else held_bytes(model, inputs, optimizer)
    ready.peak = peak_of(ready.train, device, ready.held if case.whole else 0)
    return ready


def _allocated(device: str) -> int:
    if device != "cuda":
        return 0
    gc.collect()
    return torch.cuda.memory_allocated()


def rows_of(
    name: str, ready: Mapping[str, Ready], repeats: int, device: str, progress: Callable[[], object] = lambda: None
) -> list[Row]:
    """Time variants of a case in turn, and give a row for each; the reference must be among them."""
    case = next(iter(ready.values())).case
    calls = {kind: partial(r.phases, device) if case.phases else partial(_whole, r, device) for kind, r in ready.items()}
    found = in_turn(calls, repeats, progress)
    rows: dict[str, Row] = {}
    for kind, own in ready.items():
        seconds = statistics.median(map(sum, found[kind]))
        rows[kind] = {
            "model": name,
            "variant": kind,
            "flops_ratio": 1.0 if own.opt is None else own.opt.report.flops_ratio,
            "seconds": seconds,
            "peak": own.peak,
            "setup_seconds": max(0.0, own.seconds - WARMUP * seconds),
        }
        if case.phases:
            medians = map(statistics.median, zip(*found[kind], strict=True))
            rows[kind] |= dict(zip(("forward_seconds", "backward_seconds", "optimizer_seconds"), medians, strict=True))
            rows[kind]["forward_backward_seconds"] = statistics.median(sum(times[:2]) for times in found[kind])
    for kind, row in rows.items():
        base = rows[case.reference]
        row |= {ratio: row[key] / base[key] for ratio, key in RATIOS.items() if base.get(key)}
        saved = 1 - row["flops_ratio"]
        row["time_per_flops_saved"] = (1 - row["time_ratio"]) / saved if saved > 0 else None
        row |= case.more(kind, ready)
    return list(rows.values())


def _whole(ready: Ready, device: str) -> list[float]:
    return [timed(ready.train, device)]


def run(cases: Mapping[str, Case], repeats: int, console: Console, **settings: Any) -> dict[str, Any]:
    """Measure all variants of some cases.

    Args:
        repeats: timed rounds.
        settings: what else the results are to tell.
    """
    device, name = this_device()
    quiet_transformers()
    rows: list[Row] = []
    with Progress(console=console) as bar:
        task = bar.add_task("", total=sum(len(case.variants) + WARMUP + repeats for case in cases.values()))
        for model, case in cases.items():
            torch.compiler.reset()
            ready = {}
            for kind, variant in case.variants.items():
                bar.update(task, description=f"{model}: {kind}")
                ready[kind] = prepare(case, variant, device)
                bar.advance(task)
            bar.update(task, description=f"{model}: timing")
            rows += rows_of(model, ready, repeats, device, lambda: bar.advance(task))
    return {"torch": torch.__version__, "device": name, "repeats": repeats, **settings, "rows": rows}


def number(key: str, form: str, scale: float = 1) -> Column:
    """A column with a field of a row, as `format` writes it; empty where there is none."""
    return lambda row: None if row.get(key) is None else format(row[key] * scale, form)


COLUMNS: dict[str, Column] = {
    "FLOPs": number("flops_ratio", ".3f"),
    "ms/step": number("seconds", ",.1f", 1e3),
    "time": number("time_ratio", ".3f"),
    "time / FLOPs saved": number("time_per_flops_saved", ".2f"),
    "peak MB": number("peak", ",.1f", 1e-6),
    "peak": number("peak_ratio", ".3f"),
    "setup s": number("setup_seconds", ".1f"),
}
"""Of every table: FLOPs, time and peak as parts of the reference's."""


def show_rows(results: dict[str, Any], what: str, columns: Mapping[str, Column], console: Console) -> None:
    """Print a table; columns that are empty in all rows are left out.

    Args:
        what: was measured.
        columns: beside `COLUMNS`.
    """
    rows = results["rows"]
    console.print(f"torch {results['torch']}, {results['device']}: {what}; medians of {results['repeats']} steps")
    shown = {title: cell for title, cell in {**COLUMNS, **columns}.items() if any(cell(row) is not None for row in rows)}
    lines = (
        (row["model"], row["variant"], *([row["refused"]] if "refused" in row else (cell(row) for cell in shown.values())))
        for row in rows
    )
    console.print(table(("", "", *shown), lines, words=2))

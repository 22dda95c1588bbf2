"""`graphopt bench lsp`: compressed gradients against native AdamW, ZeRO-Offload's schedule and GaLore, in one run.

A step is forward, backward and the optimizer's step. All variants of a case are compiled first, where projectors are fitted, and
timed in turn; medians are reported. Without an accelerator the host is the device:
nothing is moved that was not there already, and the host's work is not hidden behind the device's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn

import graphopt
from graphopt.bench.cases import chosen
from graphopt.bench.gantt import gantt
from graphopt.bench.offload_simulator import Layer, simulate
from graphopt.bench.peak import peak_of
from graphopt.bench.projected_adamw import GaloreAdamW
from graphopt.bench.tables import table
from graphopt.bench.timing import WARMUP, medians, this_device, timed
from graphopt.passes import Lsp
from graphopt.passes.lsp.optimizer import SubspaceOptimizer
from graphopt.passes.lsp.projectors import draw_subspace

NONZEROS = 16
VARIANTS: dict[str, Lsp | None] = {
    "native AdamW": None,
    "GaLore, rank 16": None,
    "ZeRO-Offload's schedule": Lsp(schedule="zero"),
    "s = 256": Lsp(256, NONZEROS),
    "s = 512": Lsp(512, NONZEROS),
    "s = 512, layer-wise": Lsp(512, NONZEROS, schedule="layerwise"),
    "s = 1024": Lsp(1024, NONZEROS),
}


class Linears(nn.Module):
    """A stack of equally wide linear layers."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        """The mean square of the last layer's output."""
        for layer in self.layers:
            x = x + nn.functional.gelu(layer(x))
        return x.square().mean()


CASES: dict[str, tuple[int, int, int]] = {"1024 wide": (1024, 6, 2048), "2048 wide": (2048, 4, 2048)}
"""Width, depth, tokens."""


@dataclass
class _Variant:
    """A compiled way to train, ready to be timed."""

    run: Callable[[], None]
    optimizer: torch.optim.Optimizer
    model: nn.Module


def run(cases: list[str] | None, repeats: int, console: Console, chart: Path | None = None) -> dict[str, Any]:
    """Time every variant of every case.

    Args:
        cases: of `CASES`; all by default.
        repeats: timed rounds.
        chart: where to draw the simulated schedules of the last case.
    Raises:
        InputError: an unknown case.
    """
    wanted = chosen("case", cases, CASES)
    device, name = this_device()
    rows: list[dict[str, Any]] = []
    products: list[dict[str, Any]] = []
    with Progress(console=console) as bar:
        task = bar.add_task("", total=len(wanted) * (len(VARIANTS) + WARMUP + repeats + 1))
        for case in wanted:
            bar.update(task, description=case)
            rows += measure(case, repeats, device, lambda: bar.advance(task), chart)
            products += compression_times(case, repeats, device)
            bar.advance(task)
    return {"torch": torch.__version__, "device": name, "repeats": repeats, "rows": rows, "compression": products}


def measure(case: str, repeats: int, device: str, progress: Callable[[], None], chart: Path | None) -> list[dict[str, Any]]:
    """The rows of one case."""
    width, depth, tokens = CASES[case]
    torch.manual_seed(0)
    x = torch.randn(tokens, width, device=device)
    variants = {}
    for kind, rewrite in VARIANTS.items():
        torch.compiler.reset()
        torch.manual_seed(1)
        variants[kind] = _prepared(kind, rewrite, Linears(width, depth).to(device), x)
        variants[kind].run()
        progress()
    seconds = medians({kind: variant.run for kind, variant in variants.items()}, repeats, device, progress)
    native = seconds["native AdamW"]
    rows: list[dict[str, Any]] = []
    for kind, variant in variants.items():
        row = {"case": case, "variant": kind, "seconds": seconds[kind], "over_native": seconds[kind] / native}
        row["peak_bytes"] = peak_of(variant.run, device)
        rows.append(row | _bytes(variant, width, depth))
    simulated = _simulated(variants, x, device, chart)
    for row in rows:
        row["simulated_seconds"] = simulated.get(str(row["variant"]))
        progress()
    return rows


def _prepared(kind: str, rewrite: Lsp | None, model: nn.Module, x: Tensor) -> _Variant:
    if rewrite is None:
        step: Callable[..., Tensor] = torch.compile(model)
        make = GaloreAdamW if kind.startswith("GaLore") else partial(torch.optim.AdamW, fused=True)
        optimizer: torch.optim.Optimizer = make(model.parameters(), lr=1e-5)
    else:
        opt = graphopt.optimize(model, (x,), passes=[rewrite])
        step, optimizer = opt, opt.make_optimizer(torch.optim.AdamW, lr=1e-5, fused=True)

    def run_once() -> None:
        step(x).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.zero_grad()

    return _Variant(run_once, optimizer, model)


def _bytes(variant: _Variant, width: int, depth: int) -> dict[str, int]:
    """Bytes of gradients and of optimizer states, and those that a step moves between device and host."""
    optimizer = variant.optimizer
    if isinstance(optimizer, SubspaceOptimizer):
        compressed = sum(w.variable.numel() * w.variable.element_size() for w in optimizer.subspaces.weights.values())
        state = sum(m.first.nbytes + m.second.nbytes for m in optimizer.moments.values())
        return {"gradient_bytes": compressed, "state_bytes": state, "moved_bytes": 2 * compressed}
    state = sum(t.nbytes for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor))
    return {"gradient_bytes": depth * width * width * 4, "state_bytes": state, "moved_bytes": 0}


def _simulated(variants: dict[str, _Variant], x: Tensor, device: str, chart: Path | None) -> dict[str, float]:
    """Seconds of a step that the simulator predicts from measured durations of the parts, had each its own resource."""
    found = {}
    charts = {}
    for kind, schedule in (("ZeRO-Offload's schedule", "zero"), ("s = 512, layer-wise", "layerwise")):
        optimizer = variants[kind].optimizer
        if not isinstance(optimizer, SubspaceOptimizer) or optimizer.offload is None:
            continue
        durations = optimizer.offload.durations()
        forward, backward = _forward_and_backward(variants["native AdamW"].model, x, device)
        depth = len(optimizer.subspaces.weights)
        weight = next(iter(optimizer.subspaces.weights.values()))
        start = time.perf_counter()
        weight.subspace.decompress(torch.zeros(weight.variable.shape, device=device))
        apply = time.perf_counter() - start
        layer = Layer(forward / depth, backward / depth, durations.to_host, durations.update, durations.to_device, apply)
        simulation = simulate([layer] * depth, schedule)  # type: ignore[arg-type]
        found[kind] = simulation.seconds
        charts[kind] = simulation
    if chart is not None:
        gantt(charts, chart)
    return found


def _forward_and_backward(model: nn.Module, x: Tensor, device: str) -> tuple[float, float]:
    """Seconds of each, compiled and warm."""
    compiled = torch.compile(model)
    loss: list[Tensor] = []
    times = []
    for _ in range(3):
        times.append((timed(lambda: loss.append(compiled(x)), device), timed(lambda: loss.pop().backward(), device)))
        model.zero_grad()
    return times[-1]


def compression_times(case: str, repeats: int, device: str) -> list[dict[str, Any]]:
    """Seconds of forming dW = X'dY, and of compressing it without, each compiled."""
    width, _, tokens = CASES[case]
    x, dy = (torch.randn(tokens, width, device=device) for _ in range(2))
    rows = []
    for size in (width // 8, width // 4, width // 2):
        subspace = draw_subspace((width, width), size, NONZEROS, torch.Generator().manual_seed(0)).to(x.device, x.dtype)
        sides = [(p.rows, p.by_column) for p in (subspace.left, subspace.right)]

        def compressed(a: Tensor, b: Tensor, sides: Any = sides) -> Tensor:
            parts = [
                torch.ops.graphopt.combine_rows(t.t().clone(memory_format=torch.contiguous_format), *side)
                for t, side in zip((a, b), sides, strict=True)
            ]
            return parts[0] @ parts[1].t()

        torch.compiler.reset()
        calls = {"formed": torch.compile(lambda a, b: a.t() @ b), "compressed": torch.compile(compressed)}
        with torch.no_grad():
            formed, ours = medians({k: partial(call, x, dy) for k, call in calls.items()}, repeats, device).values()
        rows.append({"case": case, "s": size, "formed_seconds": formed, "seconds": ours, "faster": formed / ours})
    return rows


def show(results: dict[str, Any], console: Console) -> None:
    """Print both tables."""
    console.print(f"torch {results['torch']}, {results['device']}, median of {results['repeats']} steps, d = {NONZEROS}")
    columns = ("case", "variant", "s/step", "over native", "moved MB", "states MB", "gradients MB", "peak MB", "simulated s")
    rows = (
        (
            row["case"], row["variant"], f"{row['seconds']:.3f}", f"{row['over_native']:.2f}",
            *(f"{row[k] / 1e6:.1f}" for k in ("moved_bytes", "state_bytes", "gradient_bytes", "peak_bytes")),
            row["simulated_seconds"] and f"{row['simulated_seconds']:.3f}",
        )
        for row in results["rows"]
    )  # fmt: skip
    console.print(table(columns, rows, words=2))
    parts = (
        (row["case"], row["s"], *(f"{1e3 * row[k]:.1f}" for k in ("formed_seconds", "seconds")), f"{row['faster']:.2f}")
        for row in results["compression"]
    )
    title = "P'GQ as (P'X')(dY Q) against forming X'dY"
    console.print(table(("case", "s", "form, ms", "compress, ms", "times faster"), parts, title=title))

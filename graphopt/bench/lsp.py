"""`graphopt bench lsp`: compressed gradients against native AdamW and GaLore, in one run.

A step is forward, backward and the optimizer's step; projectors are fitted in the first ones. Without an accelerator the host is
the device: nothing is moved that was not there already, and the host's work is not hidden behind the device's.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from graphopt.bench import steps
from graphopt.bench.cases import chosen
from graphopt.bench.offload_simulator import Layer, gantt, simulate
from graphopt.bench.projected_adamw import GaloreAdamW
from graphopt.bench.step_models import Made
from graphopt.bench.steps import Case, Ready, Row, Variant, compiled, optimized
from graphopt.bench.timing import medians, this_device, timed
from graphopt.passes import Lsp
from graphopt.passes.lsp.optimizer import SubspaceOptimizer
from graphopt.passes.lsp.projectors import draw_subspace
from graphopt.report.tables import table

NONZEROS = 16
NATIVE, LAYERWISE = "native AdamW", "s = 512, layer-wise"
VARIANTS = {
    NATIVE: Variant(compiled),
    "GaLore, rank 16": Variant(compiled, partial(GaloreAdamW, lr=1e-5)),
    "s = 256": Variant(optimized(passes=[Lsp(256, NONZEROS)])),
    "s = 512": Variant(optimized(passes=[Lsp(512, NONZEROS)])),
    LAYERWISE: Variant(optimized(passes=[Lsp(512, NONZEROS, schedule="layerwise")])),
    "s = 1024": Variant(optimized(passes=[Lsp(1024, NONZEROS)])),
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


SHAPES: dict[str, tuple[int, int, int]] = {"1024 wide": (1024, 6, 2048), "2048 wide": (2048, 4, 2048)}
"""Width, depth, tokens."""


def run(cases: list[str] | None, repeats: int, console: Console, chart: Path | None = None) -> dict[str, Any]:
    """Time every variant of every case.

    Args:
        cases: of `SHAPES`; all by default.
        repeats: timed rounds.
        chart: where to draw the simulated schedules of the last case.
    Raises:
        InputError: an unknown case.
    """
    wanted = {name: SHAPES[name] for name in chosen("case", cases, SHAPES)}
    results = steps.run({name: case_of(*shape, chart) for name, shape in wanted.items()}, repeats, console)
    return {**results, "compression": [row for name in wanted for row in compression_times(name, repeats)]}


def case_of(width: int, depth: int, tokens: int, chart: Path | None = None) -> Case:
    """A stack of layers; rows tell bytes, and what the simulator predicts."""

    def make() -> Made:
        return Linears(width, depth), {"x": torch.randn(tokens, width)}

    def more(kind: str, ready: Mapping[str, Ready]) -> Row:
        simulated = {"simulated_seconds": _simulated(ready, chart)} if kind == LAYERWISE else {}
        return _bytes(ready[kind]) | simulated

    return Case(make, VARIANTS, reference=NATIVE, more=more)


def _bytes(ready: Ready) -> Row:
    """Bytes of gradients and of optimizer states, and those that a step moves between device and host."""
    optimizer = ready.optimizer
    if isinstance(optimizer, SubspaceOptimizer):
        compressed = sum(w.variable.nbytes for w in optimizer.subspaces.weights.values())
        state = sum(m.first.nbytes + m.second.nbytes for m in optimizer.moments.values())
        return {"gradient_bytes": compressed, "state_bytes": state, "moved_bytes": 2 * compressed}
    assert optimizer is not None
    state = sum(t.nbytes for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor))
    return {"gradient_bytes": sum(p.nbytes for p in ready.model.parameters()), "state_bytes": state, "moved_bytes": 0}


def _simulated(ready: Mapping[str, Ready], chart: Path | None) -> float:
    """Seconds of a step that the simulator predicts from measured durations of the parts, had each its own resource."""
    optimizer = ready[LAYERWISE].optimizer
    assert isinstance(optimizer, SubspaceOptimizer)
    assert optimizer.offload is not None
    durations, (device, _) = optimizer.offload.durations(), this_device()
    forward, backward, _ = [ready[NATIVE].phases(device) for _ in range(3)][-1]
    depth = len(optimizer.subspaces.weights)
    weight = next(iter(optimizer.subspaces.weights.values()))
    zeros = torch.zeros(weight.variable.shape, device=device)
    apply = timed(lambda: weight.subspace.decompress(zeros), device)
    layer = Layer(forward / depth, backward / depth, durations.to_host, durations.update, durations.to_device, apply)
    simulation = simulate([layer] * depth)
    if chart is not None:
        gantt({LAYERWISE: simulation}, chart)
    return simulation.seconds


def compression_times(case: str, repeats: int) -> list[dict[str, Any]]:
    """Seconds of forming dW = X'dY, and of compressing it without, each compiled."""
    width, _, tokens = SHAPES[case]
    device, _ = this_device()
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
    columns = {f"{what} MB": steps.number(f"{what}_bytes", ".1f", 1e-6) for what in ("moved", "state", "gradient")}
    columns["simulated ms"] = steps.number("simulated_seconds", ",.1f", 1e3)
    steps.show_rows(results, f"forward, backward, optimizer; d = {NONZEROS}", columns, console)
    parts = (
        (row["case"], row["s"], *(f"{1e3 * row[k]:.1f}" for k in ("formed_seconds", "seconds")), f"{row['faster']:.2f}")
        for row in results["compression"]
    )
    title = "P'GQ as (P'X')(dY Q) against forming X'dY"
    console.print(table(("case", "s", "form, ms", "compress, ms", "times faster"), parts, title=title))

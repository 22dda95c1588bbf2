"""FLOPs, memory, plans and what they trade for people: tables for the terminal, and pictures."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from graphopt.analysis.allocator import cuda_memory
from graphopt.analysis.flops import FlopProfile, TensorFlops
from graphopt.analysis.memory import CATEGORIES, MemoryProfile
from graphopt.planner.guidance import Worth, cliffs
from graphopt.planner.parallel import MemoryPlan
from graphopt.planner.pareto import Point
from graphopt.report.tables import table
from graphopt.report.units import BYTE_UNITS, in_bytes, in_percent, unit_of

OPTIMIZER_WIDTH = 0.1
"""Of the plotted timeline: it has many operators, and little to see."""

_COLOURS = ("#3b4f6b", "#8095b3", "#b9c6d8", "#7a9b57", "#c96a3b", "#d9a441", "#a9a9a9")


def show_flops(flops: FlopProfile, shown: Sequence[TensorFlops], console: Console, title: str) -> None:
    """Print FLOPs by tensor.

    Args:
        shown: those of its tensors that are listed.
    """
    rows = [
        (r.name, "x".join(map(str, r.shape)), f"{r.weight_grad_flops / 1e9:,.3f}", f"{r.input_grad_flops / 1e9:,.3f}")
        for r in shown
    ]
    console.print(table(("tensor", "shape", "own gradient (t_dw)", "passing it on (t_dy)"), rows, title=title))
    if len(shown) < len(flops.tensors):
        console.print(f"{len(flops.tensors) - len(shown)} more tensors; --top 0 lists all")
    console.print(
        f"forward {flops.forward / 1e9:,.3f}  backward {flops.backward / 1e9:,.3f}  step {flops.step / 1e9:,.3f} GFLOPs"
    )


def memory_dict(profile: MemoryProfile, top: int = 10) -> dict[str, Any]:
    """Plain values, ready for JSON."""
    cuda = cuda_memory(profile)
    return {
        "batch": profile.batch_size,
        "peak_bytes": profile.peak_bytes,
        "peak_phase": profile.peak_phase,
        "peak_node": profile.rows[profile.peak_row].node,
        "static_bytes": profile.static_bytes,
        "breakdown": profile.breakdown,
        "cuda": {**asdict(cuda), "total_bytes": cuda.total_bytes},
        "top": [asdict(live) for live in profile.top(top)],
        "assumptions": list(profile.assumptions),
    }


def show_memory(profile: MemoryProfile, console: Console, title: str, top: int = 10) -> None:
    """Print the breakdown at the peak and the largest tensors alive there."""
    console.print(
        f"{title}: peak {in_bytes(profile.peak_bytes)} in the {profile.peak_phase} at {profile.rows[profile.peak_row].node}",
        highlight=False,
    )
    shares = [(name, in_bytes(size), f"{size / profile.peak_bytes:.1%}") for name, size in profile.breakdown.items()]
    console.print(table(("category", "bytes", "share"), shares, title="at the peak"))
    largest = [(t.name, t.module, "x".join(map(str, t.shape)), in_bytes(t.bytes), t.category, t.why) for t in profile.top(top)]
    columns = ("tensor", "module", "shape", "bytes", "category", "why")
    console.print(table(columns, largest, {*columns} - {"bytes"}, f"the {top} largest tensors there"))
    cuda = cuda_memory(profile)
    console.print(
        f"CUDA caching allocator: {in_bytes(cuda.allocated_bytes)} allocated, {in_bytes(cuda.reserved_bytes)} reserved, "
        f"{in_bytes(cuda.total_bytes)} with a context of {in_bytes(cuda.context_bytes)}"
    )
    for assumption in profile.assumptions:
        console.print(f"  assumed: {assumption}", highlight=False)


def show_plan(plan: MemoryPlan, console: Console) -> None:
    """Print what was chosen, from what, and on which assumptions."""
    console.print(f"plan: {plan.verdict}", highlight=False)
    rows = [(r.strategy, r.batch_size, r.samples, f"{r.score:g}", in_bytes(r.peak_bytes), r.why) for r in plan.table]
    title = f"per device of {in_bytes(plan.capacity_bytes)}, {plan.margin:.0%} kept free"
    console.print(table(("strategy", "batch", "samples", "score", "peak", "why"), rows, ("strategy", "why"), title))
    for assumption in plan.assumptions:
        console.print(f"  assumed: {assumption}", highlight=False)


def plot_timeline(profile: MemoryProfile, path: Path, title: str, capacity: int | None = None) -> None:
    """Write a PNG: live bytes per category over the step, with the phases, the peak, and the device's bytes if they are known."""
    from matplotlib.figure import Figure

    rows, peak = profile.timeline, profile.peak_bytes
    highest = max(peak, capacity if capacity is not None and capacity < 3 * peak else 0)
    unit, size = unit_of(highest, BYTE_UNITS, "B")
    starts = _widths(profile)
    figure = Figure(figsize=(10, 4.5))
    axes = figure.subplots()
    shown = [c for c in CATEGORIES if any(c in row.by_category for row in rows)]
    series = [[row.by_category.get(c, 0) / size for row in rows] for c in shown]
    colours = [_COLOURS[CATEGORIES.index(c)] for c in shown]
    axes.stackplot(starts[:-1], series, labels=shown, colors=colours, step="post")
    for phase in dict.fromkeys(row.phase for row in rows):
        inside = [k for k, row in enumerate(rows) if row.phase == phase]
        left, right = starts[inside[0]], starts[inside[-1] + 1]
        axes.axvline(left, color="black", linewidth=0.6, linestyle=":")
        axes.text((left + right) / 2, -0.03, phase, ha="center", va="top", fontsize=9, transform=axes.get_xaxis_transform())
    at, value = starts[profile.peak_row], peak / size
    axes.plot(at, value, "o", color="black", markersize=4)
    where = f"peak {in_bytes(peak)} at {profile.rows[profile.peak_row].node}"
    axes.annotate(where, (at, value), (0, 6), textcoords="offset points", ha="right" if at > 0.5 else "left", fontsize=9)
    if capacity is not None and highest == capacity:
        axes.axhline(capacity / size, color="#b3423a", linestyle="--", linewidth=1.2)
        axes.text(1.0, capacity / size, f"device: {in_bytes(capacity)} ", ha="right", va="bottom", fontsize=9, color="#b3423a")
    axes.set(ylabel=f"{unit} alive", xlim=(0, 1), ylim=(0, 1.14 * highest / size), xticks=[])
    axes.set_title(title, fontsize=11, parse_math=False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), reverse=True, frameon=False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _widths(profile: MemoryProfile) -> list[float]:
    """Where each row begins, from 0 to 1, and 1: phases are as wide as they have rows, the optimizer a tenth."""
    phases = [row.phase for row in profile.rows]
    optimizer = phases.count("optimizer")
    others = len(phases) - optimizer
    share = OPTIMIZER_WIDTH if optimizer and others else float(bool(optimizer))
    widths = [share / optimizer if phase == "optimizer" else (1 - share) / others for phase in phases]
    return [0.0, *itertools.accumulate(widths[:-1]), 1.0]


def show_points(points: Sequence[Point], console: Console) -> None:
    """Print one row per plan."""
    rows = [
        (in_percent(p.flops_ratio), in_bytes(p.peak_bytes), in_percent(p.importance), p.trained, p.compressed, p.recomputed)
        for p in points
    ]
    columns = ("FLOPs", "peak", "importance kept", "trained", "compressed", "segments computed again")
    console.print(table(columns, rows, 0, "Plans of which none is worse than another in everything"))


def show_worth(curve: Sequence[Worth], console: Console) -> None:
    """Print what each budget on FLOPs buys, every tenth of a full step and at the cliffs, where a little more buys much."""
    steep = cliffs(curve)
    rows = [
        (f"{w.flops:.2f}", in_percent(w.value), w.trained, "a cliff: less trains much less" if w.flops in steep else "")
        for w in curve
        if w.flops in steep or w is curve[0] or round(w.flops * 100) % 10 == 0
    ]
    console.print(table(("FLOPs", "value trained", "tensors", ""), rows, ("",), "What a budget on FLOPs trains"))


def plot_points(points: Sequence[Point], path: Path, title: str = "") -> None:
    """A PNG: FLOPs across, memory up, importance as colour, a line along plans that keep everything, a mark for full training."""
    from matplotlib.figure import Figure

    unit, size = unit_of(max(p.peak_bytes for p in points), BYTE_UNITS, "B")
    figure = Figure(figsize=(7.2, 4.8))
    axes = figure.subplots()
    front = sorted((p for p in points if p.importance == 1.0), key=lambda p: p.flops_ratio)
    axes.plot([p.flops_ratio for p in front], [p.peak_bytes / size for p in front], color="#9aa4b2", linewidth=1, zorder=1)
    drawn = axes.scatter(
        [p.flops_ratio for p in points],
        [p.peak_bytes / size for p in points],
        c=[p.importance for p in points],
        s=[40 + 80 * (p.compressed > 0) for p in points],
        cmap="viridis",
        vmin=0.0,
        vmax=1.0,
        edgecolors="black",
        linewidths=0.5,
        zorder=2,
    )
    full = [p for p in points if p.importance == 1.0 and not p.recomputed and not p.compressed]
    for p in full[:1]:
        at = p.flops_ratio, p.peak_bytes / size
        axes.scatter(*at, marker="D", s=130, facecolors="none", edgecolors="black", linewidths=1.4, zorder=3)
        axes.annotate("full training", at, (0, 11), textcoords="offset points", ha="center", fontsize=9)
    figure.colorbar(drawn, ax=axes, label="importance kept")
    axes.set(xlabel="FLOPs of a step / full training's", ylabel=f"peak memory, {unit} (large: gradients compressed)")
    axes.set_title(title or "Plans of which none is worse than another in everything", fontsize=11, parse_math=False)
    axes.margins(y=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)

"""Memory profiles and plans for people: tables for the terminal, a plot of the timeline."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from graphopt.analysis.allocator import cuda_memory
from graphopt.analysis.memory import CATEGORIES, MemoryProfile
from graphopt.planner.parallel import MemoryPlan

_COLOURS = ("#3b4f6b", "#8095b3", "#b9c6d8", "#c96a3b", "#7a9b57", "#d9a441", "#a9a9a9")


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
        f"{title}: peak {_size(profile.peak_bytes)} in the {profile.peak_phase} at {profile.rows[profile.peak_row].node}",
        highlight=False,
    )
    table = Table(title="at the peak")
    table.add_column("category")
    table.add_column("bytes", justify="right")
    table.add_column("share", justify="right")
    for category, size in profile.breakdown.items():
        table.add_row(category, _size(size), f"{size / profile.peak_bytes:.1%}")
    console.print(table)
    table = Table(title=f"the {top} largest tensors there")
    for column in ("tensor", "module", "shape", "bytes", "category", "why"):
        table.add_column(column, justify="right" if column == "bytes" else "left", overflow="fold")
    for live in profile.top(top):
        shape = "x".join(map(str, live.shape))
        table.add_row(live.name, live.module, shape, _size(live.bytes), live.category, live.why)
    console.print(table)
    cuda = cuda_memory(profile)
    console.print(
        f"CUDA caching allocator: {_size(cuda.allocated_bytes)} allocated, {_size(cuda.reserved_bytes)} reserved, "
        f"{_size(cuda.total_bytes)} with a context of {_size(cuda.context_bytes)}"
    )
    for assumption in profile.assumptions:
        console.print(f"  assumed: {assumption}", highlight=False)


def plan_dict(plan: MemoryPlan) -> dict[str, Any]:
    """Plain values, ready for JSON."""
    return asdict(plan)


def show_plan(plan: MemoryPlan, console: Console) -> None:
    """Print what was chosen, from what, and on which assumptions."""
    chosen = f"{plan.strategy}, batch {plan.batch_size} per device"
    if not plan.batch_size:
        chosen = "nothing fits, not even one sample with gradients and optimizer states on the host"
    console.print(f"plan: {chosen}", highlight=False)
    table = Table(title=f"per device of {_size(plan.capacity_bytes)}, {plan.margin:.0%} kept free")
    for column in ("strategy", "batch", "samples", "score", "peak", "why"):
        table.add_column(column, justify="left" if column in ("strategy", "why") else "right", overflow="fold")
    for row in plan.table:
        numbers = (str(row.batch_size), str(row.samples), f"{row.score:g}", _size(row.peak_bytes))
        table.add_row(row.strategy, *numbers, row.why)
    console.print(table)
    for assumption in plan.assumptions:
        console.print(f"  assumed: {assumption}", highlight=False)


def plot_timeline(profile: MemoryProfile, path: Path, title: str) -> None:
    """Write a PNG: live bytes per category over the step, with the phases and the peak."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = profile.timeline
    figure = Figure(figsize=(10, 4.5))
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    shown = [c for c in CATEGORIES if any(c in row.by_category for row in rows)]
    series = [[row.by_category.get(c, 0) / 2**30 for row in rows] for c in shown]
    colours = [_COLOURS[CATEGORIES.index(c)] for c in shown]
    axes.stackplot(range(len(rows)), series, labels=shown, colors=colours, step="mid")
    for i in range(1, len(rows)):
        if rows[i].phase != rows[i - 1].phase:
            axes.axvline(i, color="black", linewidth=0.8, linestyle=":")
    for phase in dict.fromkeys(row.phase for row in rows):
        steps = [row.step for row in rows if row.phase == phase]
        axes.text(sum(steps) / len(steps), profile.peak_bytes / 2**30 * 1.03, phase, ha="center", fontsize=9)
    axes.plot(profile.peak_row, profile.peak_bytes / 2**30, "v", color="black", markersize=6)
    axes.set(xlabel="node", ylabel="GiB alive", title=title, xlim=(0, max(1, len(rows) - 1)))
    axes.set_ylim(0, profile.peak_bytes / 2**30 * 1.1)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), reverse=True)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _size(count: int) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= factor:
            return f"{count / factor:.2f} {unit}"
    return f"{count} B"

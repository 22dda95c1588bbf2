"""Trade-offs of a model's training step, as a table and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from graphopt.planner.guidance import Worth, cliffs
from graphopt.planner.pareto import Point
from graphopt.report.tables import table
from graphopt.report.units import BYTE_UNITS, in_bytes, in_percent, unit_of


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

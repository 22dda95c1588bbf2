"""Trade-offs of a model's training step, as a table and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from graphopt.planner.guidance import Worth, cliffs
from graphopt.planner.pareto import Point


def show_points(points: Sequence[Point], console: Console) -> None:
    """Print one row per plan."""
    table = Table(title="Plans of which none is worse than another in everything")
    for column in ("FLOPs", "peak MB", "importance kept", "trained", "compressed", "segments computed again"):
        table.add_column(column, justify="right")
    for p in points:
        table.add_row(
            f"{p.flops_ratio:.1%}", f"{p.peak_bytes / 1e6:,.1f}", f"{p.importance:.1%}", str(p.trained), str(p.compressed),
            str(p.recomputed),
        )  # fmt: skip
    console.print(table)


def show_worth(curve: Sequence[Worth], console: Console) -> None:
    """Print what each budget on FLOPs buys, every tenth of a full step and at the cliffs, where a little more buys much."""
    steep = cliffs(curve)
    table = Table(title="What a budget on FLOPs trains")
    for column in ("FLOPs", "value trained", "tensors", ""):
        table.add_column(column, justify="left" if not column else "right")
    for worth in curve:
        if worth.flops in steep or worth is curve[0] or round(worth.flops * 100) % 10 == 0:
            note = "a cliff: less trains much less" if worth.flops in steep else ""
            table.add_row(f"{worth.flops:.2f}", f"{worth.value:.1%}", str(worth.trained), note)
    console.print(table)


def plot_points(points: Sequence[Point], path: Path) -> None:
    """FLOPs across, peak memory up, importance as colour, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.4))
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    drawn = axes.scatter(
        [p.flops_ratio for p in points],
        [p.peak_bytes / 1e6 for p in points],
        c=[p.importance for p in points],
        s=[40 + 80 * (p.compressed > 0) for p in points],
        cmap="viridis",
        vmin=0.0,
        vmax=1.0,
        edgecolors="black",
        linewidths=0.5,
    )
    figure.colorbar(drawn, ax=axes, label="importance kept")
    axes.set(xlabel="FLOPs of a step / full training's", ylabel="peak memory, MB (large: gradients compressed)")
    figure.tight_layout()
    figure.savefig(path, dpi=120)

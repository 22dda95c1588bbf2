"""A simulated or measured step as a chart: what each resource does when."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from graphopt.bench.offload_simulator import RESOURCES, Simulation

_COLOURS = {"forward": "#8ab", "backward": "#456", "apply": "#c63", "update": "#a7b", "copy out": "#8a8", "copy in": "#cb6"}


def gantt(simulations: Mapping[str, Simulation], path: str | Path) -> Path:
    """Draw steps below each other, on one scale of time.

    Args:
        simulations: by title.
        path: of the PNG.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 1.9 * len(simulations)))
    axes = figure.subplots(len(simulations), 1, sharex=True, squeeze=False)[:, 0]
    for axis, (title, simulation) in zip(axes, simulations.items(), strict=True):
        for span in simulation.spans:
            row = RESOURCES.index(span.resource)
            axis.barh(row, span.end - span.start, left=span.start, color=_COLOURS[span.task], edgecolor="white", linewidth=0.3)
        axis.axvline(simulation.seconds, color="#333", linewidth=0.8, linestyle=":")
        axis.set_yticks(range(len(RESOURCES)), RESOURCES)
        axis.invert_yaxis()
        axis.set_title(f"{title}: {simulation.seconds * 1e3:.1f} ms a step", fontsize=9, loc="left")
    axes[-1].set_xlabel("seconds")
    used = sorted({span.task for s in simulations.values() for span in s.spans})
    handles = [axes[0].barh(0, 0, color=_COLOURS[task]) for task in used]
    figure.legend(handles, used, ncols=len(used), loc="upper right", fontsize=8)
    figure.tight_layout()
    path = Path(path)
    figure.savefig(path, dpi=110)
    return path

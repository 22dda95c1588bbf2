"""`graphopt bench overhead`: what a step, the start, new sizes and a second process cost beside torch.compile.

Every measurement has a process of its own; those of the start begin without caches on disk, and are repeated with them. Seconds
are the process's own, with those of the compilers that it starts: other work on the machine disturbs them little.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import Progress

from graphopt.bench.cases import chosen
from graphopt.errors import GraphoptError
from graphopt.report.tables import table

MODELS = ("mlp", "llama")

LIMITS = {"steady": 1.10, "start": 1.25, "again": 0.4, "batches": 0, "lengths": 3}
"""What is aimed at: of the steady step and the start, as a part of torch.compile's; of a second process's start, as a part of the
first's; compilations for a third batch size and later ones; and for twelve lengths in two epochs."""


def run(models: list[str] | None, repeats: int, console: Console) -> dict[str, Any]:
    """Measure some models.

    Args:
        repeats: of every start; medians are taken, of ratios those of two starts that follow each other.
    Raises:
        InputError: an unknown model.
        GraphoptError: a process failed; says how.
    """
    wanted = chosen("model", models, MODELS)
    rows = []
    with Progress(console=console) as bar:
        task = bar.add_task("measuring", total=len(wanted) * (2 * repeats + 2))
        for model in wanted:
            bar.update(task, description=f"{model}: start")
            starts: dict[str, list[tuple[float, float]]] = {"torch": [], "graphopt": []}
            for _ in range(repeats):
                for way, found in starts.items():
                    found.append(_cold_and_warm(model, way))
                    bar.advance(task)
            bar.update(task, description=f"{model}: steps")
            steady = _child("steady", model)
            bar.advance(task)
            bar.update(task, description=f"{model}: sizes")
            sizes = {way: _child("sizes", model, way) for way in starts}
            bar.advance(task)
            rows.append(_row(model, starts, steady, sizes))
    return {"limits": LIMITS, "rows": rows}


def _cold_and_warm(model: str, way: str) -> tuple[float, float]:
    """Own seconds of setting up and of the first step, without caches on disk and with those that this made."""
    with tempfile.TemporaryDirectory() as folder:
        first, second = (_child("start", model, way, cache=folder) for _ in range(2))
    return first["setup"] + first["first"], second["setup"] + second["first"]


def _row(
    model: str, starts: dict[str, list[tuple[float, float]]], steady: dict[str, Any], sizes: dict[str, Any]
) -> dict[str, Any]:
    cold = {way: statistics.median(c for c, _ in found) for way, found in starts.items()}
    warm = {way: statistics.median(w for _, w in found) for way, found in starts.items()}
    pairs = zip(starts["graphopt"], starts["torch"], strict=True)
    return {
        "model": model,
        "step_seconds": {way: steady[way] for way in starts},
        "steady": steady["ratio"],
        "start_seconds": cold,
        "start": statistics.median(ours / theirs for (ours, _), (theirs, _) in pairs),
        "again_seconds": warm,
        "again": statistics.median(w / c for c, w in starts["graphopt"]),
        "batches": {way: found["batches"] for way, found in sizes.items()},
        "lengths": {way: found.get("lengths") for way, found in sizes.items()},
    }


def _child(kind: str, model: str, way: str = "", cache: str = "") -> dict[str, Any]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    if cache:
        environment["TORCHINDUCTOR_CACHE_DIR"] = cache
    command = [sys.executable, "-m", "graphopt.bench.overhead_run", kind, model, *([way] if way else [])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise GraphoptError(f"{' '.join(command[2:])} failed: {done.stderr.strip()[-500:]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def show(results: dict[str, Any], console: Console) -> None:
    """Print the table."""
    lines = [line for row in results["rows"] for line in _lines(row, results["limits"])]
    columns = ("", "model", "torch.compile", "graphopt", "ratio or count", "aimed at")
    console.print(table(columns, lines, words=6, title="graphopt beside torch.compile (both Inductor, one thread)"))


def _lines(row: dict[str, Any], limits: dict[str, Any]) -> Iterator[tuple[object, ...]]:
    def line(what: str, key: str, cells: Callable[[Any], str], found: str, aim: str) -> tuple[object, ...]:
        return what, row["model"], *(cells(row[key][way]) for way in ("torch", "graphopt")), found, aim

    def seconds(value: float) -> str:
        return f"{value:.1f} s"

    steady, start, again = (f"{limits[key]:.2f}" for key in ("steady", "start", "again"))
    yield line("steady step", "step_seconds", lambda s: f"{1e6 * s:.0f} us", f"{row['steady']:.2f}", steady)
    yield line("setup and first step", "start_seconds", seconds, f"{row['start']:.2f}", start)
    yield line("the same in a second process", "again_seconds", seconds, f"{row['again']:.2f} of the first", again)
    yield line(
        "compiled per batch size",
        "batches",
        lambda counts: " ".join(map(str, counts)),
        "from the third on",
        str(limits["batches"]),
    )
    if (lengths := row["lengths"]["graphopt"]) is not None:
        yield line("compiled for 12 lengths, twice", "lengths", str, str(lengths), str(limits["lengths"]))

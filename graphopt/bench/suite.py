"""`graphopt bench suite`: what each way to fine-tune is worth at equal time, against exact training and what people use.

Exact training with `torch.compile` comes first: its seconds are what every other way gets, and its accuracy is their goal. Every
way is tuned alike: its learning rate is doubled or halved until the best one tried lies between two others; then it is run with
further seeds. Each run has a process of its own, and starts from the same weights with the same batches, without padding beyond
a batch's longest text. Finished runs are kept, line by line, so that a comparison can be made in many sittings.
"""

from __future__ import annotations

import multiprocessing
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress, TaskID

from graphopt.bench.cases import append_row, chosen
from graphopt.bench.selection_tasks import TASKS, load
from graphopt.bench.suite_run import Run, work
from graphopt.bench.suite_ways import WAYS
from graphopt.bench.timing import this_device
from graphopt.bench.tuning import RESULTS, best_rate, finished_runs, next_rate
from graphopt.errors import GraphoptError
from graphopt.report.tables import table

SAME_TIME = 0.05
"""Runs whose time differs by no larger part are compared: exact training's median changes a little with every seed."""

Result = Mapping[str, Any]


@dataclass(frozen=True)
class Settings:
    """What is compared.

    Attributes:
        tasks, ways: by name; exact training is always among the ways.
        steps: of exact training; 0: as many as the task has by default.
        seeds: of each way at its best learning rate.
        time, threads, backend: see `Run`.
        keep_compiled: see `train`. Seconds of compiling are then not those of a first run.
    """

    tasks: tuple[str, ...]
    ways: tuple[str, ...]
    steps: int
    seeds: int
    time: float
    threads: int
    backend: str
    keep_compiled: bool = False


def run(settings: Settings, folder: Path, console: Console) -> dict[str, Any]:
    """Run what is missing, one after the other, and compare.

    Args:
        folder: of `RESULTS`, which holds every finished run, and of pre-trained weights.
    Raises:
        InputError: an unknown task or way, or a file that holds something else.
        GraphoptError: a run failed.
    """
    chosen("way", settings.ways, WAYS)
    file = folder / RESULTS
    results = finished(file)
    tasks = {name: load(name, folder) for name in chosen("task", settings.tasks, TASKS)}
    rates = {name: task.rate for name, task in tasks.items()}
    steps = {name: settings.steps or task.steps for name, task in tasks.items()}
    with Progress(console=console) as bar:
        while (wanted := next(missing(settings, results, rates, steps), None)) is not None:
            line = bar.add_task(f"{wanted.task}, {wanted.way}, {wanted.rate:g}", total=None)
            limit = None if wanted.way == "exact" else wanted.time * _exact_seconds(results, wanted)

            def advance(done: int, line: TaskID = line) -> None:
                bar.update(line, completed=done)

            results.append(in_process(wanted, limit, folder, settings.keep_compiled, advance))
            append_row(file, results[-1])
            bar.remove_task(line)
    rows = compare(settings, results, rates, steps)
    for task in tasks:
        plot(task, rows, folder / f"{task}.png")
    return {"torch": torch.__version__, "rows": rows, "runs": str(file)}


def finished(file: Path) -> list[dict[str, Any]]:
    """See `finished_runs`."""
    return finished_runs(file, Run, "curve")


def missing(settings: Settings, results: Sequence[Result], rates: Mapping[str, float], steps: Mapping[str, int]) -> Iterator[Run]:
    """The runs that are still needed, given those that are finished; more may be needed once these are.

    Args:
        rates: per task, the learning rate that is tried first.
        steps: per task, of exact training.
    """
    for task in settings.tasks:
        for way in _ways(settings):
            found = _of(settings, results, task, way, steps[task])
            rate = next_rate(_tried(found).items(), rates[task])
            if rate is not None:
                yield _run(settings, task, way, rate, 0, steps[task])
                continue
            rate = best_rate(_tried(found))
            done = {r["seed"] for r in found if r["rate"] == rate}
            yield from (_run(settings, task, way, rate, s, steps[task]) for s in range(settings.seeds) if s not in done)


def _ways(settings: Settings) -> list[str]:
    return list(dict.fromkeys(["exact", *(settings.ways or WAYS)]))


def _run(settings: Settings, task: str, way: str, rate: float, seed: int, steps: int) -> Run:
    return Run(task, way, rate, seed, steps, settings.time, settings.threads, settings.backend)


def _of(settings: Settings, results: Sequence[Result], task: str, way: str, steps: int) -> list[Result]:
    """The finished runs of a way on this kind of device, in as much time; those of exact training serve any part of its time."""
    wanted = {"task": task, "way": way, "steps": steps, "threads": settings.threads, "backend": settings.backend}
    if way != "exact":
        wanted["time"] = settings.time
    here, _ = this_device()
    found = [r for r in results if r.get("device", "cpu") == here and all(r[key] == value for key, value in wanted.items())]
    exact = [] if way == "exact" else _of(settings, results, task, "exact", steps)
    if not exact:
        return found
    limit = settings.time * statistics.median(r["seconds"] for r in exact)
    return [r for r in found if abs(r["limit_seconds"] / limit - 1) <= SAME_TIME]


def _tried(found: Sequence[Result]) -> dict[float, float]:
    return {r["rate"]: r["accuracy"] for r in found if r["seed"] == 0}


def _exact_seconds(results: Sequence[Result], run: Run) -> float:
    """Seconds of exact training with as many threads: the median of its runs, which learning rates do not change."""
    same = ("task", "steps", "threads", "backend")
    here, _ = this_device()
    found = [r for r in results if r["way"] == "exact" and r.get("device", "cpu") == here]
    return statistics.median(r["seconds"] for r in found if all(r[key] == getattr(run, key) for key in same))


def in_process(
    run: Run, limit: float | None, folder: Path, keep_compiled: bool, on_step: Callable[[int], object]
) -> dict[str, Any]:
    """The result of `train`, in a process of its own, so that its peak memory and its compilations are its own.

    Raises:
        GraphoptError: the process ended without a result; its own traceback is on the terminal.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(theirs, run, limit, folder, keep_compiled))
    process.start()
    theirs.close()
    try:
        while not isinstance(message := ours.recv(), dict):
            on_step(message)
    except EOFError:
        process.join()
        raise GraphoptError(
            f"the run of {run.way} on {run.task} ended with exit code {process.exitcode} and without a result. Finished runs are "
            "kept; the same command goes on from there."
        ) from None
    except BaseException:
        process.terminate()
        raise
    process.join()
    return message


def compare(
    settings: Settings, results: Sequence[Result], rates: Mapping[str, float], steps: Mapping[str, int]
) -> list[dict[str, Any]]:
    """A row per task and way, at its best learning rate: means over the seeds that were run.

    "reached" is the part of exact training's seconds after which a run was first as accurate as exact training was in the end,
    on the same rows and with the same seed, as a mean; None where a seed never was. "with compiling" counts that on both sides.
    """
    rows = []
    for task in settings.tasks:
        goals: dict[int, Result] = {}
        for way in _ways(settings):
            found = _of(settings, results, task, way, steps[task])
            if not found:
                continue
            rate = best_rate(_tried(found))
            kept = [r for r in found if r["rate"] == rate]
            goals = goals or {r["seed"]: r for r in kept}
            counted = [r["step_flops"] for r in kept if "step_flops" in r]  # earlier runs have none
            means = ("accuracy", "loss", "held_out", "held_out_loss", "seconds_per_step", "compile_seconds", "peak_bytes")
            rows.append(
                {
                    "task": task,
                    "way": way,
                    "rate": rate,
                    "tuned": next_rate(_tried(found).items(), rates[task]) is None,
                    "seeds": len(kept),
                    "steps": round(statistics.fmean(r["taken_steps"] for r in kept)),
                    **{key: statistics.fmean(r[key] for r in kept) for key in means},
                    "step_flops": statistics.fmean(counted) if len(counted) == len(kept) else None,
                    "reached": _reached(kept, goals, compiling=False),
                    "reached_with_compiling": _reached(kept, goals, compiling=True),
                    "curves": [r["curve"] for r in kept],
                }
            )
    return rows


def _reached(runs: Sequence[Result], goals: Mapping[int, Result], compiling: bool) -> float | None:
    def seconds(timed: Result) -> float:
        return float(timed["seconds"] + (timed["compile_seconds"] if compiling else 0.0))

    parts = []
    for r in runs:
        goal = goals.get(r["seed"])
        point = goal and next((p for p in r["curve"] if p["accuracy"] >= goal["accuracy"]), None)
        if goal is None or point is None:
            return None
        parts.append(seconds(point) / seconds(goal))
    return statistics.fmean(parts)


_EMPHASISED = {way: {"linewidth": 2.5, "color": "black", "linestyle": line} for way, line in (("exact", "-"), ("auto", "--"))}


def plot(task: str, rows: Sequence[Result], path: Path) -> None:
    """Accuracy over the seconds of training, and over FLOPs where all runs have these; means over seeds, as a PNG."""
    from matplotlib.figure import Figure

    rows = [row for row in rows if row["task"] == task]
    counted = all(row["step_flops"] is not None for row in rows)
    figure = Figure(figsize=(13 if counted else 8, 4.5))
    axes = figure.subplots(1, 2 if counted else 1, squeeze=False, sharey=True)[0]
    for row in rows:
        points = list(zip(*row["curves"], strict=False))
        style = {"label": row["way"], "linewidth": 1, **_EMPHASISED.get(row["way"], {})}
        accuracy = [statistics.fmean(p["accuracy"] for p in at) for at in points]
        axes[0].plot([statistics.fmean(p["seconds"] for p in at) for at in points], accuracy, **style)
        if counted:
            steps = [statistics.fmean(p["step"] for p in at) for at in points]
            axes[1].plot([row["step_flops"] * count / 1e12 for count in steps], accuracy, **style)
    axes[0].set(title=f"{task}: accuracy over seconds of training", xlabel="seconds", ylabel="accuracy")
    if counted:
        axes[1].set(title="over FLOPs", xlabel="TFLOPs")
    axes[-1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def show(results: dict[str, Any], console: Console) -> None:
    """Print a table per task, the best way first."""
    rows = results["rows"]
    for task in dict.fromkeys(row["task"] for row in rows):
        columns = ("", "accuracy", "loss", "seeds", "rate", "steps", "s/step", "GFLOPs", "MB", "reached")
        cells = map(_cells, sorted((r for r in rows if r["task"] == task), key=lambda r: -r["accuracy"]))
        console.print(table(columns, cells, title=task, padding=0))
    console.print(
        f"torch {results['torch']}; accuracy: on rows that were tuned on | held out; GFLOPs, MB: of a step; reached: part of "
        "exact training's time after which its last accuracy was reached | with compiling on both sides; *: the learning rate is "
        f"not yet tuned; runs: {results['runs']}"
    )


def _cells(row: Result) -> tuple[object, ...]:
    reached = None if row["reached"] is None else f"{row['reached']:.2f} | {row['reached_with_compiling']:.2f}"
    return (
        row["way"], f"{100 * row['accuracy']:.1f} | {row['held_out']:.1%}", f"{row['loss']:.3f}",
        str(row["seeds"]) + ("" if row["tuned"] else " *"), f"{row['rate']:.2g}", row["steps"],
        f"{row['seconds_per_step']:.3f}", None if row["step_flops"] is None else f"{row['step_flops'] / 1e9:.2f}",
        f"{row['peak_bytes'] / 1e6:.0f}", reached,
    )  # fmt: skip

"""`graphopt bench budget`: how soon each technique, and all chosen together, is as accurate as exact training.

MiniLM-L6 is fine-tuned on the WordNet glosses: exactly with `torch.compile` first, which sets the goal (its accuracy after its
last step) and the time that all others get; then with each technique, and with what `optimize` chooses for a budget. Each run has
a process of its own, and starts from the same weights with the same batches. Finished runs are kept in a file, so that a
comparison can be made one run at a time; they follow one another, so that a drift of the machine's speed does not hit them alike.
"""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress, TaskID

from graphopt.bench.budget_run import BATCH, LENGTH, VARIANTS, Settings, work
from graphopt.bench.cases import chosen
from graphopt.bench.glosses import minilm_folder
from graphopt.bench.tables import table
from graphopt.bench.timing import this_device
from graphopt.errors import GraphoptError, InputError

AIM = 0.3
"""Part of exact training's time in which `auto` is to be as accurate."""

_COLOURS = {
    "exact": "#456", "greentrainer": "#c63", "vcas": "#8a8", "lsp": "#a7b", "runlora": "#cb6", "auto": "#d22",
}  # fmt: skip


def run(
    variants: Sequence[str] | None, settings: Settings, rates: Mapping[str, float], folder: Path, console: Console
) -> dict[str, Any]:
    """Run variants, and compare them with those that were run before.

    Args:
        variants: of `VARIANTS`, to run now; None: those that have not been run yet.
        rates: peak learning rates that differ from those of `VARIANTS`.
        folder: of `results.json`, which holds every finished run, and of the plot.
    Raises:
        InputError: an unknown variant, other settings than those of the runs before, or no exact run to compare with.
        GraphoptError: a run failed.
    """
    named = chosen("variant", variants, VARIANTS)
    chosen("variant", rates, VARIANTS)
    minilm_folder()
    file = folder / "results.json"
    device, name = this_device()
    header = {"torch": torch.__version__, "device": name if device == "cuda" else "CPU", "settings": asdict(settings)}
    runs = _finished(file, header)
    wanted = [v for v in named if variants is not None or v not in runs]
    if "exact" not in runs and "exact" not in wanted:
        raise InputError(f"{file} has no exact run, which sets the time for all others: run variant exact first.")
    if "exact" in wanted:
        runs = {}  # others had the time of the exact run before
    with Progress(console=console) as bar:
        for variant in wanted:
            limit = None if variant == "exact" else settings.time * runs["exact"]["seconds"]
            task = bar.add_task(variant, total=settings.steps if variant == "exact" else settings.most_steps)
            rate = rates.get(variant, VARIANTS[variant].rate)

            def advance(done: int, task: TaskID = task) -> None:
                bar.update(task, completed=done)

            found = in_process(variant, settings, rate, limit, advance)
            bar.update(task, total=found["steps"])
            runs = {v: found if v == variant else runs[v] for v in VARIANTS if v == variant or v in runs}
            _write(file, {**header, "runs": runs})
    folder.mkdir(parents=True, exist_ok=True)
    plot(runs, folder / "accuracy.png")
    return {**header, "rows": compare(runs), "runs": runs, "plot": str(folder / "accuracy.png")}


def parse_rates(text: str) -> dict[str, float]:
    """Learning rates from a text such as "auto=5e-4,lsp=1e-3".

    Raises:
        InputError: it is not of this form.
    """
    rates = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        try:
            rates[name.strip()] = float(value)
        except ValueError as error:
            raise InputError(f"learning rate {part!r}: write VARIANT=RATE, for instance auto=5e-4.") from error
    return rates


def _finished(file: Path, header: dict[str, Any]) -> dict[str, Any]:
    """The runs in `file`, by variant; none if there is no such file."""
    if not file.exists():
        return {}
    try:
        before = json.loads(file.read_text())
        runs: dict[str, Any] = before["runs"]
    except (ValueError, TypeError, KeyError) as error:
        raise InputError(f"{file} holds no results of this benchmark: name another folder with --out.") from error
    if {key: before.get(key) for key in header} != header:
        raise InputError(
            f"{file} holds runs with other settings ({before.get('settings')}, torch {before.get('torch')}): "
            "name another folder with --out, or delete it."
        )
    return runs


def _write(file: Path, results: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(results, indent=1) + "\n")
    partial.replace(file)


def in_process(
    variant: str, settings: Settings, rate: float, limit: float | None, on_step: Callable[[int], object]
) -> dict[str, Any]:
    """The result of `train`, in a process of its own, so that its peak memory and its compilations are its own.

    Raises:
        GraphoptError: the process ended without a result; its own traceback is on the terminal.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(theirs, variant, settings, rate, limit))
    process.start()
    theirs.close()
    try:
        while not isinstance(message := ours.recv(), dict):
            on_step(message)
    except EOFError:
        process.join()
        raise GraphoptError(
            f"the run of {variant} ended with exit code {process.exitcode} and without a result. Finished runs are kept; the "
            "same command goes on from there."
        ) from None
    except BaseException:
        process.terminate()
        raise
    process.join()
    return message


def compare(runs: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """A row per run; times and accuracies against those of the exact run.

    "reached" is the first evaluation at which a run is as accurate as exact training after its last step, on the same rows;
    None if there is none. Its ratios are parts of exact training's whole time, without compiling and with it.
    """
    exact = runs["exact"]
    goal = exact["curve"][-1]["accuracy"]
    rows = []
    for variant, found in runs.items():
        reached = next((point for point in found["curve"] if point["accuracy"] >= goal), None)
        rows.append(
            {
                "variant": variant,
                "rate": found["rate"],
                "steps": found["steps"],
                "seconds_per_step": found["seconds_per_step"],
                "step_ratio": found["seconds_per_step"] / exact["seconds_per_step"],
                "seconds": found["seconds"],
                "compile_seconds": found["compile_seconds"],
                "last_accuracy": found["curve"][-1]["accuracy"],
                "accuracy": found["accuracy"],
                "reached_step": reached and reached["step"],
                "reached_seconds": reached and reached["seconds"],
                "reached_ratio": reached and reached["seconds"] / exact["seconds"],
                "reached_ratio_with_compiling": reached and _with_compiling(reached) / _with_compiling(exact),
                "peak_bytes": found["peak_bytes"],
                "peak_rss_bytes": found["peak_rss_bytes"],
            }
        )
    return rows


def _with_compiling(timed: Mapping[str, float]) -> float:
    return timed["seconds"] + timed["compile_seconds"]


def plot(runs: Mapping[str, dict[str, Any]], path: Path) -> None:
    """Accuracy over the seconds of training, and over those with compiling, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4))
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True)
    exact = runs["exact"]
    for axis, seconds, label in (
        (left, lambda timed: timed["seconds"], "seconds of training"),
        (right, _with_compiling, "seconds of training and compiling"),
    ):
        for variant, found in runs.items():
            points = found["curve"]
            axis.plot(
                [seconds(p) for p in points],
                [p["accuracy"] for p in points],
                color=_COLOURS[variant],
                linewidth=2 if variant in ("exact", "auto") else 1,
                marker="o",
                markersize=3,
                label=variant,
            )
        axis.axhline(exact["curve"][-1]["accuracy"], color="#999", linewidth=0.8, linestyle=":")
        axis.axvline(AIM * seconds(exact), color="#999", linewidth=0.8, linestyle=":")
        axis.set_xlabel(label)
    left.set_ylabel("validation accuracy")
    right.legend(fontsize=8, loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def show(results: dict[str, Any], console: Console) -> None:
    """Print the table, and whether `auto` meets its aim."""
    settings = results["settings"]
    console.print(
        f"MiniLM-L6 on the WordNet glosses, torch {results['torch']}, {results['device']}, {settings['threads']} threads, batch "
        f"{BATCH} x {LENGTH}, seed {settings['seed']}, {settings['backend']}; accuracy on {settings['validation_rows']} rows"
    )
    console.print("peak learning rates: " + ", ".join(f"{row['variant']} {row['rate']:g}" for row in results["rows"]))
    costs = ("", "steps", "s/step", "of exact", "s", "compile s", "step MB", "RSS MB")
    console.print(table(costs, map(_cost_cells, results["rows"])))
    progress = ("", "accuracy", "on all rows", "reached at step", "at s", "of exact", "with compile")
    console.print(table(progress, map(_progress_cells, results["rows"])))
    console.print(
        "reached: when a run was first as accurate as exact training after its last step; of exact: as a part of its whole time; "
        "step MB: tensors in one step; RSS MB: the process, libraries and compiling included"
    )
    rows = {row["variant"]: row for row in results["rows"]}
    if "auto" in rows:
        console.print(verdict(rows["auto"], rows["exact"]))
    console.print(f"accuracy over time: {results['plot']}", soft_wrap=True)


def _cost_cells(row: Mapping[str, Any]) -> tuple[object, ...]:
    return (
        row["variant"], row["steps"], f"{row['seconds_per_step']:.3f}", f"{row['step_ratio']:.2f}", f"{row['seconds']:.0f}",
        f"{row['compile_seconds']:.0f}", f"{row['peak_bytes'] / 1e6:.0f}", f"{row['peak_rss_bytes'] / 1e6:.0f}",
    )  # fmt: skip


def _progress_cells(row: Mapping[str, Any]) -> tuple[object, ...]:
    reached: tuple[object, ...] = ("never", None, None, None)
    if row["reached_step"] is not None:
        ratios = (f"{row[key]:.2f}" for key in ("reached_ratio", "reached_ratio_with_compiling"))
        reached = row["reached_step"], f"{row['reached_seconds']:.0f}", *ratios
    return row["variant"], f"{row['last_accuracy']:.1%}", f"{row['accuracy']:.1%}", *reached


def verdict(auto: Mapping[str, Any], exact: Mapping[str, Any]) -> str:
    """Whether `auto` was soon enough as accurate as exact training."""
    goal = f"exact training's {exact['last_accuracy']:.1%}"
    if auto["reached_ratio"] is None:
        return f"auto does not reach {goal}; it ends at {auto['last_accuracy']:.1%}. The aim is missed."
    outcome = "met" if auto["reached_ratio"] <= AIM else "missed"
    return f"auto reaches {goal} in {auto['reached_ratio']:.2f} of its time. The aim, at most {AIM}, is {outcome}."

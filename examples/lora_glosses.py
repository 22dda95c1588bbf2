"""LoRA on MiniLM-L6 and the WordNet glosses, with PEFT as it is and through graphopt: the same losses, in less time.

    python examples/lora_glosses.py --steps 100 --rank 32

Dropout is off, so that both runs compute the same; the adapters can be saved and loaded by PEFT as always.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from peft import LoraConfig, get_peft_model
from rich.console import Console
from rich.progress import Progress
from transformers import AutoModelForSequenceClassification
from transformers.utils import logging as transformers_logging

import graphopt
from graphopt.bench.glosses import Glosses, label_numbers, minilm_folder


def fine_tune(args: argparse.Namespace, train: Glosses, classes: int, reorder: bool, bar: Progress) -> dict:
    """One run: losses and seconds of every step, and the report."""
    torch.manual_seed(args.seed)
    base = AutoModelForSequenceClassification.from_pretrained(
        minilm_folder(), num_labels=classes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    config = LoraConfig(
        r=args.rank,
        lora_alpha=2 * args.rank,
        target_modules=["query", "key", "value", "dense"],
        exclude_modules=["pooler.dense"],
        modules_to_save=["classifier"],
    )
    model = get_peft_model(base, config).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=args.lr)
    batches = train.batches(args.batch, args.seed)
    step = graphopt.optimize(model, next(train.batches(args.batch, args.seed))) if reorder else torch.compile(model)
    losses, seconds = [], []
    task = bar.add_task("graphopt" if reorder else "PEFT, torch.compile", total=args.steps)
    for _ in range(args.steps):
        start = time.perf_counter()
        loss = step(**next(batches)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        seconds.append(time.perf_counter() - start)
        bar.advance(task)
    return {"losses": losses, "seconds": seconds, "report": step.report if reorder else None}


def main() -> None:
    """Run both ways and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    labels = label_numbers()
    train = Glosses("train", labels, args.length)
    console = Console()
    with Progress(console=console) as bar:
        plain = fine_tune(args, train, len(labels), False, bar)
        ours = fine_tune(args, train, len(labels), True, bar)
    difference = max(abs(a - b) for a, b in zip(plain["losses"], ours["losses"], strict=True))
    console.print(str(ours["report"]), markup=False, highlight=False)
    console.print(f"loss {plain['losses'][0]:.4f} -> {plain['losses'][-1]:.4f}; largest difference {difference:.1e}")
    medians = [statistics.median(run["seconds"]) for run in (plain, ours)]
    console.print(f"median step: PEFT under torch.compile {medians[0]:.3f} s, graphopt {medians[1]:.3f} s")


if __name__ == "__main__":
    main()

"""Fine-tune MiniLM-L6 on the WordNet glosses with `transformers.Trainer`, with half of the FLOPs.

Without the two lines marked "graphopt" this is an ordinary script for the Trainer.

    python examples/trainer_glosses.py --steps 600 --out out/trainer
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
from transformers import (
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)

import graphopt
from graphopt.bench.glosses import label_numbers, minilm_folder, pretrained_minilm, read
from graphopt.integrations.trainer import bucketed


def rows(name: str, tokenizer: Any, labels: dict[str, int], count: int | None = None) -> list[dict[str, Any]]:
    """Definitions of any length as token ids, with their labels."""
    names, texts = read(name, count)
    encoded = tokenizer(texts, truncation=True, max_length=64)["input_ids"]
    return [{"input_ids": ids, "labels": labels[n]} for ids, n in zip(encoded, names, strict=True)]


def main(argv: list[str] | None = None) -> None:
    """Train, evaluate, and print what graphopt did."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--budget", type=float, default=0.5, help="fraction of full training's FLOPs")
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--validation-rows", type=int, default=5000)
    parser.add_argument("--out", type=Path, default=Path("out/trainer"))
    args = parser.parse_args(argv)

    labels = label_numbers()
    tokenizer = AutoTokenizer.from_pretrained(minilm_folder())
    callback = graphopt.TrainerCallback(graphopt.Budget(flops=args.budget), backend=args.backend)  # graphopt
    trainer = Trainer(
        pretrained_minilm(len(labels)),
        TrainingArguments(
            output_dir=str(args.out),
            max_steps=args.steps,
            per_device_train_batch_size=32,
            per_device_eval_batch_size=250,
            learning_rate=5e-4,
            warmup_steps=args.steps // 10,
            logging_steps=10,
            eval_strategy="steps",
            eval_steps=150,
            save_strategy="no",
        ),
        train_dataset=rows("train", tokenizer, labels),
        eval_dataset=rows("validation", tokenizer, labels, args.validation_rows),
        data_collator=bucketed(DataCollatorWithPadding(tokenizer), (16, 32, 64)),  # graphopt: three lengths
        compute_metrics=lambda found: {"accuracy": float(np.mean(found.predictions.argmax(-1) == found.label_ids))},
        callbacks=[callback],
    )
    trainer.train()
    print(trainer.evaluate())
    assert callback.opt is not None
    print(callback.opt.report)


if __name__ == "__main__":
    main()

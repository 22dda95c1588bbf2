"""Tiny models and data for `transformers.Trainer`, and runs of it, among them one that is killed in the middle."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor, nn

import graphopt
from graphopt.bench.glosses import label_numbers, minilm_folder, pretrained_minilm, read
from graphopt.integrations.trainer import bucketed
from tests.rules import MEASURED

Row = dict[str, Tensor]


class Classifier(nn.Module):
    """Four linear layers with dropout; returns what a Trainer expects."""

    def __init__(self, width: int = 16, dropout: float = 0.1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5 if i == 0 else width, width) for i in range(3))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        for layer in self.layers:
            x = self.dropout(torch.relu(layer(x)))
        logits = self.head(x)
        return (
            {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits} if labels is not None else {"logits": logits}
        )


def classifier(**options: Any) -> Classifier:
    torch.manual_seed(0)
    return Classifier(**options)


def points(count: int = 14) -> list[Row]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 5, generator=generator)
    return [{"x": row, "labels": (row.sum() > 0).long() + (row[0] > 1).long()} for row in x]


SIZES = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
}


def bert() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.BertConfig(**SIZES, problem_type="single_label_classification")
    return transformers.BertForSequenceClassification(config)


def llama() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES)
    return transformers.LlamaForCausalLM(config)


def tokenizer(**options: Any) -> transformers.PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({"[PAD]": 0, "[MASK]": 1, "a": 2}, unk_token="a"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", mask_token="[MASK]", **options)


def sentences(count: int, length: int = 8, causal: bool = False) -> list[Row]:
    """Token ids with a column that no model takes; of causal models' labels another number counts in every row."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for i in range(count):
        ids = torch.randint(3, 50, (length,), generator=generator)
        labels = ids % 2
        if causal:
            labels = torch.where(torch.arange(length) < i % 5, -100, ids)
        rows.append({"input_ids": ids, "labels": labels if causal else labels[0], "unused": torch.tensor(i)})
    return rows


def trainer(
    model: nn.Module | None, rows: Sequence[Row], folder: Path, callbacks: Sequence[Any] = (), **options: Any
) -> transformers.Trainer:
    """A Trainer for two epochs of batches of 4 on the CPU."""
    further = {k: options.pop(k) for k in ("optimizers", "model_init", "data_collator") if k in options}
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        **{
            "use_cpu": True,
            "per_device_train_batch_size": 4,
            "num_train_epochs": 2,
            "learning_rate": 1e-2,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            **options,
        },
    )
    return transformers.Trainer(
        model, arguments, train_dataset=list(rows), eval_dataset=list(rows[:6]), callbacks=list(callbacks), **further
    )


def callback(budget: Any = None, **options: Any) -> Any:
    return graphopt.TrainerCallback(budget, **{"backend": "aot_eager", **options})


class KilledAt(transformers.TrainerCallback):
    """Kills its process in the middle of a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


RESUMED = {"save_strategy": "steps", "save_steps": 3, "num_train_epochs": 3}
"""Options of the runs that are killed and resumed: 12 steps."""


def glosses(count: int) -> tuple[list[dict[str, Any]], int, Any]:
    """Definitions of WordNet of many lengths, the number of their labels, and the tokenizer of MiniLM."""
    tokens = transformers.AutoTokenizer.from_pretrained(minilm_folder(), local_files_only=True)
    labels = label_numbers()
    names, texts = read("train", count)
    encoded = tokens(texts, truncation=True, max_length=24)["input_ids"]
    return [{"input_ids": ids, "labels": labels[n]} for ids, n in zip(encoded, names, strict=True)], len(labels), tokens


def linear(folder: Path, callbacks: Sequence[Any]) -> transformers.Trainer:
    return trainer(classifier(), points(), folder, callbacks, **RESUMED)


def causal(folder: Path, callbacks: Sequence[Any]) -> transformers.Trainer:
    """A tiny Llama that accumulates gradients of two batches and is evaluated in between."""
    further = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "eval_strategy": "epoch"}
    return trainer(llama(), sentences(14, causal=True), folder, callbacks, **RESUMED, **further)


def minilm(folder: Path, callbacks: Sequence[Any]) -> transformers.Trainer:
    """MiniLM-L6 with its weights on real texts, padded to one length."""
    rows, labels, tokens = glosses(14)
    collator = bucketed(transformers.DataCollatorWithPadding(tokens), (24,))
    return trainer(
        pretrained_minilm(labels), rows, folder, callbacks, data_collator=collator, **{**RESUMED, "learning_rate": 5e-4}
    )


RUNS = {"linear": linear, "causal": causal, "minilm": minilm}


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same(a: nn.Module, b: nn.Module) -> bool:
    theirs = dict(b.named_parameters())
    return all(torch.equal(p, theirs[name]) for name, p in a.named_parameters())


def history(run: transformers.Trainer, key: str) -> list[float]:
    return [entry[key] for entry in run.state.log_history if key in entry]


def killed(name: str, folder: Path) -> None:
    """In a process of its own."""
    RUNS[name](folder, [callback(0.7, passes=MEASURED), KilledAt(7)]).train()

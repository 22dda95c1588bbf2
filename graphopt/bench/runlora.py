"""`graphopt bench runlora`: LoRA training steps, PEFT eager and compiled, against reordered ones.

A step is forward and backward. Models have random weights of the shapes of published ones, cut to a few layers and with a
classification head: the layers with adapters are what is compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from rich.console import Console
from torch import nn

from graphopt.bench import steps
from graphopt.bench.cases import chosen
from graphopt.bench.step_models import Made, adapted, classified, network, pictures
from graphopt.bench.steps import COMPILED, Case, Ready, Row, Variant, compiled, eager, optimized
from graphopt.errors import InputError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

VARIANTS = {"eager": Variant(eager, None), COMPILED: Variant(compiled, None), "graphopt": Variant(optimized(), None)}


@dataclass(frozen=True)
class Shape:
    """A model with a batch and a rank.

    Attributes:
        family: "Llama", "Roberta" or "ViT".
        batch, length: samples, and tokens in each (ViT has its own number).
    """

    family: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    batch: int
    length: int
    rank: int


SHAPES = {
    "llama-60m": Shape("Llama", 8, 512, 1376, 8, 8, 256, 8),
    "llama-250m r=128": Shape("Llama", 4, 768, 2560, 16, 8, 512, 128),
    "llama-250m r=256": Shape("Llama", 4, 768, 2560, 16, 8, 512, 256),
    "llama-1.3b r=512": Shape("Llama", 2, 2048, 5461, 32, 4, 512, 512),
    "roberta-base r=128": Shape("Roberta", 4, 768, 3072, 12, 8, 512, 128),
    "vit-base r=32": Shape("ViT", 4, 768, 3072, 12, 16, 197, 32),
}

OPTIONS: dict[str, dict[str, Any]] = {
    "Llama": {"vocab_size": 32000, "use_cache": False, "pad_token_id": 0},
    "Roberta": {"vocab_size": 50265, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "ViT": {},
}
"""Of a family's configuration."""


def run(cases: list[str] | None, repeats: int, dtype: str, console: Console) -> dict[str, Any]:
    """Time all cases, or those of some names.

    Args:
        dtype: of `DTYPES`.
    Raises:
        InputError: an unknown case or type.
    """
    if dtype not in DTYPES:
        raise InputError(f"dtype {dtype!r}: use {' or '.join(DTYPES)}.")
    wanted = {name: SHAPES[name] for name in chosen("case", cases, SHAPES)}
    found = {name: Case(partial(made, s, DTYPES[dtype]), VARIANTS, more=partial(_orders, s)) for name, s in wanted.items()}
    return steps.run(found, repeats, console, dtype=str(DTYPES[dtype]))


def _orders(shape: Shape, kind: str, ready: Mapping[str, Ready]) -> Row:
    found: Row = {"tokens": shape.batch * shape.length}
    opt = ready[kind].opt
    if opt is None:
        return found
    adapters = opt.report.sections["runlora"]["adapters"]
    predicted = [sum(a[key] or 0.0 for a in adapters) for key in ("seconds_before", "seconds_after")]
    return {**found, "products_seconds": predicted, "orders": [f"{a['layer']}: {a['order']}" for a in adapters]}


def made(shape: Shape, dtype: torch.dtype) -> Made:
    """A model with LoRA on every linear layer below its head, and a batch."""
    sizes = {"hidden_size": shape.hidden, "intermediate_size": shape.intermediate, "num_hidden_layers": shape.layers}
    sizes |= {"num_attention_heads": shape.heads, **OPTIONS[shape.family]}
    if shape.family == "ViT":
        model, inputs = network("ViT", "ForImageClassification", **sizes), pictures(shape.batch)
    else:
        positions = {"max_position_embeddings": shape.length + 2} if shape.family == "Roberta" else {}
        model = network(shape.family, "ForSequenceClassification", **sizes, **positions)
        inputs = classified(shape.batch, shape.length, 2, sizes["vocab_size"])
    targets = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and "classifier" not in n and "score" not in n]
    model = adapted(model, shape.rank, targets, whole=False, lora_alpha=shape.rank, lora_dropout=0.0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)  # as after some training: at 0 nothing may be merged in half precision
    return model.to(dtype), {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}


def show(results: dict[str, Any], console: Console) -> None:
    """Print the table."""
    columns = {"tokens": steps.number("tokens", "d")}
    steps.show_rows(results, f"forward and backward in {results['dtype']}", columns, console)

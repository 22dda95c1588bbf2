"""`graphopt bench runlora`: LoRA training steps, PEFT eager and compiled, against reordered ones.

Every variant of a model runs forward and backward in one process, in turn. Models have random weights of the shapes of published
ones, cut to a few layers and with a classification head: the layers with adapters are what is compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import nn

import graphopt
from graphopt.bench.cases import chosen
from graphopt.bench.greentrainer import trained_once
from graphopt.bench.peak import peak_of
from graphopt.bench.tables import table
from graphopt.bench.timing import WARMUP, medians, this_device
from graphopt.errors import InputError
from graphopt.integrations.models import quiet_transformers

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Case:
    """A model shape with a batch and a rank.

    Attributes:
        family: "llama", "roberta" or "vit".
        batch, length: samples, and tokens in each (ViT has its own number).
    """

    name: str
    family: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    batch: int
    length: int
    rank: int


CASES = (
    Case("llama-60m", "llama", 8, 512, 1376, 8, 8, 256, 8),
    Case("llama-250m r=128", "llama", 4, 768, 2560, 16, 8, 512, 128),
    Case("llama-250m r=256", "llama", 4, 768, 2560, 16, 8, 512, 256),
    Case("llama-1.3b r=512", "llama", 2, 2048, 5461, 32, 4, 512, 512),
    Case("roberta-base r=128", "roberta", 4, 768, 3072, 12, 8, 512, 128),
    Case("vit-base r=32", "vit", 4, 768, 3072, 12, 16, 197, 32),
)


def run(names: list[str] | None, repeats: int, dtype: str, console: Console) -> dict[str, Any]:
    """Time all cases, or those of some names.

    Args:
        dtype: of `DTYPES`.
    Raises:
        InputError: an unknown case or type.
    """
    if dtype not in DTYPES:
        raise InputError(f"dtype {dtype!r}: use {' or '.join(DTYPES)}.")
    wanted = chosen("case", names, (case.name for case in CASES))
    device, name = this_device()
    quiet_transformers()
    rows = []
    with Progress(console=console) as bar:
        task = bar.add_task("", total=len(wanted) * (3 + WARMUP + repeats))
        for case in (case for case in CASES if case.name in wanted):
            bar.update(task, description=case.name)
            rows.append(measure(case, repeats, DTYPES[dtype], device, lambda: bar.advance(task)))
    return {"torch": torch.__version__, "device": name, "dtype": str(DTYPES[dtype]), "repeats": repeats, "rows": rows}


def measure(case: Case, repeats: int, dtype: torch.dtype, device: str, progress: Callable[[], None]) -> dict[str, Any]:
    """Seconds, FLOPs and peak bytes of forward and backward of one case, for every variant."""
    steps: dict[str, Callable[[], None]] = {}
    model, inputs = _make(case, dtype, device)
    for kind in ("eager", "torch.compile", "graphopt"):
        torch.compiler.reset()
        step: Callable[..., Any] = model
        if kind == "torch.compile":
            step = torch.compile(model)
        elif kind == "graphopt":
            step = optimized = graphopt.optimize(model, inputs)
        steps[kind] = trained_once(step, inputs, model)
        steps[kind]()
        progress()
    adapters = optimized.report.sections["runlora"]["adapters"]
    orders = [f"{a['layer']}: {a['order']}" for a in adapters]
    predicted = [sum(a[key] or 0.0 for a in adapters) for key in ("seconds_before", "seconds_after")]
    flops_before, flops_after = optimized.report.full_step_flops, optimized.report.step_flops
    seconds = medians(steps, repeats, device, progress)
    peaks = {kind: peak_of(call, device) for kind, call in steps.items()}
    saved_time = 1 - seconds["graphopt"] / seconds["torch.compile"]
    saved_flops = 1 - flops_after / flops_before
    return {
        "case": case.name,
        "tokens": case.batch * case.length,
        "seconds": seconds,
        "peak_bytes": peaks,
        "over_compiled": seconds["torch.compile"] / seconds["graphopt"],
        "over_eager": seconds["eager"] / seconds["graphopt"],
        "flops_before": flops_before,
        "flops_after": flops_after,
        "flops_saved": saved_flops,
        "time_saved": saved_time,
        "products_seconds": predicted,
        "orders": orders,
    }


def _make(case: Case, dtype: torch.dtype, device: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    model, inputs = _FAMILIES[case.family](case)
    targets = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and "classifier" not in n and "score" not in n]
    config = LoraConfig(r=case.rank, lora_alpha=case.rank, lora_dropout=0.0, target_modules=targets)
    adapted = get_peft_model(model, config, autocast_adapter_dtype=False)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)  # as after some training: at 0 nothing may be merged in half precision
    moved = {k: v.to(device, dtype) if v.is_floating_point() else v.to(device) for k, v in inputs.items()}
    return adapted.to(device, dtype).train(), moved


def _llama(case: Case) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import LlamaConfig, LlamaForSequenceClassification

    config = LlamaConfig(
        hidden_size=case.hidden, intermediate_size=case.intermediate, num_hidden_layers=case.layers,
        num_attention_heads=case.heads, vocab_size=32000, use_cache=False, pad_token_id=0,
    )  # fmt: skip
    return LlamaForSequenceClassification(config), _text(case, 32000)


def _roberta(case: Case) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import RobertaConfig, RobertaForSequenceClassification

    config = RobertaConfig(
        hidden_size=case.hidden, intermediate_size=case.intermediate, num_hidden_layers=case.layers,
        num_attention_heads=case.heads, vocab_size=50265, max_position_embeddings=case.length + 2,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return RobertaForSequenceClassification(config), _text(case, 50265)


def _vit(case: Case) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=case.hidden, intermediate_size=case.intermediate, num_hidden_layers=case.layers,
        num_attention_heads=case.heads,
    )  # fmt: skip
    inputs = {"pixel_values": torch.randn(case.batch, 3, 224, 224), "labels": torch.randint(0, 2, (case.batch,))}
    return ViTForImageClassification(config), inputs


def _text(case: Case, vocabulary: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(5, vocabulary, (case.batch, case.length))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.randint(0, 2, (case.batch,))}


_FAMILIES = {"llama": _llama, "roberta": _roberta, "vit": _vit}


def show(results: dict[str, Any], console: Console) -> None:
    """Print the table."""
    console.print(
        f"torch {results['torch']}, {results['device']}, {results['dtype']}; forward and backward, median of {results['repeats']}"
    )
    columns = (
        "", "tokens", "eager s", "compiled s", "ours s", "over compiled", "over eager", "FLOPs saved", "time / FLOPs saved",
        "peak MB: eager, compiled, ours",
    )  # fmt: skip
    console.print(table(columns, map(_cells, results["rows"])))


def _cells(row: dict[str, Any]) -> tuple[object, ...]:
    saved = row["flops_saved"]
    return (
        row["case"], row["tokens"], *(f"{seconds:.3f}" for seconds in row["seconds"].values()),
        f"{row['over_compiled']:.3f}x", f"{row['over_eager']:.3f}x", f"{saved:.1%}",
        f"{row['time_saved'] / saved:.2f}" if saved > 0 else None,
        ", ".join(f"{peak / 1e6:.0f}" for peak in row["peak_bytes"].values()),
    )  # fmt: skip

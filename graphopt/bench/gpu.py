"""`graphopt bench gpu`: steps of models of the size that people fine-tune, against torch.compile: seconds and peak bytes.

A step is forward, backward and fused AdamW. Every variant is timed in turn with torch.compile's alone. Peak bytes are
`torch.cuda.max_memory_allocated` of a step, less what other variants hold and cuBLAS's workspaces, which stay from the first
product on. Rows are kept as they are found: what is there is not measured again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import nn

import graphopt
from graphopt.bench import steps
from graphopt.bench.cases import append_row, chosen, read_rows
from graphopt.bench.step_models import Made, adapted, classified, continued, network, pictures
from graphopt.bench.steps import COMPILED, Case, Ready, Row, Variant, compiled, optimized, prepare, rows_of
from graphopt.bench.timing import this_device
from graphopt.errors import GraphoptError, InputError
from graphopt.integrations.models import quiet_transformers
from graphopt.passes import Lsp, Vcas

PEAK = 0.7
"""Of torch.compile's peak, in the variant with a limit on memory."""


@dataclass(frozen=True)
class Size:
    """How large a model and its batch are."""

    layers: int
    width: int
    samples: int
    length: int


SIZES = {
    "llama": Size(4, 2048, 8, 1024),
    "lora": Size(4, 2048, 8, 1024),
    "bert": Size(6, 768, 64, 128),
    "vit": Size(6, 768, 64, 197),
}
"""Of `MODELS`, with fewer layers than usual. "llama" and "lora" are in bfloat16; the others in float32, under autocast to it."""

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "flops=0.7": {"budget": 0.7},
    "flops=0.5": {"budget": 0.5},
    f"memory={PEAK}": {},
    "vcas": {"passes": [Vcas(keep_rows=0.5, keep_tokens=0.5)]},
    "lsp": {"passes": [Lsp(512, 16)]},
    "lsp, layer-wise": {"passes": [Lsp(512, 16, schedule="layerwise")]},
}
"""What `optimize` is given."""

VARIANTS = {
    "llama": ("default", "flops=0.7", f"memory={PEAK}", "vcas", "lsp", "lsp, layer-wise"),
    "lora": ("default", f"memory={PEAK}"),
    "bert": ("default", "flops=0.7", "flops=0.5", f"memory={PEAK}", "vcas"),
    "vit": ("default", "flops=0.7", "flops=0.5", f"memory={PEAK}", "vcas"),
}


def run(models: list[str] | None, repeats: int, folder: Path, console: Console) -> dict[str, Any]:
    """Measure every variant of some models, all by default.

    Args:
        repeats: timed rounds.
        folder: of the file of rows.
    Raises:
        InputError: an unknown model, there is no GPU, or the file holds something else.
    """
    device, name = this_device()
    if device != "cuda":
        raise InputError("there is no GPU here that torch can use; on CPUs, use `graphopt bench greentrainer`, `vcas` or `lsp`.")
    quiet_transformers()
    wanted = chosen("model", models, MODELS)
    file = folder / "gpu.jsonl"
    header = {"torch": torch.__version__, "device": name, "repeats": repeats}
    rows = [row for row in read_rows(file, lambda row: row["variant"]) if {k: row[k] for k in header} == header]
    with Progress(console=console) as bar:
        task = bar.add_task("", total=sum(len(VARIANTS[model]) for model in wanted))
        for model in wanted:
            bar.update(task, description=model)
            kinds = [k for k in VARIANTS[model] if not any((row["model"], row["variant"]) == (model, k) for row in rows)]
            bar.advance(task, len(VARIANTS[model]) - len(kinds))
            for row in measure(model, SIZES[model], kinds, repeats, device):
                rows.append({**header, **row})
                append_row(file, rows[-1])
                bar.advance(task)
    return {**header, "rows": [row for row in rows if row["model"] in wanted], "runs": str(file)}


def measure(name: str, size: Size, kinds: Sequence[str], repeats: int, device: str) -> Iterator[Row]:
    """The rows of some variants of a model; one that is refused says why."""
    if not kinds:
        return
    nn.Linear(8, 8, device=device)(torch.ones(8, 8, device=device)).sum().backward()  # makes workspaces in both threads
    case = Case(partial(MODELS[name], size), whole=True, cold=False, autocast=True, more=_predicted)
    theirs = prepare(case, Variant(compiled), device)
    for kind in kinds:
        limit = {"budget": graphopt.Budget(memory=int(PEAK * theirs.peak))} if kind.startswith("memory=") else {}
        try:
            ours = prepare(case, Variant(optimized(**OPTIONS[kind], **limit)), device)
        except GraphoptError as error:
            yield {"model": name, "variant": kind, "refused": str(error)}
            continue
        yield rows_of(name, {COMPILED: theirs, kind: ours}, repeats, device)[-1]


def _predicted(kind: str, ready: Mapping[str, Ready]) -> Row:
    predicted = ready[kind].predicted_bytes()
    return {"predicted_error": predicted / ready[kind].peak - 1 if predicted else None}


def show(results: dict[str, Any], console: Console) -> None:
    """Print the table."""
    columns = {"predicted": steps.number("predicted_error", "+.1%"), "setup": steps.number("setup_ratio", ".2f")}
    steps.show_rows(results, "forward, backward, fused AdamW, against torch.compile", columns, console)


def _llama(size: Size) -> Made:
    model = network(
        "Llama", "ForCausalLM", hidden_size=size.width, intermediate_size=size.width * 11 // 4, num_hidden_layers=size.layers,
        num_attention_heads=size.width // 64, num_key_value_heads=size.width // 128, vocab_size=32_000, use_cache=False,
    )  # fmt: skip
    return model.to(torch.bfloat16), continued(size.samples, size.length, 32_000)


def _lora(size: Size) -> Made:
    model, inputs = _llama(size)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return adapted(model, 16, targets, lora_alpha=32, task_type="CAUSAL_LM"), inputs


def _encoder(family: str, task: str, size: Size) -> nn.Module:
    return network(
        family, task, hidden_size=size.width, intermediate_size=4 * size.width, num_hidden_layers=size.layers,
        num_attention_heads=size.width // 64,
    )  # fmt: skip


def _bert(size: Size) -> Made:
    return _encoder("Bert", "ForSequenceClassification", size), classified(size.samples, size.length, 2)


def _vit(size: Size) -> Made:
    return _encoder("ViT", "ForImageClassification", size), pictures(size.samples)


MODELS: dict[str, Callable[[Size], Made]] = {"llama": _llama, "lora": _lora, "bert": _bert, "vit": _vit}

"""`graphopt bench gpu`: steps of models of the size that people fine-tune, against torch.compile: seconds and peak bytes.

A step is forward, backward and fused AdamW. Every variant has a model of its own, and is timed in turn with torch.compile's;
medians are reported. Peak bytes are `torch.cuda.max_memory_allocated` of a step, less what other variants hold and cuBLAS's
workspaces, which stay from the first product on. Rows are kept as they are found: what is there is not measured again.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn

import graphopt
from graphopt.analysis.step_memory import step_memory
from graphopt.bench.cases import append_row, chosen, read_rows
from graphopt.bench.memory import held_bytes
from graphopt.bench.peak import peak_of
from graphopt.bench.tables import table
from graphopt.bench.timing import WARMUP, medians, this_device
from graphopt.errors import GraphoptError, InputError
from graphopt.integrations.models import quiet_transformers
from graphopt.passes import Lsp, Vcas

Made = tuple[nn.Module, dict[str, Tensor]]

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


@dataclass
class _Variant:
    """One way to train a model, ready to be timed; bytes are of a step, of which `predicted` is what the plan says."""

    run: Callable[[], None]
    peak: int
    predicted: int | None
    flops_ratio: float
    setup_seconds: float


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


def measure(name: str, size: Size, kinds: Sequence[str], repeats: int, device: str) -> Iterator[dict[str, Any]]:
    """The rows of some variants of a model; one that is refused says why."""
    if not kinds:
        return
    nn.Linear(8, 8, device=device)(torch.ones(8, 8, device=device)).sum().backward()  # makes workspaces in both threads
    theirs = _variant(name, size, "torch.compile", device, 0)
    for kind in kinds:
        row = {"model": name, "variant": kind}
        try:
            ours = _variant(name, size, kind, device, theirs.peak)
        except GraphoptError as error:
            yield {**row, "refused": str(error)}
            continue
        seconds = medians({"theirs": theirs.run, "ours": ours.run}, repeats, device)
        yield {
            **row,
            "flops_ratio": ours.flops_ratio,
            "seconds": seconds["ours"],
            "time_ratio": seconds["ours"] / seconds["theirs"],
            "peak": ours.peak,
            "peak_ratio": ours.peak / theirs.peak,
            "predicted_error": ours.predicted / ours.peak - 1 if ours.predicted else None,
            "setup_seconds": ours.setup_seconds,
            "setup_ratio": ours.setup_seconds / theirs.setup_seconds,
        }


def _variant(name: str, size: Size, kind: str, device: str, peak: int) -> _Variant:
    torch.manual_seed(0)
    held = _allocated()
    with torch.device(device):
        model, inputs = MODELS[name](size)
    model.train()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-5, fused=True)
    options = dict(OPTIONS.get(kind, {}))
    if kind.startswith("memory="):
        options["budget"] = graphopt.Budget(memory=int(PEAK * peak))
        options["optimizer"] = optimizer
    whole = next(model.parameters()).dtype == torch.float32
    precision = torch.autocast(device, torch.bfloat16) if whole else contextlib.nullcontext()
    start = time.perf_counter()
    predicted, flops_ratio = None, 1.0
    with precision:
        step: Callable[..., Any]
        if kind == "torch.compile":
            step = torch.compile(model)
        else:
            step = opt = graphopt.optimize(model, inputs, **options)
            if "lsp" in opt.states:
                optimizer = opt.make_optimizer(torch.optim.AdamW, lr=1e-5)
            else:
                predicted = step_memory(opt.plan.rewrite(opt.graph)[0], "inductor", optimizer).peak_bytes
            flops_ratio = opt.report.flops_ratio

    def run_once() -> None:
        with precision:
            loss = step(**inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.zero_grad()

    for _ in range(WARMUP):
        run_once()
    setup = time.perf_counter() - start
    states = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
    tensors = [*model.parameters(), *model.buffers(), *inputs.values(), *states]
    own = _allocated() - held if device == "cuda" else held_bytes(tensors)
    return _Variant(run_once, peak_of(run_once, device, own), predicted, flops_ratio, setup)


def _allocated() -> int:
    gc.collect()
    return torch.cuda.memory_allocated()


def show(results: dict[str, Any], console: Console) -> None:
    """Print the table."""
    console.print(f"torch {results['torch']}, {results['device']}, median of {results['repeats']} steps, against torch.compile")
    columns = ("", "", "FLOPs", "ms", "time", "peak GB", "peak", "predicted", "setup s", "setup")
    console.print(table(columns, map(_cells, results["rows"]), words=2))


def _cells(row: dict[str, Any]) -> tuple[object, ...]:
    if "refused" in row:
        return row["model"], row["variant"], row["refused"]
    error = row["predicted_error"]
    return (
        row["model"], row["variant"], f"{row['flops_ratio']:.3f}", f"{row['seconds'] * 1e3:.1f}", f"{row['time_ratio']:.3f}",
        f"{row['peak'] / 1e9:.2f}", f"{row['peak_ratio']:.3f}", None if error is None else f"{error:+.1%}",
        f"{row['setup_seconds']:.0f}", f"{row['setup_ratio']:.2f}",
    )  # fmt: skip


def _llama(size: Size) -> Made:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=size.width, intermediate_size=size.width * 11 // 4, num_hidden_layers=size.layers,
        num_attention_heads=size.width // 64, num_key_value_heads=size.width // 128, vocab_size=32_000, use_cache=False,
    )  # fmt: skip
    ids = torch.randint(0, 32_000, (size.samples, size.length))
    model: nn.Module = LlamaForCausalLM(config)
    return model.to(torch.bfloat16), {"input_ids": ids, "labels": ids.clone()}


def _lora(size: Size) -> Made:
    from peft import LoraConfig, get_peft_model

    model, inputs = _llama(size)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    adapted: nn.Module = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=targets, task_type="CAUSAL_LM"))
    return adapted, inputs


def _encoder(size: Size) -> dict[str, Any]:
    """What the configurations of BERT and ViT have in common."""
    width = size.width
    return dict(hidden_size=width, intermediate_size=4 * width, num_hidden_layers=size.layers, num_attention_heads=width // 64)


def _bert(size: Size) -> Made:
    from transformers import BertConfig, BertForSequenceClassification

    ids = torch.randint(999, 30_000, (size.samples, size.length))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.randint(0, 2, (size.samples,))}
    return BertForSequenceClassification(BertConfig(**_encoder(size))), inputs


def _vit(size: Size) -> Made:
    from transformers import ViTConfig, ViTForImageClassification

    images = torch.randn(size.samples, 3, 224, 224)
    inputs = {"pixel_values": images, "labels": torch.randint(0, 2, (size.samples,))}
    return ViTForImageClassification(ViTConfig(**_encoder(size))), inputs


MODELS: dict[str, Callable[[Size], Made]] = {"llama": _llama, "lora": _lora, "bert": _bert, "vit": _vit}

"""`graphopt bench exact`: what rewrites that keep every gradient save without any budget, against `torch.compile`, in one run.

A step is forward, backward and AdamW, dropout included. Both variants of a model are compiled first and then timed in turn;
medians are reported. Gradients are compared with eager autograd's in float64, with the same dropout.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import nn

import graphopt
from graphopt.bench.cases import chosen
from graphopt.bench.glosses import pretrained_minilm
from graphopt.bench.tables import table
from graphopt.bench.timing import WARMUP, in_turn, now, this_device
from graphopt.compat import pytree
from graphopt.compat.inductor import fresh_compiler_cache

Case = tuple[nn.Module, dict[str, torch.Tensor]]


def run(models: list[str] | None, repeats: int, console: Console) -> dict[str, Any]:
    """Measure every model.

    Args:
        models: names in `MODELS`; all by default.
        repeats: timed rounds.
    Raises:
        InputError: an unknown model.
    """
    device, name = this_device()
    results: dict[str, Any] = {"torch": torch.__version__, "device": name, "repeats": repeats, "rows": []}
    with Progress(console=console) as bar:
        for model in chosen("model", models, MODELS):
            results["rows"].append({"model": model, **measure(MODELS[model], repeats, device, bar, model)})
    return results


def measure(make: Callable[[], Case], repeats: int, device: str, bar: Progress, name: str) -> dict[str, Any]:
    """The row of one model."""
    task = bar.add_task(f"{name}: comparing gradients", total=3 + WARMUP + repeats)
    error = gradient_error(*make())
    steps: dict[str, Callable[[], list[float]]] = {}
    opt = None
    for kind in ("torch.compile", "graphopt"):
        bar.update(task, advance=1, description=f"{name}: compiling {kind}")
        model, inputs = pytree.tree_map(lambda item: item.to(device), make(), is_leaf=lambda item: isinstance(item, nn.Module))
        step = torch.compile(model) if kind == "torch.compile" else graphopt.optimize(model, inputs)
        opt = step if isinstance(step, graphopt.OptimizedModule) else None
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        steps[kind] = partial(_phases, step, inputs, optimizer, device)
        with fresh_compiler_cache():
            steps[kind]()
    assert opt is not None
    bar.update(task, advance=1, description=f"{name}: timing")
    phases = in_turn(steps, repeats, lambda: bar.advance(task))
    seconds = {kind: statistics.median(sum(times) for times in found) for kind, found in phases.items()}
    forward_backward = {kind: statistics.median(times[0] for times in found) for kind, found in phases.items()}
    report = opt.report
    found = report.sections.get("dead_rows", {}).get("rows", {})
    return {
        "flops_ratio": report.flops_ratio,
        "seconds": seconds,
        "time_ratio": seconds["graphopt"] / seconds["torch.compile"],
        "forward_backward_ratio": forward_backward["graphopt"] / forward_backward["torch.compile"],
        "gradient_error": error,
        "found": [f"{site} reads {rows}" for site, rows in found.items()],
        "not_needed": "" if report.plan is None else report.plan.not_needed.get("dead_rows", ""),
    }


def gradient_error(model: nn.Module, inputs: dict[str, torch.Tensor]) -> float:
    """The largest difference of a gradient's entry from eager autograd's in float64, relative to the largest of all entries."""
    reference = copy.deepcopy(model).double()
    inputs = {name: t.double() if t.is_floating_point() else t for name, t in inputs.items()}
    candidate = graphopt.optimize(copy.deepcopy(reference), inputs, backend="aot_eager")
    for step in (reference, candidate):
        torch.manual_seed(0)
        step(**inputs).loss.backward()
    pairs = [(p.grad, q.grad) for p, q in zip(reference.parameters(), candidate.parameters(), strict=True) if p.grad is not None]
    largest = max(float(gradient.abs().max()) for gradient, _ in pairs)
    return max(float((gradient - other).abs().max()) for gradient, other in pairs if other is not None) / largest


def _phases(
    step: Callable[..., Any], inputs: dict[str, torch.Tensor], optimizer: torch.optim.Optimizer, device: str
) -> list[float]:
    """Seconds of forward and backward, and of the optimizer."""
    start = now(device)
    step(**inputs).loss.backward()
    middle = now(device)
    optimizer.step()
    optimizer.zero_grad()
    return [middle - start, now(device) - middle]


def show(results: dict[str, Any], console: Console) -> None:
    """Print the table."""
    console.print(f"torch {results['torch']}, {results['device']}, median of {results['repeats']} steps, against torch.compile")
    columns = ("", "FLOPs", "step", "forward, backward", "gradients differ by", "")
    console.print(table(columns, map(_cells, results["rows"])))


def _cells(row: dict[str, Any]) -> tuple[object, ...]:
    return (
        row["model"], f"{row['flops_ratio']:.3f}", f"{row['time_ratio']:.3f}", f"{row['forward_backward_ratio']:.3f}",
        f"{row['gradient_error']:.0e}", "; ".join(row["found"]) or row["not_needed"],
    )  # fmt: skip


def _text(vocabulary: int, classes: int, samples: int = 32, tokens: int = 32) -> dict[str, torch.Tensor]:
    ids = torch.randint(999, vocabulary, (samples, tokens))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.randint(0, classes, (samples,))}


def _minilm() -> Case:
    return pretrained_minilm(num_labels=45).train(), _text(30_000, 45)


def _bert() -> Case:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    return BertForSequenceClassification(BertConfig(num_hidden_layers=4)).train(), _text(30_000, 2, samples=16)


def _vit() -> Case:
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=384, num_hidden_layers=6, num_attention_heads=6, intermediate_size=1536, image_size=96, patch_size=16,
    )  # fmt: skip
    inputs = {"pixel_values": torch.randn(32, 3, 96, 96), "labels": torch.randint(0, 2, (32,))}
    return ViTForImageClassification(config).train(), inputs


def _llama() -> Case:
    """Prompts, and answers of the last 30 % of the tokens that alone have labels."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256, num_hidden_layers=6, num_attention_heads=4, intermediate_size=768, vocab_size=8192, use_cache=False
    )
    ids = torch.randint(0, 8192, (8, 128))
    labels = ids.clone()
    labels[:, : round(0.7 * ids.shape[1])] = -100
    return LlamaForCausalLM(config).train(), {"input_ids": ids, "labels": labels}


def _masked() -> Case:
    """Masked tokens, 15 % of all, that alone have labels."""
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    inputs = _text(30_000, 2, samples=16, tokens=64)
    chosen_tokens = torch.rand(inputs["input_ids"].shape) < 0.15
    labels = inputs["input_ids"].masked_fill(~chosen_tokens, -100)
    masked = inputs["input_ids"].masked_fill(chosen_tokens, 103)
    return BertForMaskedLM(BertConfig(num_hidden_layers=4)).train(), {**inputs, "input_ids": masked, "labels": labels}


MODELS: dict[str, Callable[[], Case]] = {"minilm": _minilm, "bert": _bert, "vit": _vit, "llama": _llama, "masked": _masked}

"""`graphopt bench exact`: what rewrites that keep every gradient save without any budget, against `torch.compile`, in one run.

A step is forward, backward and AdamW, dropout included. Gradients are compared with eager autograd's in float64, with the same
dropout.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from rich.console import Console
from torch import nn

import graphopt
from graphopt.bench import steps
from graphopt.bench.cases import chosen
from graphopt.bench.glosses import pretrained_minilm
from graphopt.bench.step_models import IGNORED, Made, classified, continued, network, pictures
from graphopt.bench.steps import COMPILED, Case, Ready, Row, Variant, compiled, optimized

VARIANTS = {COMPILED: Variant(compiled), "graphopt": Variant(optimized())}


def run(models: list[str] | None, repeats: int, console: Console) -> dict[str, Any]:
    """Measure every model.

    Args:
        models: names in `MODELS`; all by default.
        repeats: timed rounds.
    Raises:
        InputError: an unknown model.
    """
    return steps.run({name: case_of(MODELS[name]) for name in chosen("model", models, MODELS)}, repeats, console)


def case_of(make: Callable[[], Made]) -> Case:
    """A model, of which rows tell what was found, and by how much gradients differ."""

    def more(kind: str, ready: Mapping[str, Ready]) -> Row:
        opt = ready[kind].opt
        if opt is None:
            return {}
        found = opt.report.sections.get("dead_rows", {}).get("rows", {})
        not_needed = "" if opt.report.plan is None else opt.report.plan.not_needed.get("dead_rows", "")
        said = "; ".join(f"{site} reads {rows}" for site, rows in found.items())
        return {"gradient_error": gradient_error(*make()), "found": said or not_needed}

    return Case(make, VARIANTS, phases=True, more=more)


def gradient_error(model: nn.Module, inputs: dict[str, torch.Tensor]) -> float:
    """The largest difference of a gradient's entry from eager autograd's in float64, relative to the largest of all entries.

    A gradient that is missing counts as zero.
    """
    reference = copy.deepcopy(model).double()
    inputs = {name: t.double() if t.is_floating_point() else t for name, t in inputs.items()}
    candidate = graphopt.optimize(copy.deepcopy(reference), inputs, backend="aot_eager")
    for step in (reference, candidate):
        torch.manual_seed(0)
        step(**inputs).loss.backward()
    pairs = [(p.grad, q.grad) for p, q in zip(reference.parameters(), candidate.parameters(), strict=True) if p.grad is not None]
    largest = max(float(gradient.abs().max()) for gradient, _ in pairs)
    return max(float((gradient if other is None else gradient - other).abs().max()) for gradient, other in pairs) / largest


def show(results: dict[str, Any], console: Console) -> None:
    """Print the table."""
    columns = {
        "forward, backward": steps.number("forward_backward_ratio", ".3f"),
        "gradients differ by": steps.number("gradient_error", ".0e"),
        "found": lambda row: row.get("found"),
    }
    steps.show_rows(results, "forward, backward, AdamW", columns, console)


def _minilm() -> Made:
    return pretrained_minilm(num_labels=45), classified(32, 32, 45)


def _bert() -> Made:
    return network("Bert", "ForSequenceClassification", num_hidden_layers=4), classified(16, 32, 2)


def _vit() -> Made:
    sizes = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 6, "intermediate_size": 1536, "image_size": 96}
    return network("ViT", "ForImageClassification", **sizes, patch_size=16), pictures(32, size=96)


def _llama() -> Made:
    """Prompts, and answers of the last 30 % of the tokens that alone have labels."""
    sizes = {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 768, "vocab_size": 8192}
    return network("Llama", "ForCausalLM", **sizes, use_cache=False), continued(8, 128, 8192, labelled=0.3)


def _masked() -> Made:
    """Masked tokens, 15 % of all, that alone have labels."""
    inputs = classified(16, 64, 2)
    hidden = torch.rand(inputs["input_ids"].shape) < 0.15
    inputs["labels"] = inputs["input_ids"].masked_fill(~hidden, IGNORED)
    inputs["input_ids"] = inputs["input_ids"].masked_fill(hidden, 103)
    return network("Bert", "ForMaskedLM", num_hidden_layers=4), inputs


MODELS: dict[str, Callable[[], Made]] = {"minilm": _minilm, "bert": _bert, "vit": _vit, "llama": _llama, "masked": _masked}

"""`graphopt bench logits`: a causal language model's step with logits in chunks of tokens, beside eager and `torch.compile`.

The model has the shape of SmolLM2-135M (hidden size 576, vocabulary 49,152, tied embeddings) and random weights; what a step
allocates and how long it takes depends on shapes alone. A step is forward and backward of the model's own loss; it returns its
logits, as Hugging Face's models do. All variants run in one process, in turn; medians are reported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import nn

import graphopt
from graphopt.bench.memory import peak_of
from graphopt.bench.tables import table
from graphopt.bench.timing import WARMUP, medians, this_device
from graphopt.compat.inductor import fresh_compiler_cache
from graphopt.passes import LinearCrossEntropy

VOCABULARY, WIDTH, HEADS, KEY_HEADS, FEED_FORWARD = 49_152, 576, 9, 3, 1_536


def model_of(layers: int) -> nn.Module:
    """SmolLM2's shape, with fewer layers or all 30."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=WIDTH, num_hidden_layers=layers, num_attention_heads=HEADS, num_key_value_heads=KEY_HEADS,
        intermediate_size=FEED_FORWARD, vocab_size=VOCABULARY, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).train()


class LossAlone(nn.Module):
    """A model that returns its loss, so that nobody can read its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss."""
        loss: torch.Tensor = self.model(input_ids=input_ids, labels=labels).loss
        return loss


def run(layers: int, tokens: int, samples: int, chunks: int | None, repeats: int, console: Console) -> dict[str, Any]:
    """Measure every variant.

    Args:
        layers: of the model; SmolLM2-135M has 30.
        tokens: of the batch, in `samples` sequences.
        chunks: see `LinearCrossEntropy`.
        repeats: timed rounds.
    """
    device, name = this_device()
    ids = torch.randint(0, VOCABULARY, (samples, tokens // samples), device=device)
    inputs = {"input_ids": ids, "labels": ids}
    rows: list[dict[str, Any]] = []
    makers: dict[str, Callable[[nn.Module], Any]] = {
        "eager": lambda model: model,
        "torch.compile": torch.compile,
        "graphopt": lambda model: graphopt.optimize(model, inputs, passes=[LinearCrossEntropy(chunks)]),
    }
    with Progress(console=console) as bar:
        task = bar.add_task("compiling", total=6 + WARMUP + repeats)
        steps: dict[str, Callable[[], object]] = {}
        for returns in ("logits too", "the loss alone"):
            for kind, make in makers.items():
                whole = model_of(layers).to(torch.device(device))
                model = LossAlone(whole) if returns == "the loss alone" else whole
                step = make(model)

                def train(step: Any = step, model: nn.Module = model) -> None:
                    found = step(**inputs)
                    (found if isinstance(found, torch.Tensor) else found.loss).backward()
                    model.zero_grad()

                with fresh_compiler_cache():
                    train()
                train()
                found = step.report.sections.get("linear_cross_entropy", {}).get("chunks", {}) if kind == "graphopt" else {}
                peak = peak_of(train, device)
                rows.append({"returns": returns, "variant": kind, "step_bytes": peak, "chunks": max(found.values(), default=1)})
                steps[f"{kind}, {returns}"] = train
                bar.advance(task)
        bar.update(task, description="timing")
        seconds = medians(steps, repeats, device, lambda: bar.advance(task))
    for row in rows:
        compiled = next(r for r in rows if r["returns"] == row["returns"] and r["variant"] == "torch.compile")
        row["seconds"] = seconds[f"{row['variant']}, {row['returns']}"]
        row["bytes_ratio"] = row["step_bytes"] / compiled["step_bytes"]
        row["time_ratio"] = row["seconds"] / seconds[f"torch.compile, {row['returns']}"]
    return {"torch": torch.__version__, "device": name, "layers": layers, "tokens": tokens, "repeats": repeats, "rows": rows}


def show(results: dict[str, Any], console: Console) -> None:
    """Print the table."""
    console.print(
        f"torch {results['torch']}, {results['device']}: {results['layers']} layers, {results['tokens']:,} tokens, "
        f"median of {results['repeats']} steps"
    )
    columns = (
        "the model returns",
        "run by",
        "chunks",
        "step allocates MB",
        "of torch.compile's",
        "seconds",
        "of torch.compile's",
    )
    console.print(table(columns, map(_cells, results["rows"]), words=2))


def _cells(row: dict[str, Any]) -> tuple[object, ...]:
    return (
        row["returns"], row["variant"], row["chunks"], f"{row['step_bytes'] / 1e6:,.0f}", f"{row['bytes_ratio']:.2f}",
        f"{row['seconds']:.2f}", f"{row['time_ratio']:.2f}",
    )  # fmt: skip

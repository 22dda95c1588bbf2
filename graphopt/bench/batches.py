"""`graphopt bench batches`: the largest batch of language models, with and without what `optimize` does without a budget.

Predicted, as `graphopt fit` predicts it, for shapes of published models in bfloat16 with AdamW in bfloat16; no weights are made.
"""

from __future__ import annotations

from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import nn

import graphopt
from graphopt.analysis.step_memory import step_memory
from graphopt.bench.cases import chosen
from graphopt.bench.step_models import network
from graphopt.budget import parse_bytes
from graphopt.integrations.fit import OVERHEAD, with_exact_rewrites
from graphopt.integrations.models import quiet_transformers
from graphopt.report.tables import table
from graphopt.report.units import in_bytes

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-3.2-1b": ("Llama", {
        "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
        "intermediate_size": 8192, "vocab_size": 128_256,
    }),
    "qwen3-0.6b": ("Qwen3", {
        "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "intermediate_size": 3072, "vocab_size": 151_936,
    }),
}  # fmt: skip

CAPACITIES = ("16GiB", "24GiB")


def model_of(name: str, layers: int | None = None) -> nn.Module:
    """A model of that shape without memory for its weights; with fewer layers, if so many are given."""
    quiet_transformers()
    family, shape = SHAPES[name]
    fewer = {} if layers is None else {"num_hidden_layers": layers}
    with torch.device("meta"):
        model = network(family, "ForCausalLM", **{**shape, **fewer}, tie_word_embeddings=True, use_cache=False)
    return model.to(torch.bfloat16)


def run(models: list[str] | None, length: int, backend: str, layers: int | None, console: Console) -> dict[str, Any]:
    """Predict every case.

    Args:
        models: names or patterns of `SHAPES`; all by default.
        length: tokens of a sample.
        backend: "inductor" or "aot_eager".
        layers: fewer than the models have, to try it.
    """
    rows, names = [], chosen("models", models, SHAPES)
    with Progress(console=console) as bar:
        task = bar.add_task("predicting", total=2 * len(names))
        for name in names:
            ids = torch.zeros((2, length), dtype=torch.int64)
            graph = graphopt.analyze(model_of(name, layers), {"input_ids": ids, "labels": ids}).graph
            for by, step in (("torch.compile", graph), ("graphopt, outputs='loss'", with_exact_rewrites(graph) or graph)):
                memory = step_memory(step, backend, "adamw")
                largest = {c: memory.max_batch(parse_bytes(c) - OVERHEAD) for c in CAPACITIES}
                rows.append({"model": name, "by": by, "one_sample_bytes": memory.at(1).peak_bytes, "largest": largest})
                bar.advance(task)
    return {"torch": torch.__version__, "length": length, "backend": backend, "layers": layers, "rows": rows}


def show(results: dict[str, Any], console: Console) -> None:
    """Print the table."""
    console.print(f"torch {results['torch']}: largest batch of {results['length']:,} tokens, predicted for {results['backend']}")
    columns = ("model", "run by", "peak with one sample", *(f"batch on {capacity}" for capacity in CAPACITIES))
    cells = ((r["model"], r["by"], in_bytes(r["one_sample_bytes"]), *r["largest"].values()) for r in results["rows"])
    console.print(table(columns, cells, words=2))

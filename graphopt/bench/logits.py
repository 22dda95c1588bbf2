"""`graphopt bench logits`: a causal language model's step with logits in chunks of tokens, beside eager and `torch.compile`.

The model has the shape of SmolLM2-135M (hidden size 576, vocabulary 49,152, tied embeddings) and random weights; what a step
allocates and how long it takes depends on shapes alone. A step is forward and backward of the model's own loss; it returns its
logits, as Hugging Face's models do. All variants run in one process, in turn; medians are reported. Where it is installed, the
package cut_cross_entropy (Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models", ICLR 2025) is among them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import nn

import graphopt
from graphopt.analysis.step_memory import step_memory
from graphopt.bench.peak import peak_of
from graphopt.bench.tables import table
from graphopt.bench.timing import WARMUP, medians, this_device
from graphopt.compat.inductor import fresh_compiler_cache
from graphopt.passes import LinearCrossEntropy

CUT = "torch.compile, cut_cross_entropy"
VOCABULARY, WIDTH, HEADS, KEY_HEADS, FEED_FORWARD = 49_152, 576, 9, 3, 1_536


def model_of(layers: int, lora: bool) -> nn.Module:
    """SmolLM2's shape, with fewer layers or all 30."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=WIDTH, num_hidden_layers=layers, num_attention_heads=HEADS, num_key_value_heads=KEY_HEADS,
        intermediate_size=FEED_FORWARD, vocab_size=VOCABULARY, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).train()
    return with_adapters(model) if lora else model


def with_adapters(model: nn.Module) -> nn.Module:
    """The model with adapters of rank 8 on queries and values, which alone are trained: the head is frozen."""
    from peft import LoraConfig, get_peft_model

    adapted: nn.Module = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
    return adapted.train()


def described(results: dict[str, Any]) -> str:
    """The settings of a run, for the line above its table."""
    trained = "adapters of rank 8 are trained" if results["lora"] else "all is trained"
    return (
        f"{results['tokens']:,} tokens, {results['labelled']:.0%} of them with a label, {trained}, "
        f"median of {results['repeats']} steps (forward, backward)"
    )


class LossAlone(nn.Module):
    """A model that returns its loss, so that nobody can read its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss."""
        loss: torch.Tensor = self.model(input_ids=input_ids, labels=labels).loss
        return loss


class CutLoss(nn.Module):
    """The model's loss by the package cut_cross_entropy; on a CPU in the form without its Triton kernels."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        whole: Any = getattr(model, "get_base_model", lambda: model)()
        self.decoder, self.head = whole.get_decoder(), whole.get_output_embeddings()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss."""
        from cut_cross_entropy import linear_cross_entropy

        hidden = self.decoder(input_ids=input_ids).last_hidden_state
        kind = "cce" if hidden.is_cuda else "torch_compile"
        loss: torch.Tensor = linear_cross_entropy(hidden, self.head.weight, labels, shift=True, impl=kind)
        return loss


def run(
    layers: int, tokens: int, samples: int, chunks: int | None, labelled: float, lora: bool, repeats: int, console: Console
) -> dict[str, Any]:
    """Measure every variant.

    Args:
        layers: of the model; SmolLM2-135M has 30.
        tokens: of the batch, in `samples` sequences.
        chunks: see `LinearCrossEntropy`.
        labelled: part of the tokens, the last of each sequence, that have a label.
        lora: adapters are trained, and nothing else.
        repeats: timed rounds.
    """
    device, name = this_device()
    ids = torch.randint(0, VOCABULARY, (samples, tokens // samples), device=device)
    labels = ids.clone()
    labels[:, : round((1 - labelled) * ids.shape[1])] = -100
    inputs = {"input_ids": ids, "labels": labels}
    passes = [LinearCrossEntropy(chunks)]
    rows: list[dict[str, Any]] = []
    makers: dict[str, Callable[[nn.Module], Any]] = {
        "eager": lambda model: model,
        "torch.compile": torch.compile,
        "graphopt": lambda model: graphopt.optimize(model, inputs, passes=passes),
        "graphopt, outputs='loss'": lambda model: graphopt.optimize(model, inputs, passes=passes, outputs="loss"),
    }
    variants = [("logits too", kind) for kind in makers] + [("the loss alone", kind) for kind in list(makers)[:3]]
    if importlib.util.find_spec("cut_cross_entropy"):
        makers[CUT] = lambda model: torch.compile(CutLoss(model.get_submodule("model")))
        variants.append(("the loss alone", CUT))
    with Progress(console=console) as bar:
        task = bar.add_task("compiling", total=len(variants) + WARMUP + repeats)
        steps: dict[str, Callable[[], object]] = {}
        for returns, kind in variants:
            whole = model_of(layers, lora).to(torch.device(device))
            model = LossAlone(whole) if returns == "the loss alone" else whole
            step = makers[kind](model)

            def train(step: Any = step, model: nn.Module = model) -> None:
                found = step(**inputs)
                (found if isinstance(found, torch.Tensor) else found.loss).backward()
                model.zero_grad()

            with fresh_compiler_cache():
                train()
            train()
            peak = peak_of(train, device)
            rows.append({"returns": returns, "variant": kind, "step_bytes": peak, **_predicted(step)})
            steps[f"{kind}, {returns}"] = train
            bar.advance(task)
        bar.update(task, description="timing")
        seconds = medians(steps, repeats, device, lambda: bar.advance(task))
    for row in rows:
        compiled = next(r for r in rows if r["returns"] == row["returns"] and r["variant"] == "torch.compile")
        row["seconds"] = seconds[f"{row['variant']}, {row['returns']}"]
        row["bytes_ratio"] = row["step_bytes"] / compiled["step_bytes"]
        row["time_ratio"] = row["seconds"] / seconds[f"torch.compile, {row['returns']}"]
    settings = {"layers": layers, "tokens": tokens, "labelled": labelled, "lora": lora, "repeats": repeats}
    return {"torch": torch.__version__, "device": name, **settings, "rows": rows}


def _predicted(step: Any) -> dict[str, Any]:
    """In how many chunks a step's head is computed, and the bytes that were predicted for it."""
    if not isinstance(step, graphopt.OptimizedModule) or step.last_step is None:
        return {"chunks": 1, "predicted_bytes": None}
    memory = step_memory(step.last_step.graph, "inductor", None)
    chunks = step.report.sections.get("linear_cross_entropy", {}).get("chunks", {})
    return {"chunks": max(chunks.values(), default=1), "predicted_bytes": memory.peak_bytes - memory.static_bytes}


def show(results: dict[str, Any], console: Console) -> None:
    """Print the table."""
    console.print(f"torch {results['torch']}, {results['device']}: {results['layers']} layers, {described(results)}")
    columns = (
        "the model returns",
        "run by",
        "chunks",
        "step allocates MB",
        "predicted MB",
        "of torch.compile's",
        "seconds",
        "of torch.compile's",
    )
    console.print(table(columns, map(_cells, results["rows"]), words=2))


def _cells(row: dict[str, Any]) -> tuple[object, ...]:
    return (
        row["returns"], row["variant"], row["chunks"], f"{row['step_bytes'] / 1e6:,.1f}",
        "" if row["predicted_bytes"] is None else f"{row['predicted_bytes'] / 1e6:,.1f}", f"{row['bytes_ratio']:.2f}",
        f"{row['seconds']:.2f}", f"{row['time_ratio']:.2f}",
    )  # fmt: skip

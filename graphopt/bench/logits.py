"""`graphopt bench logits`: a causal language model's step with logits in chunks of tokens, beside eager and `torch.compile`.

The model has the shape of SmolLM2-135M (hidden size 576, vocabulary 49,152, tied embeddings) and random weights; what a step
allocates and how long it takes depends on shapes alone. A step is forward and backward of the model's own loss; it returns its
logits, as Hugging Face's models do, or its loss alone. Where it is installed, the package cut_cross_entropy (Wijmans et al., "Cut
Your Losses in Large-Vocabulary Language Models", ICLR 2025) is among the variants.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from graphopt.bench import steps
from graphopt.bench.step_models import Made, adapted, continued, network
from graphopt.bench.steps import COMPILED, Case, Ready, Row, Variant, compiled, eager, optimized
from graphopt.passes import LinearCrossEntropy

VOCABULARY = 49_152

SIZES = {
    "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1_536, "vocab_size": VOCABULARY,
    "tie_word_embeddings": True, "use_cache": False,
}  # fmt: skip
"""SmolLM2's shape."""


def with_adapters(model: nn.Module) -> nn.Module:
    """The model with adapters of rank 8 on queries and values, which alone are trained: the head is frozen."""
    return adapted(model, 8, ["q_proj", "v_proj"])


def described(results: dict[str, Any]) -> str:
    """The settings of a run, for the line above its table."""
    trained = "adapters of rank 8 are trained" if results["lora"] else "all is trained"
    return f"{results['tokens']:,} tokens, {results['labelled']:.0%} of them with a label, {trained}, forward and backward"


class LossAlone(nn.Module):
    """A model that returns its loss, so that nobody can read its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """The loss."""
        loss: Tensor = self.model(input_ids=input_ids, labels=labels).loss
        return loss


class CutLoss(LossAlone):
    """The model's loss by the package cut_cross_entropy; on a CPU in the form without its Triton kernels."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        whole: Any = getattr(model, "get_base_model", lambda: model)()
        self.decoder, self.head = whole.get_decoder(), whole.get_output_embeddings()

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """The loss."""
        from cut_cross_entropy import linear_cross_entropy

        hidden = self.decoder(input_ids=input_ids).last_hidden_state
        kind = "cce" if hidden.is_cuda else "torch_compile"
        loss: Tensor = linear_cross_entropy(hidden, self.head.weight, labels, shift=True, impl=kind)
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
    passes = [LinearCrossEntropy(chunks)]
    ours = Variant(optimized(passes=passes), None)
    variants = {"eager": Variant(eager, None), COMPILED: Variant(compiled, None), "graphopt": ours}
    loss_alone = dict(variants)
    variants["graphopt, outputs='loss'"] = Variant(optimized(passes=passes, outputs="loss"), None)
    if importlib.util.find_spec("cut_cross_entropy"):
        cut = Variant(lambda model, *_: torch.compile(CutLoss(model.get_submodule("model"))), None)
        loss_alone["torch.compile, cut_cross_entropy"] = cut

    def whole() -> Made:
        model = network("Llama", "ForCausalLM", num_hidden_layers=layers, **SIZES)
        return with_adapters(model) if lora else model, continued(samples, tokens // samples, VOCABULARY, labelled)

    def alone() -> Made:
        model, inputs = whole()
        return LossAlone(model), inputs

    cases = {
        "logits too": Case(whole, variants, keeps=True, more=_predicted),
        "the loss alone": Case(alone, loss_alone, more=_predicted),
    }
    return steps.run(cases, repeats, console, layers=layers, tokens=tokens, labelled=labelled, lora=lora)


def _predicted(kind: str, ready: Mapping[str, Ready]) -> Row:
    """In how many chunks a step's head is computed, and the bytes that were predicted for it."""
    opt = ready[kind].opt
    if opt is None:
        return {}
    chunks = opt.report.sections.get("linear_cross_entropy", {}).get("chunks", {})
    return {"chunks": max(chunks.values(), default=1), "predicted_bytes": ready[kind].predicted_bytes()}


def show(results: dict[str, Any], console: Console) -> None:
    """Print the table."""
    columns = {"chunks": steps.number("chunks", "d"), "predicted MB": steps.number("predicted_bytes", ",.1f", 1e-6)}
    steps.show_rows(results, f"{results['layers']} layers, {described(results)}", columns, console)

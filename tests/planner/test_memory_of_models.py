"""A limit on memory is kept to, and predicted, where a model is more than one stack of layers: by what is allocated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import BartConfig, BlipConfig, CLIPConfig, T5Config

import graphopt
from graphopt.analysis.step_memory import step_memory
from tests.long_forms import long
from tests.measure import peak_and_rest, planned_peak

SAMPLES, TOKENS, WORDS = 8, 64, 500


def _ids(tokens: int = TOKENS) -> torch.Tensor:
    return torch.randint(5, WORDS, (SAMPLES, tokens))


def _pair(kind: str) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A model of two towers or stacks, and a batch."""
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 32, "intermediate_size": 64}
    text = {"vocab_size": WORDS, "max_position_embeddings": 77, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, **heads}
    image = {"image_size": 32, "patch_size": 8, **heads}
    pixels = torch.randn(SAMPLES, 3, 32, 32)
    if kind == "bart":
        bart = BartConfig(vocab_size=WORDS, d_model=32, max_position_embeddings=256, dropout=0.0,
                          encoder_layers=1, encoder_attention_heads=2, encoder_ffn_dim=64,
                          decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=64)  # fmt: skip
        return transformers.BartForConditionalGeneration(bart), {"input_ids": _ids(), "labels": _ids(32)}
    if kind == "t5":
        t5 = T5Config(vocab_size=WORDS, d_model=32, d_kv=16, d_ff=64, num_layers=1, num_heads=2, dropout_rate=0.0,
                      decoder_start_token_id=0)  # fmt: skip
        return transformers.T5ForConditionalGeneration(t5), {"input_ids": _ids(), "labels": _ids(32)}
    if kind == "clip":
        clip = CLIPConfig(text_config=text, vision_config=image, projection_dim=32)
        mask = torch.ones(SAMPLES, TOKENS, dtype=torch.long)
        batch = {"input_ids": _ids(), "pixel_values": pixels, "attention_mask": mask, "return_loss": True}
        return transformers.CLIPModel(clip), batch
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "encoder_hidden_size": 32, "sep_token_id": 3}
    blip = BlipConfig(text_config={**text, **still}, vision_config=image, projection_dim=32, image_text_hidden_size=32)
    ids = _ids()
    return transformers.BlipForConditionalGeneration(blip), {"input_ids": ids, "pixel_values": pixels, "labels": ids.clone()}


class InParts(torch.nn.Module):
    """A loss and wide logits, with a line before them that breaks the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(16, 16), torch.nn.Linear(16, WORDS)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = torch.relu(self.first(x))
        torch._dynamo.graph_break()
        logits = self.second(hidden)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


@pytest.mark.parametrize(("kind", "part"), [("bart", 0.6), ("t5", 0.7), ("clip", 0.7), *long(("blip", 0.7))])
def test_a_limit_is_kept_to_and_predicted(kind: str, part: float) -> None:
    """What is handed out passes all later layers; masks that hide nothing are left out; some `reshape` copies.

    BART was 5 % over such a limit, and T5 predicted to take twice what it did.
    """
    torch.manual_seed(0)
    model, batch = _pair(kind)
    optimizer = torch.optim.AdamW(model.parameters())
    limit = int(part * planned_peak(model, batch, optimizer))
    opt = graphopt.optimize(model, batch, graphopt.Budget(memory=limit), optimizer=optimizer, backend="aot_eager")

    def step() -> None:
        opt(**batch)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(4):
        step()
    predicted = step_memory(opt.plan.rewrite(opt.graph)[0], "aot_eager", optimizer)
    measured = peak_and_rest(step)[0] + predicted.static_bytes  # tensors that are not trained have no state
    assert abs(measured / predicted.peak_bytes - 1) < 1e-3
    assert measured <= limit


def test_the_outputs_of_several_graphs_are_given_gradients_of_zeros() -> None:
    """As by torch.compile; a mixture of experts was 4 % over its limit, which left them out."""
    torch.manual_seed(0)
    model, batch = InParts(), {"x": torch.randn(256, 16), "labels": torch.randint(0, WORDS, (256,))}
    opt = graphopt.optimize(model, batch, backend="aot_eager")

    def step() -> None:
        opt(**batch)["loss"].backward()
        model.zero_grad()

    for _ in range(4):
        step()
    predicted = step_memory(opt.graph, "aot_eager", None)
    measured = peak_and_rest(step)[0] + predicted.static_bytes
    assert abs(measured / predicted.peak_bytes - 1) < 1e-3

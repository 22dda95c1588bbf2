"""Models of `graphopt bench memory`: small, with random weights, and with dropout where the family has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from graphopt.bench.step_models import Classified, Made, classified, continued, network, pictures

VOCABULARY = 2000
LENGTH = 128

SIZES: dict[str, Any] = {
    "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": VOCABULARY, "use_cache": False,
}  # fmt: skip


class _Residual(nn.Module):
    """Two convolutions with batch norm around a shortcut."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(outer)
        self.second = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(outer)
        self.shortcut = nn.Conv2d(inner, outer, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first_norm(self.first(x)))
        return torch.relu(self.second_norm(self.second(hidden)) + self.shortcut(x))


def _mlp(batch: int) -> Made:
    layers = (nn.Linear(256, 1024), nn.GELU(), nn.Dropout(0.1), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 10))
    return Classified(nn.Sequential(*layers)), {"x": torch.randn(batch, 256), "labels": torch.randint(0, 10, (batch,))}


def _cnn(batch: int) -> Made:
    network = nn.Sequential(
        nn.Conv2d(3, 32, 3, 1, 1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        _Residual(32, 64, 2), _Residual(64, 128, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip
    return Classified(network), {"x": torch.randn(batch, 3, 64, 64), "labels": torch.randint(0, 10, (batch,))}


def _bert(batch: int) -> Made:
    return network("Bert", "ForSequenceClassification", **SIZES, intermediate_size=1024), classified(batch, LENGTH, 2, VOCABULARY)


def _causal(family: str, task: str, batch: int, **sizes: Any) -> Made:
    inputs = continued(batch, LENGTH, VOCABULARY)
    return network(family, task, **sizes), {**inputs, "attention_mask": torch.ones_like(inputs["input_ids"])}


def _gpt2(batch: int) -> Made:
    sizes = {"n_embd": 256, "n_layer": 4, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": LENGTH, "use_cache": False}
    return _causal("GPT2", "LMHeadModel", batch, **sizes, bos_token_id=1, eos_token_id=2)


def _opt(batch: int) -> Made:
    sizes = {"ffn_dim": 1024, "max_position_embeddings": LENGTH, "word_embed_proj_dim": 256, "layerdrop": 0.0}
    return _causal("OPT", "ForCausalLM", batch, **SIZES, **sizes)


def _llama(batch: int) -> Made:
    return _causal("Llama", "ForCausalLM", batch, **SIZES, intermediate_size=688, num_key_value_heads=2)


def _t5(batch: int) -> Made:
    sizes = {"d_model": 256, "d_kv": 64, "d_ff": 512, "num_layers": 3, "num_heads": 4, "vocab_size": VOCABULARY}
    model = network("T5", "ForConditionalGeneration", **sizes, decoder_start_token_id=0, use_cache=False)
    tokens, labels = (torch.randint(5, VOCABULARY, (batch, LENGTH)) for _ in range(2))
    return model, {"input_ids": tokens, "labels": labels}


def _vit(batch: int) -> Made:
    sizes = {"hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 3, "patch_size": 8}
    return network("ViT", "ForImageClassification", **sizes, image_size=64, num_labels=10), pictures(batch, 10, 64)


MODELS: dict[str, Callable[[int], Made]] = {
    "mlp": _mlp, "cnn": _cnn, "bert": _bert, "gpt2": _gpt2, "opt": _opt, "llama": _llama, "t5": _t5, "vit": _vit,
}  # fmt: skip

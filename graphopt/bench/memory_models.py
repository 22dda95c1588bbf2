"""Models of `graphopt bench memory`: small, with random weights, and with dropout where the family has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY = 2000
LENGTH = 128

Made = tuple[nn.Module, dict[str, Tensor]]


class _Classifier(nn.Module):
    """Any network with a cross-entropy on top."""

    def __init__(self, network: nn.Module) -> None:
        from transformers.modeling_outputs import SequenceClassifierOutput

        super().__init__()
        self.network = network
        self.output = SequenceClassifierOutput

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        logits = self.network(x)
        return self.output(loss=nn.functional.cross_entropy(logits, labels), logits=logits)


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
    network = nn.Sequential(
        nn.Linear(256, 1024), nn.GELU(), nn.Dropout(0.1), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 10)
    )
    return _Classifier(network), {"x": torch.randn(batch, 256), "labels": torch.randint(0, 10, (batch,))}


def _cnn(batch: int) -> Made:
    network = nn.Sequential(
        nn.Conv2d(3, 32, 3, 1, 1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        _Residual(32, 64, 2), _Residual(64, 128, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip
    return _Classifier(network), {"x": torch.randn(batch, 3, 64, 64), "labels": torch.randint(0, 10, (batch,))}


def _tokens(batch: int) -> Tensor:
    return torch.randint(5, VOCABULARY, (batch, LENGTH))


def _bert(batch: int) -> Made:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        hidden_size=256, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=4, vocab_size=VOCABULARY
    )
    ids = _tokens(batch)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.randint(0, 2, (batch,))}
    return BertForSequenceClassification(config), inputs


def _causal(model: nn.Module, batch: int) -> Made:
    model.config.use_cache = False  # type: ignore[union-attr]
    ids = _tokens(batch)
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def _gpt2(batch: int) -> Made:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_embd=256, n_layer=4, n_head=4, vocab_size=VOCABULARY, n_positions=LENGTH, bos_token_id=1, eos_token_id=2
    )
    return _causal(GPT2LMHeadModel(config), batch)


def _opt(batch: int) -> Made:
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(
        hidden_size=256, ffn_dim=1024, num_hidden_layers=4, num_attention_heads=4, vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH, word_embed_proj_dim=256, layerdrop=0.0,
    )  # fmt: skip
    return _causal(OPTForCausalLM(config), batch)


def _llama(batch: int) -> Made:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=256, intermediate_size=688, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=VOCABULARY,
    )  # fmt: skip
    return _causal(LlamaForCausalLM(config), batch)


def _t5(batch: int) -> Made:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(d_model=256, d_kv=64, d_ff=512, num_layers=3, num_heads=4, vocab_size=VOCABULARY)
    config.decoder_start_token_id = 0
    model = T5ForConditionalGeneration(config)
    model.config.use_cache = False
    return model, {"input_ids": _tokens(batch), "labels": _tokens(batch)}


def _vit(batch: int) -> Made:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=192, intermediate_size=768, num_hidden_layers=4, num_attention_heads=3, image_size=64, patch_size=8,
    )  # fmt: skip
    config.num_labels = 10
    inputs = {"pixel_values": torch.randn(batch, 3, 64, 64), "labels": torch.randint(0, 10, (batch,))}
    return ViTForImageClassification(config), inputs


MODELS: dict[str, Callable[[int], Made]] = {
    "mlp": _mlp, "cnn": _cnn, "bert": _bert, "gpt2": _gpt2, "opt": _opt, "llama": _llama, "t5": _t5, "vit": _vit,
}  # fmt: skip

"""Small models with random weights and inputs for them: `make(name, batch)`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from graphopt.calls import as_call
from graphopt.capture import capture_to_run
from graphopt.graph import TrainingGraph

VOCABULARY = 97


class MLP(nn.Module):
    """Three linear layers and a loss."""

    def __init__(self, width: int = 8, bias: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(5, width, bias=bias)
        self.second = nn.Linear(width, width, bias=bias)
        self.third = nn.Linear(width, 3, bias=bias)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        hidden = torch.relu(self.second(torch.relu(self.first(x))))
        return nn.functional.cross_entropy(self.third(hidden), labels)


class ConvNet(nn.Module):
    """Convolutions with batch norm, which changes its buffers in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 12, 3, padding=1, groups=2, bias=False), nn.BatchNorm2d(12), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        )  # fmt: skip
        self.head = nn.Linear(12, 4)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.features(x).flatten(1))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Recurrent(nn.Module):
    """An LSTM over a short sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 6)
        self.lstm = nn.LSTM(6, 10, num_layers=2, batch_first=True)
        self.head = nn.Linear(10, 3)

    def forward(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        states, _ = self.lstm(self.embed(tokens))
        logits = self.head(states[:, -1])
        return nn.functional.cross_entropy(logits, labels), logits


class Adapted(nn.Module):
    """One layer with an adapter, below which something is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.below, self.base = nn.Linear(4, 8), nn.Linear(8, 6)
        self.base.requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(8, 2)), nn.Parameter(torch.randn(2, 6))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.below(x))
        return (self.base(x) + x @ self.down @ self.up).square().sum()


def without_dropout(model: nn.Module) -> nn.Module:
    """Every dropout probability set to 0, so that two runs can be compared."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("dropout", "attention_dropout", "hidden_dropout", "layerdrop"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


def tokens(batch: int, length: int = 12) -> Tensor:
    """(batch, length) token ids."""
    return torch.randint(3, VOCABULARY, (batch, length))


def _causal(model: nn.Module, batch: int) -> tuple[nn.Module, dict[str, Tensor]]:
    ids = tokens(batch)
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def _llama(batch: int, layers: int = 1) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
                         num_key_value_heads=2, vocab_size=VOCABULARY, pad_token_id=0)  # fmt: skip
    return _causal(LlamaForCausalLM(config), batch)


def _opt(batch: int) -> Any:
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(hidden_size=32, ffn_dim=48, num_hidden_layers=1, num_attention_heads=4, vocab_size=VOCABULARY,
                       word_embed_proj_dim=24, max_position_embeddings=64)  # fmt: skip
    return _causal(OPTForCausalLM(config), batch)


def _gpt2(batch: int, layers: int = 1) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_embd=32, n_layer=layers, n_head=4, vocab_size=VOCABULARY, n_positions=64, bos_token_id=1, eos_token_id=2
    )
    return _causal(GPT2LMHeadModel(config), batch)


def _bloom(batch: int) -> Any:
    from transformers import BloomConfig, BloomForCausalLM

    return _causal(BloomForCausalLM(BloomConfig(hidden_size=32, n_layer=1, n_head=4, vocab_size=VOCABULARY)), batch)


def _bert(batch: int, layers: int = 2) -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    # without a type of problem the first forward would write it
    config = BertConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
                        vocab_size=VOCABULARY, problem_type="single_label_classification")  # fmt: skip
    ids = tokens(batch)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.randint(0, 2, (batch,))}
    return BertForSequenceClassification(config), inputs


def _t5(batch: int, tied: bool) -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(d_model=32, d_ff=48, num_layers=1, num_heads=4, d_kv=8, vocab_size=VOCABULARY,
                      decoder_start_token_id=0, tie_word_embeddings=tied)  # fmt: skip
    model = T5ForConditionalGeneration(config)
    if not tied:
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    return model, {"input_ids": tokens(batch), "labels": tokens(batch, 7)}


def _vit(batch: int, layers: int = 1) -> Any:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4, image_size=16,
                       patch_size=8, num_labels=3)  # fmt: skip
    return ViTForImageClassification(config), {
        "pixel_values": torch.randn(batch, 3, 16, 16), "labels": torch.randint(0, 3, (batch,))
    }  # fmt: skip


def _lora(batch: int, layers: int = 1) -> Any:
    from peft import LoraConfig, get_peft_model

    model, inputs = _llama(batch, layers)
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model, inputs


def _conv(batch: int) -> Any:
    return ConvNet(), (torch.randn(batch, 3, 10, 10), torch.randint(0, 4, (batch,)))


def _lstm(batch: int) -> Any:
    return Recurrent(), (tokens(batch, 3), torch.randint(0, 3, (batch,)))


def _mlp(batch: int) -> Any:
    return MLP(), (torch.randn(batch, 5), torch.randint(0, 3, (batch,)))


FACTORIES: dict[str, Callable[..., Any]] = {
    "mlp": _mlp,
    "llama": _llama,
    "opt": _opt,
    "gpt2": _gpt2,
    "bloom": _bloom,
    "bert": _bert,
    "t5-tied": lambda batch: _t5(batch, tied=True),
    "t5-untied": lambda batch: _t5(batch, tied=False),
    "vit": _vit,
    "cnn": _conv,
    "lstm": _lstm,
    "lora": _lora,
}


def make(
    name: str, batch: int = 4, dtype: torch.dtype = torch.float32, dropout: bool = False, **options: int
) -> tuple[nn.Module, Any]:
    """A model in training mode and a batch for it, the same for every call; `options` are its factory's."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, inputs = FACTORIES[name](batch, **options)
    if not dropout:
        without_dropout(model)
    cast = lambda t: t.to(dtype) if t.is_floating_point() else t  # noqa: E731
    inputs = {k: cast(v) for k, v in inputs.items()} if isinstance(inputs, dict) else tuple(cast(v) for v in inputs)
    return model.to(dtype).train(), inputs


@functools.cache
def captured(
    name: str, batch: int = 4, dtype: torch.dtype = torch.float32, symbolic: bool = True, **options: int
) -> TrainingGraph:
    """The graph of `make(name, batch, dtype, **options)`, traced once per process: nothing may change it."""
    model, inputs = make(name, batch, dtype, **options)
    return capture_to_run(model, *as_call(inputs), symbolic=symbolic)


def in_both_precisions(name: str, batch: int = 4, **options: int) -> dict[torch.dtype, TrainingGraph]:
    """For `check_pass(captured=...)`: a graph for one batch alone, as training has, and one for any, as samplers have."""
    precise, single = torch.float64, torch.float32
    return {precise: captured(name, batch, precise, symbolic=False, **options), single: captured(name, batch, single, **options)}


def call(model: nn.Module, inputs: Any) -> Any:
    """`model` on a dict or tuple of inputs."""
    return model(**inputs) if isinstance(inputs, dict) else model(*inputs)


def in_one_block(model: nn.Module) -> nn.Module:
    """A transformer cut to the first of its blocks, where more of them add time and nothing else."""
    for name, child in list(model.named_children()):
        if isinstance(child, nn.ModuleList):
            setattr(model, name, child[:1])
        else:
            in_one_block(child)
    return model


def loss_of(output: Any) -> Tensor:
    """The scalar loss of any zoo model's output."""
    if isinstance(output, Tensor):
        return output
    return output["loss"] if isinstance(output, dict) else output[0]


def rows(inputs: Any, count: int) -> Any:
    """The first `count` samples of a batch."""
    if isinstance(inputs, dict):
        return {k: v[:count] for k, v in inputs.items()}
    return tuple(v[:count] for v in inputs)

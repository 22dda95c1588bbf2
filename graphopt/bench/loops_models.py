"""Tiny models, a tokenizer and data for `graphopt bench loops`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from graphopt.bench.loops_run import Loop
from graphopt.bench.step_models import network

WORDS = 48
"""Of the tiny vocabularies."""

SIZES: dict[str, Any] = {
    "vocab_size": WORDS + 4, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
    "max_position_embeddings": 64,
}  # fmt: skip

ADAM: dict[str, Any] = {"lr": 1e-2, "eps": 1e-3}
"""Adam divides by a gradient's size: without a larger epsilon it would make steps of rounding errors."""

ARGUMENTS: dict[str, Any] = {
    "use_cpu": True, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "num_train_epochs": 2,
    "learning_rate": ADAM["lr"], "adam_epsilon": ADAM["eps"], "lr_scheduler_type": "constant", "logging_steps": 1,
    "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
}  # fmt: skip
"""Of a Trainer of transformers."""


def bert() -> Any:
    """A tiny classifier."""
    return network("Bert", "ForSequenceClassification", **SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


def llama() -> Any:
    """A tiny causal model."""
    return network("Llama", "ForCausalLM", **SIZES, pad_token_id=0, bos_token_id=1, eos_token_id=2)


def tokenizer() -> Any:
    """A word is a token."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    names = ["[PAD]", "[BOS]", "[EOS]", "[UNK]", *(f"w{i}" for i in range(WORDS))]
    words = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "[PAD]", "bos_token": "[BOS]", "eos_token": "[EOS]", "unk_token": "[UNK]"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=64, **special)


def text(seed: int, shortest: int = 5, longest: int = 12) -> str:
    """Some words."""
    generator = torch.Generator().manual_seed(seed)
    length = int(torch.randint(shortest, longest + 1, (1,), generator=generator))
    return " ".join(f"w{i}" for i in torch.randint(WORDS, (length,), generator=generator).tolist())


def rows(count: int, length: int = 8, causal: bool = False) -> Any:
    """Tokens with labels."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(4, WORDS + 4, (count, length), generator=generator)
    return [{"input_ids": ids, "labels": ids if causal else ids[0] % 2} for ids in tokens]


class Mlp(nn.Module):
    """Linear layers; returns a loss."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8 if i == 0 else width, width) for i in range(4))
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """The loss."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return nn.functional.cross_entropy(self.head(x), labels)


def points(count: int = 30) -> Any:
    """For `Mlp`; the last batch of 4 is a smaller one."""
    generator = torch.Generator().manual_seed(1)
    return [{"x": x, "labels": (x[0] > 0).long() + (x[1] > 0).long()} for x in torch.randn(count, 8, generator=generator)]


def reloaded(loop: Loop, model: Any) -> None:
    """Check that a model saved in the folder `saved` is loaded again with its config and weights."""
    folder = loop.folder / "saved"
    loop.check((folder / "config.json").is_file(), "the saved model has no config.json")
    if not (folder / "config.json").is_file():
        model.config.save_pretrained(folder)  # so that the rest can be looked at
    found = type(model).from_pretrained(folder)
    same = all(torch.equal(p, q) for p, q in zip(model.state_dict().values(), found.state_dict().values(), strict=True))
    loop.check(same, "the saved model has other weights")

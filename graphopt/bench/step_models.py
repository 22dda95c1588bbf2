"""Models of transformers with random weights, and batches for them, of which the benchmarks of single steps make their cases."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

Made = tuple[nn.Module, dict[str, Tensor]]

IGNORED = -100
"""The label of a token that the loss leaves out."""


class Classified(nn.Module):
    """A network with its loss."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """The loss."""
        return nn.functional.cross_entropy(self.network(x), labels)


def network(family: str, task: str, **sizes: Any) -> nn.Module:
    """A model in training mode.

    Args:
        family, task: as in the names of its classes: "Bert" and "ForMaskedLM".
        sizes: of its configuration.
    """
    import transformers

    config = getattr(transformers, f"{family}Config")(**sizes)
    model: nn.Module = getattr(transformers, f"{family}{task}")(config)
    return model.train()


def adapted(model: nn.Module, rank: int, targets: list[str], whole: bool = True, **options: Any) -> nn.Module:
    """A model with LoRA on some layers, the adapters of which alone are trained.

    Args:
        whole: adapters of layers in half precision are in float32.
        options: further ones of `peft.LoraConfig`.
    """
    from peft import LoraConfig, get_peft_model

    found: nn.Module = get_peft_model(model, LoraConfig(r=rank, target_modules=targets, **options), autocast_adapter_dtype=whole)
    return found.train()


def classified(samples: int, tokens: int, classes: int, vocabulary: int = 30_000) -> dict[str, Tensor]:
    """Texts without padding, with a label each."""
    ids = torch.randint(999, vocabulary, (samples, tokens))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.randint(0, classes, (samples,))}


def continued(samples: int, tokens: int, vocabulary: int, labelled: float = 1.0) -> dict[str, Tensor]:
    """Texts of which a part of the tokens, the last, have labels: every token is predicted from those before."""
    return labelled_from(torch.randint(0, vocabulary, (samples, tokens)), labelled)


def labelled_from(ids: Tensor, labelled: float) -> dict[str, Tensor]:
    """Tokens (samples, tokens) of which a part of each row, its end, has labels."""
    labels = ids.clone()
    labels[:, : round((1 - labelled) * ids.shape[1])] = IGNORED
    return {"input_ids": ids, "labels": labels}


def pictures(samples: int, classes: int = 2, size: int = 224) -> dict[str, Tensor]:
    """Pictures with a label each."""
    return {"pixel_values": torch.randn(samples, 3, size, size), "labels": torch.randint(0, classes, (samples,))}

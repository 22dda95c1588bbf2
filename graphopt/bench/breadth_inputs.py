"""How `graphopt bench breadth` builds tiny models of transformers, and the batches that it gives them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from graphopt.bench.breadth_run import Made

VOCABULARY = 100
LENGTH = 16
BATCH = 2

Inputs = Callable[[Any], dict[str, Any]]
"""From a configuration to a batch."""

SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
"""Of encoders and decoders whose configuration has the usual names."""

SEQUENCE = {
    "vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": None,
}  # fmt: skip
"""Of BART and those made after it."""

T5 = {
    "vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4,
    "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
"""Of T5 and those made after it."""

PYRAMID = {"image_size": 32, "num_labels": 5}
"""Of networks for pictures whose stages have sizes of their own."""

VISION = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "image_size": 32,
    "patch_size": 8, "num_labels": 5,
}  # fmt: skip
"""Of vision transformers."""

SPEECH = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "conv_dim": (16, 16, 16),
    "conv_kernel": (8, 3, 3), "conv_stride": (4, 2, 2), "num_feat_extract_layers": 3, "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4, "vocab_size": 20, "apply_spec_augment": False, "mask_time_prob": 0.0,
    "classifier_proj_size": 16, "pad_token_id": 0, "ctc_zero_infinity": True, "num_labels": 5,
}  # fmt: skip
"""Of wav2vec 2.0 and those made after it."""


FEW_HEADS = {"num_key_value_heads": 2}
"""Of keys and values, beside `SIZES`."""


@dataclass(frozen=True)
class Architecture:
    """A model of transformers.

    Attributes:
        family, task: as in the names of its classes: "Bert" and "ForMaskedLM".
        inputs: makes a batch.
        sizes: of the configuration; options that a configuration does not have are kept as attributes that nobody reads.
        parts: configurations inside the configuration, by the name of the option.
        config: the family of its configuration, where that is another one.
    """

    family: str
    task: str
    inputs: Inputs
    sizes: dict[str, Any]
    parts: dict[str, tuple[str, dict[str, Any]]] = field(default_factory=dict)
    config: str = ""

    def make(self) -> Made:
        """The model with random weights, and a batch."""
        import transformers

        parts = {name: getattr(transformers, kind)(**options) for name, (kind, options) in self.parts.items()}
        config = getattr(transformers, f"{self.config or self.family}Config")(**self.sizes, **parts)
        without_dropout(config)
        model = getattr(transformers, self.family + self.task)(config)
        return model, self.inputs(config)


def without_dropout(config: Any) -> None:
    """Set every probability of dropping something to zero, in a configuration and those inside it."""
    for name, value in list(vars(config).items()):
        if isinstance(value, float) and "drop" in name:
            setattr(config, name, 0.0)
        elif hasattr(value, "to_dict"):
            without_dropout(value)


def random_tokens(length: int = LENGTH, batch: int = BATCH, vocabulary: int = VOCABULARY) -> Tensor:
    """Without the special tokens."""
    return torch.randint(5, vocabulary, (batch, length))


def padded(length: int = LENGTH) -> Tensor:
    """A mask whose first row has padding."""
    mask = torch.ones(BATCH, length, dtype=torch.long)
    mask[0, -length // 4 :] = 0
    return mask


def classify(config: Any) -> dict[str, Tensor]:
    """A label per row."""
    return {"input_ids": random_tokens(), "attention_mask": padded(), "labels": torch.randint(0, 2, (BATCH,))}


def classify_unmasked(config: Any) -> dict[str, Tensor]:
    """A label per row, and no mask."""
    return {"input_ids": random_tokens(), "labels": torch.randint(0, 2, (BATCH,))}


def label_tokens(config: Any) -> dict[str, Tensor]:
    """A label per token."""
    return {"input_ids": random_tokens(), "attention_mask": padded(), "labels": torch.randint(0, 2, (BATCH, LENGTH))}


def masked(config: Any) -> dict[str, Tensor]:
    """Labels for a few tokens."""
    ids = random_tokens()
    labels = torch.where(torch.rand(ids.shape) < 0.3, ids, -100)
    labels[:, 0] = ids[:, 0]
    return {"input_ids": ids, "attention_mask": padded(), "labels": labels}


def answer(config: Any) -> dict[str, Tensor]:
    """Where an answer starts and ends."""
    return {
        "input_ids": random_tokens(), "attention_mask": padded(), "start_positions": torch.tensor([2, 5]),
        "end_positions": torch.tensor([4, 9]),
    }  # fmt: skip


def choose(config: Any) -> dict[str, Tensor]:
    """One of three choices per row."""
    ids = torch.randint(5, VOCABULARY, (BATCH, 3, LENGTH))
    return {"input_ids": ids, "labels": torch.tensor([0, 2])}


def continue_text(config: Any) -> dict[str, Tensor]:
    """Every token is predicted from those before."""
    ids = random_tokens()
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def continue_unmasked(config: Any) -> dict[str, Tensor]:
    """Every token is predicted, and there is no mask."""
    ids = random_tokens()
    return {"input_ids": ids, "labels": ids.clone()}


def continue_padded(config: Any) -> dict[str, Tensor]:
    """Every token is predicted; one row has padding."""
    batch = continue_text(config)
    mask = padded()
    return {**batch, "attention_mask": mask, "labels": batch["labels"].masked_fill(mask == 0, -100)}


def continue_cached(config: Any) -> dict[str, Any]:
    """With `use_cache=True` in the call."""
    return {**continue_text(config), "use_cache": True}


def translate(config: Any) -> dict[str, Any]:
    """From tokens to tokens."""
    return {"input_ids": random_tokens(), "attention_mask": padded(), "labels": random_tokens(8)}


def with_boxes(config: Any) -> dict[str, Tensor]:
    """Tokens with places on a page, and a label per token."""
    corners = torch.randint(0, 30, (BATCH, LENGTH, 2))
    return {**label_tokens(config), "bbox": torch.cat([corners, corners + torch.randint(1, 30, (BATCH, LENGTH, 2))], -1)}


def pictures(config: Any) -> dict[str, Tensor]:
    """A label per picture."""
    size = getattr(config, "image_size", 32)
    size = size if isinstance(size, int) else 32
    return {"pixel_values": torch.randn(BATCH, 3, size, size), "labels": torch.randint(0, 2, (BATCH,))}


def segments(config: Any) -> dict[str, Tensor]:
    """A label per pixel."""
    return {"pixel_values": torch.randn(BATCH, 3, 32, 32), "labels": torch.randint(0, 2, (BATCH, 32, 32))}


def mask_patches(config: Any) -> dict[str, Tensor]:
    """A few patches are masked."""
    count = (config.image_size // config.patch_size) ** 2
    return {
        "pixel_values": torch.randn(BATCH, 3, config.image_size, config.image_size),
        "bool_masked_pos": torch.arange(count).expand(BATCH, count) % 3 == 0,
    }


def pairs(config: Any) -> dict[str, Any]:
    """Texts and pictures that belong together."""
    ids = random_tokens()
    ids[:, -1] = VOCABULARY - 1  # ends a text
    return {"input_ids": ids, "pixel_values": torch.randn(BATCH, 3, 32, 32), "return_loss": True}


def boxes(config: Any) -> dict[str, Any]:
    """Pictures with things in them."""
    things = [
        {"class_labels": torch.tensor([1, 2]), "boxes": torch.tensor([[0.3, 0.3, 0.2, 0.2], [0.6, 0.5, 0.3, 0.4]])},
        {"class_labels": torch.tensor([0]), "boxes": torch.tensor([[0.5, 0.5, 0.5, 0.4]])},
    ]
    return {"pixel_values": torch.randn(BATCH, 3, 64, 64), "labels": things}


def transcribe(config: Any) -> dict[str, Tensor]:
    """Waves and a text."""
    return {"input_values": torch.randn(BATCH, 1600), "labels": torch.randint(1, 20, (BATCH, 6))}


def transcribe_padded(config: Any) -> dict[str, Tensor]:
    """Waves of different lengths and a text."""
    mask = torch.ones(BATCH, 1600, dtype=torch.long)
    mask[0, 1200:] = 0
    return {**transcribe(config), "attention_mask": mask}


def recognise(config: Any) -> dict[str, Tensor]:
    """Waves and a label."""
    return {"input_values": torch.randn(BATCH, 1600), "labels": torch.randint(0, 2, (BATCH,))}


def spectra(config: Any) -> dict[str, Tensor]:
    """Spectra and a text."""
    return {"input_features": torch.randn(BATCH, 16, 64), "labels": random_tokens(8)}


def spectra_labels(config: Any) -> dict[str, Tensor]:
    """Spectra and a label."""
    return {"input_features": torch.randn(BATCH, 16, 64), "labels": torch.randint(0, 2, (BATCH,))}


def sounds(config: Any) -> dict[str, Tensor]:
    """Spectra as pictures, and a label."""
    return {"input_values": torch.randn(BATCH, 64, 16), "labels": torch.randint(0, 2, (BATCH,))}


def picture_and_text(config: Any) -> dict[str, Tensor]:
    """A picture of 16 patches in the middle of a text, as Qwen2-VL takes it."""
    ids = torch.randint(5, 90, (1, 24))
    ids[0, 3], ids[0, 4:8], ids[0, 8] = config.vision_start_token_id, config.image_token_id, config.vision_end_token_id
    kinds = (ids == config.image_token_id).long()
    return {
        "input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone(), "mm_token_type_ids": kinds,
        "pixel_values": torch.randn(16, 3 * 2 * 4 * 4), "image_grid_thw": torch.tensor([[1, 4, 4]]),
    }  # fmt: skip


def picture_tokens(config: Any) -> dict[str, Tensor]:
    """A picture of 16 patches at the start of a text, as LLaVA takes it."""
    ids = random_tokens(24)
    ids[:, 1:17] = config.image_token_id
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": ids.clone(),
        "pixel_values": torch.randn(BATCH, 3, 32, 32),
    }


def series(config: Any) -> dict[str, Tensor]:
    """Past and future of a series."""
    return {"past_values": torch.randn(BATCH, 32, 2), "future_values": torch.randn(BATCH, 8, 2)}


def text(family: str, task: str, inputs: Inputs, **sizes: Any) -> Architecture:
    """One with the usual sizes."""
    return Architecture(family, task, inputs, {**SIZES, **sizes})


def sequences(family: str, task: str, inputs: Inputs = translate, **sizes: Any) -> Architecture:
    """One like BART."""
    return Architecture(family, task, inputs, {**SEQUENCE, **sizes})


def vision(family: str, task: str, inputs: Inputs = pictures, **sizes: Any) -> Architecture:
    """One like ViT."""
    return Architecture(family, task, inputs, {**VISION, **sizes})


def pyramid(family: str, task: str, inputs: Inputs = pictures, **sizes: Any) -> Architecture:
    """A network of stages."""
    return Architecture(family, task, inputs, {**PYRAMID, **sizes})


def speech(family: str, task: str, inputs: Inputs, **sizes: Any) -> Architecture:
    """One like wav2vec 2.0."""
    return Architecture(family, task, inputs, {**SPEECH, **sizes})

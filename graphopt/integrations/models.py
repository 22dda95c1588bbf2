"""A model and example inputs from what a user names on the command line; nothing is ever downloaded."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import os
import sys
import textwrap
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from graphopt import compat
from graphopt.errors import GraphoptError, InputError


def load(name: str, batch: int, length: int | None, weights: bool, random_weights: bool = False) -> tuple[nn.Module, Any]:
    """Resolve `name` to a model and one batch of inputs.

    Args:
        name: a Hugging Face folder, a config file, or `package.module:factory`; a factory returns a model and its inputs.
        batch, length: samples, and tokens per sample for text models, `LENGTH` by default; a factory chooses its own.
        weights: False builds the model without memory for its weights.
        random_weights: make them up where they are wanted and a Hugging Face folder or file has none.
    Raises:
        InputError: says what is wrong with `name`.
    """
    path = Path(name)
    if path.exists():
        return _from_hugging_face(path, batch, length, weights, random_weights)
    if ":" in name:
        return _from_factory(name, weights)
    raise InputError(f"{name!r} is neither a folder, a config file, nor package.module:factory.")


def _from_factory(name: str, weights: bool) -> tuple[nn.Module, Any]:
    module_name, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in [*module_name.split("."), attribute]):
        raise InputError(f"{name!r} is not of the form package.module:factory.")
    folder = os.getcwd()
    if sys.path[:1] not in ([""], [folder]):
        sys.path.insert(0, folder)  # as `python -m` has it, and the installed command has not; functions can import, too
    try:
        factory = getattr(importlib.import_module(module_name), attribute)
    except (Exception, SystemExit) as error:  # whatever the module does when it is imported
        raise InputError(f"cannot import {name!r}: {type(error).__name__}: {error}") from error
    try:
        made = factory() if callable(factory) else factory
    except GraphoptError:
        raise
    except (Exception, SystemExit) as error:
        raise InputError(f"{name} failed with {type(error).__name__}: {error}") from error
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise InputError(f"{name} must return (model, example_inputs), not {type(made).__name__}.")
    return made


def _from_hugging_face(
    path: Path, batch: int, length: int | None, weights: bool, random_weights: bool
) -> tuple[nn.Module, dict[str, Tensor]]:
    try:
        import transformers
    except ImportError as error:
        raise InputError("loading Hugging Face models needs transformers: pip install 'graphopt[transformers]'") from error
    os.environ["HF_HUB_OFFLINE"] = "1"
    quiet_transformers()
    file = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(values, dict) or "model_type" not in values:
            raise InputError(f"{file} is not a Hugging Face config: it names no model_type.")
        config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    except FileNotFoundError as error:
        raise InputError(f"{path} has no config.json.") from error
    except InputError:
        raise
    except Exception as error:  # whatever the library says of its values
        raise InputError(f"{file} is not a Hugging Face config: {_in_one_line(error)}") from error
    model_class = _model_class(transformers, config)
    saved = (path.is_dir() and any(path.glob("*.safetensors"))) or any(path.glob("*.bin"))
    try:
        if weights and saved:
            return model_class.from_pretrained(path, local_files_only=True), _inputs(model_class, config, batch, length)
        if weights and not random_weights:
            with compat.new_fake_mode():
                size = sum(p.numel() * p.element_size() for p in model_class._from_config(config).parameters())
            raise InputError(
                f"{path} has no weights, and this runs a step: name a folder that has them, or make {size / 2**30:.2f} GiB of "
                "random ones with --random-weights."
            )
        with contextlib.nullcontext() if weights else compat.new_fake_mode():
            model = model_class._from_config(config)
            return model.train(), _inputs(model_class, config, batch, length)
    except InputError:
        raise
    except Exception as error:  # the same
        raise InputError(f"cannot build {model_class.__name__} from {file}: {_in_one_line(error)}") from error


def _in_one_line(error: Exception) -> str:
    """Type and text of an error of a library, which can be a list of all models that it knows."""
    return f"{type(error).__name__}: {textwrap.shorten(str(error), 300, placeholder=' ...')}"


def _model_class(transformers: Any, config: Any) -> Any:
    for name in config.architectures or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    if config.architectures:
        raise InputError(
            f"transformers {transformers.__version__} has no {config.architectures[0]}, which the config names under "
            "'architectures': name one that it has, or write a factory that returns (model, inputs)."
        )
    for mapping in (transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.MODEL_MAPPING):
        if type(config) in mapping:
            return mapping[type(config)]
    raise InputError(f"transformers has no model class for a {config.model_type!r} config.")


def quiet_transformers() -> None:
    """Keep the library's load reports and progress bars off the terminal."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


LENGTH = 512
"""Tokens per sample where none are asked for, or as many as the model has positions."""

_LABEL_PER_SAMPLE = ("ForSequenceClassification", "ForImageClassification")
_LABEL_PER_TOKEN = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForMaskedLM", "ForTokenClassification")


def _inputs(model_class: Any, config: Any, batch: int, length: int | None) -> dict[str, Tensor]:
    """Random inputs of the right shapes, with labels where the model takes them."""
    accepted = inspect.signature(model_class.forward).parameters
    text = getattr(config, "text_config", None) or config
    limit = getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None)
    limit = limit if isinstance(limit, int) and limit > 0 else None
    if length is None:
        length = min(LENGTH, limit or LENGTH)
    elif limit is not None and length > limit:
        raise InputError(f"length={length}: the config has {limit} positions. Ask for at most so many, or raise it there.")
    inputs: dict[str, Tensor] = {}
    if "input_ids" in accepted:
        inputs["input_ids"] = torch.randint(0, text.vocab_size, (batch, length))
        if "attention_mask" in accepted:
            inputs["attention_mask"] = torch.ones((batch, length), dtype=torch.long)
    elif "pixel_values" in accepted:
        size = getattr(config, "image_size", None) or 224  # convolutions take any
        size = size if isinstance(size, int) else size[0]
        inputs["pixel_values"] = torch.randn(batch, getattr(config, "num_channels", 3), size, size)
    else:
        raise InputError(f"{model_class.__name__} takes neither text nor images: write a factory that returns (model, inputs).")
    if "labels" in accepted:
        if model_class.__name__.endswith(_LABEL_PER_SAMPLE):
            inputs["labels"] = _label_per_sample(config, batch)
        elif model_class.__name__.endswith(_LABEL_PER_TOKEN):
            inputs["labels"] = torch.zeros((batch, length), dtype=torch.long)
    return inputs


def _label_per_sample(config: Any, batch: int) -> Tensor:
    """A class, or a value for each label where the config's kind of problem has them."""
    kind, number = config.problem_type, config.num_labels
    if kind == "multi_label_classification" or (kind == "regression" and number > 1):
        return torch.zeros(batch, number)
    return torch.zeros(batch, dtype=torch.long)

"""Loading the state of a torch optimizer: all of it or nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from graphopt.errors import InputError


def load_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """`optimizer.load_state_dict(state)`; options that `state` lacks, as one of another version of torch may, stay as they are.

    Raises:
        InputError: the state is not one of this optimizer; it is as it was then.
    """
    kept = optimizer.state, optimizer.param_groups
    try:
        if len(state["param_groups"]) != len(kept[1]):
            raise ValueError(f"{len(state['param_groups'])} parameter groups, and not {len(kept[1])}")
        groups = [_options(saved, group) for saved, group in zip(state["param_groups"], kept[1], strict=True)]
        _check_entries(optimizer, state)
        optimizer.load_state_dict({**state, "param_groups": groups})
    except InputError:
        raise
    except Exception as error:  # whatever an optimizer of the user's own raises, it has not been loaded
        optimizer.state, optimizer.param_groups = kept
        raise InputError(
            f"it holds no state of this {type(optimizer).__name__} ({type(error).__name__}: {error}). Make the optimizer as it "
            "was when the state was saved."
        ) from error


@contextlib.contextmanager
def put_back(optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
    """Leave an optimizer as it was if an error ends what is inside: it was not loaded on another rank."""
    kept = [(o, o.state, o.param_groups) for o in (optimizer, getattr(optimizer, "inner", None)) if o is not None]
    try:
        yield
    except BaseException:
        for each, state, groups in kept:
            each.state, each.param_groups = state, groups
        raise


SHAPED_OTHERWISE = ("Adafactor", "LBFGS")
"""Optimizers of torch whose states have other shapes than their parameters."""


def _check_entries(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Raise `TypeError` or `ValueError` unless every entry may be a part of the state of its parameter.

    Optimizers of torch keep numbers, and tensors that are numbers or have the parameter's shape; of others that is not known.
    """
    kind = type(optimizer)
    known = kind.__module__.startswith("torch.optim") and kind.__name__ not in SHAPED_OTHERWISE
    ours = (p for group in optimizer.param_groups for p in group["params"])
    saved = (index for group in state["param_groups"] for index in group["params"])
    shapes = {index: p.shape for index, p in zip(saved, ours, strict=True)}
    for index, entries in state["state"].items():
        if not isinstance(entries, dict):
            raise TypeError(f"the state of parameter {index} is of type {type(entries).__name__}")
        if index not in shapes:
            raise ValueError(f"there is no parameter {index}")
        for name, value in entries.items() if known else ():
            if not isinstance(value, (Tensor, int, float, type(None))):
                raise TypeError(f"{name} of parameter {index} is of type {type(value).__name__}")
            if isinstance(value, Tensor) and value.dim() and value.shape != shapes[index]:
                raise ValueError(f"{name} of parameter {index} is {tuple(value.shape)}, and not {tuple(shapes[index])}")


def _options(saved: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a parameter group after loading."""
    own = {name: value for name, value in group.items() if name != "params"}
    for name, value in own.items():
        if name in saved and not _alike(saved[name], value):
            raise TypeError(f"{name} is of type {type(saved[name]).__name__}, and not {type(value).__name__}")
    options = {name: own[name].clone() if isinstance(own[name], Tensor) else own[name] for name in own} | dict(saved)
    return {
        name: value.to(own[name].device) if isinstance(value, Tensor) and isinstance(own.get(name), Tensor) else value
        for name, value in options.items()
    }


def _alike(one: Any, other: Any) -> bool:
    """Whether both could be values of one option."""
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_alike, one, other))
    numbers = (int, float, Tensor)
    return one is None or other is None or type(one) is type(other) or (isinstance(one, numbers) and isinstance(other, numbers))

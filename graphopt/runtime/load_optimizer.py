"""Loading the state of a torch optimizer: all of it or nothing."""

from __future__ import annotations

from collections.abc import Mapping
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
        groups = [_options(saved, group) for saved, group in zip(state["param_groups"], kept[1], strict=True)]
        for index, entries in state["state"].items():
            if not isinstance(entries, dict):
                raise TypeError(f"the state of parameter {index} is of type {type(entries).__name__}")
        optimizer.load_state_dict({**state, "param_groups": groups})
    except InputError:
        raise
    except Exception as error:  # whatever an optimizer of the user's own raises, it has not been loaded
        optimizer.state, optimizer.param_groups = kept
        raise InputError(
            f"it holds no state of this {type(optimizer).__name__} ({type(error).__name__}: {error}). Make the optimizer as it "
            "was when the state was saved."
        ) from error


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

"""Loading the state of a torch optimizer: all of it or nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from graphopt.errors import InputError


def load_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """`optimizer.load_state_dict(state)`; options that are tensors stay on their devices.

    Raises:
        InputError: the state is not one of this optimizer; it is as it was then.
    """
    before = [dict(group) for group in optimizer.param_groups]
    try:
        with put_back(optimizer):
            optimizer.load_state_dict(dict(state))
    except InputError:
        raise
    except Exception as error:  # whatever an optimizer of the user's own raises, it has not been loaded
        raise InputError(
            f"it holds no state of this {type(optimizer).__name__} ({type(error).__name__}: {error}). Make the optimizer as it "
            "was when the state was saved."
        ) from error
    for group, own in zip(optimizer.param_groups, before, strict=True):
        devices = {name: value.device for name, value in own.items() if isinstance(value, Tensor)}
        group.update((name, group[name].to(d)) for name, d in devices.items() if isinstance(group.get(name), Tensor))


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

"""Hooks on the state of an optimizer whose `state_dict` and `load_state_dict` are its own, which torch's would call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def state_with_hooks(optimizer: torch.optim.Optimizer, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `make` returns as the state of an optimizer, and what the hooks on that make of it."""
    for before in optimizer._optimizer_state_dict_pre_hooks.values():
        before(optimizer)
    state = make()
    for after in optimizer._optimizer_state_dict_post_hooks.values():
        changed = after(optimizer, state)
        state = state if changed is None else changed
    return state


def load_with_hooks(optimizer: torch.optim.Optimizer, state: dict[str, Any], load: Callable[[dict[str, Any]], object]) -> None:
    """Have `load` take a state, or what the hooks on loading make of it."""
    state = dict(state)
    for before in optimizer._optimizer_load_state_dict_pre_hooks.values():
        changed = before(optimizer, state)
        state = state if changed is None else changed
    load(state)
    for after in optimizer._optimizer_load_state_dict_post_hooks.values():
        after(optimizer)

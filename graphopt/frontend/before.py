"""What a run of a model begins with, to be put back: random numbers, buffers, and attributes."""

from __future__ import annotations

import contextlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from graphopt import compat

Container = dict[Any, Any] | list[Any] | set[Any] | deque[Any]

PLAIN = (dict, list, set, deque, OrderedDict, defaultdict, Counter)
"""Types of attributes that forward may change in place."""

LARGEST = 1000
"""Entries of a container that is taken for something that forward keeps, and not for data."""


class Before:
    """What a step begins with, as far as it changes that: random numbers, buffers, and attributes."""

    __slots__ = ("_versions", "attributes", "buffers", "draws")

    def __init__(self, draws: bool, model: nn.Module | None = None) -> None:
        """Remember.

        Args:
            draws: whether the step draws random numbers.
            model: whose buffers and attributes are remembered.
        """
        self.draws = _random_states() if draws else None
        self.buffers = [] if model is None else _copied(model)
        self._versions = [buffer._version for buffer, _ in self.buffers]
        self.attributes = [] if model is None else attributes_of(model)

    def keep_changed(self) -> None:
        """Forget the buffers that have not been written since: their values need no memory during the backward."""
        pairs = zip(self.buffers, self._versions, strict=True)
        self.buffers = [(buffer, value) for (buffer, value), version in pairs if buffer._version != version]

    def has_changed(self) -> bool:
        """Whether an attribute is another now."""
        return any(not alike(held, values) for held, values in self.attributes)

    @contextlib.contextmanager
    def restored(self, model: nn.Module) -> Iterator[None]:
        """What runs inside begins with it, and leaves no trace in random numbers, buffers and attributes of `model`."""
        buffers = _copied(model)
        versions = [b._version for b, _ in buffers]
        attributes = attributes_of(model)
        now = _random_states()
        try:
            if self.draws is not None:
                _set_random_states(self.draws)
            put_back(self.attributes)
            with torch.no_grad():
                for buffer, value in self.buffers:
                    buffer.copy_(value)
            with torch.enable_grad():
                yield
        finally:
            _set_random_states(now)
            put_back(attributes)
            with torch.no_grad():
                for (buffer, value), version in zip(buffers, versions, strict=True):
                    buffer.copy_(value)
                    compat.set_version(buffer, version)  # the first run's backward may still read it


def _random_states() -> list[Tensor]:
    """Of torch's generators: the CPU's, then those of GPUs where they are in use, and no CUDA graph is being recorded."""
    known = torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing()
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if known else ())]


def _set_random_states(states: list[Tensor]) -> None:
    torch.set_rng_state(states[0])
    for device, state in enumerate(states[1:]):
        torch.cuda.set_rng_state(state, device)


def _copied(model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Buffers and their values, without those that were made in inference mode, which nothing can write outside of it."""
    return [(buffer, buffer.detach().clone()) for buffer in model.buffers() if not buffer.is_inference()]


def attributes_of(model: nn.Module) -> list[tuple[Container, Container]]:
    """The attributes of all modules and the plain containers in them, each with a copy."""
    waiting: list[Container] = [vars(module) for module in model.modules()]
    found: dict[int, tuple[Container, Container]] = {}
    while waiting:
        held = waiting.pop()
        if id(held) in found:
            continue
        found[id(held)] = held, held.copy()
        values = held.values() if isinstance(held, dict) else held
        if len(held) <= LARGEST:
            waiting += [value for value in values if type(value) in PLAIN and len(value) <= LARGEST]
    return list(found.values())


def put_back(attributes: Sequence[tuple[Container, Container]]) -> None:
    """Have containers hold again what they held."""
    for held, values in attributes:
        held.clear()
        if isinstance(held, (list, deque)):
            held.extend(values)
        else:
            held.update(values)


def alike(held: Container, values: Container) -> bool:
    """Whether they hold the same objects, or equal numbers and texts, in the same places."""
    if isinstance(held, set):
        return held == values
    if isinstance(held, dict) and isinstance(values, dict):
        return alike(list(held), list(values)) and alike(list(held.values()), list(values.values()))
    return len(held) == len(values) and all(
        a is b or (type(a) is type(b) and isinstance(a, (int, float, str)) and a == b) for a, b in zip(held, values, strict=True)
    )

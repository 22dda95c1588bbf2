"""What a run of a model begins with, to be put back: random numbers of the CPU, buffers, and attributes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from graphopt import compat
from graphopt.frontend.attributes import attributes_of, have_changed, put_back


class Before:
    """What a step begins with, as far as it changes that: random numbers of the CPU, buffers, and attributes."""

    __slots__ = ("attributes", "buffers", "draws")

    def __init__(self, draws: bool, model: nn.Module | None = None) -> None:
        """Remember.

        Args:
            draws: whether the step draws random numbers.
            model: whose buffers and attributes are remembered.
        """
        self.draws = torch.get_rng_state() if draws else None
        self.buffers = [] if model is None else [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
        self.attributes = [] if model is None else attributes_of(model)

    def has_changed(self) -> bool:
        """Whether an attribute is another now."""
        return have_changed(self.attributes)

    @contextlib.contextmanager
    def restored(self, model: nn.Module) -> Iterator[None]:
        """What runs inside begins with it, and leaves no trace in random numbers, buffers and attributes of `model`."""
        buffers = [(b, b.detach().clone()) for b in model.buffers()]
        versions = [b._version for b, _ in buffers]
        attributes = attributes_of(model)
        now = torch.get_rng_state()
        try:
            if self.draws is not None:
                torch.set_rng_state(self.draws)
            put_back(self.attributes)
            with torch.no_grad():
                for buffer, value in self.buffers:
                    buffer.copy_(value)
            with torch.enable_grad():
                yield
        finally:
            torch.set_rng_state(now)
            put_back(attributes)
            with torch.no_grad():
                for (buffer, value), version in zip(buffers, versions, strict=True):
                    buffer.copy_(value)
                    compat.set_version(buffer, version)  # the first run's backward may still read it

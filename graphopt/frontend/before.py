"""What a run of a model begins with, to be put back: random numbers of the CPU, buffers, and attributes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from graphopt import compat
from graphopt.frontend.attributes import attributes_of, have_changed, put_back


class Before:
    """What a step begins with, as far as it changes that: random numbers of the CPU, buffers, and attributes."""

    __slots__ = ("_versions", "attributes", "buffers", "draws")

    def __init__(self, draws: bool, model: nn.Module | None = None) -> None:
        """Remember.

        Args:
            draws: whether the step draws random numbers.
            model: whose buffers and attributes are remembered.
        """
        self.draws = torch.get_rng_state() if draws else None
        self.buffers = [] if model is None else _copied(model)
        self._versions = [buffer._version for buffer, _ in self.buffers]
        self.attributes = [] if model is None else attributes_of(model)

    def keep_changed(self) -> None:
        """Forget the buffers that have not been written since: their values need no memory during the backward."""
        pairs = zip(self.buffers, self._versions, strict=True)
        self.buffers = [(buffer, value) for (buffer, value), version in pairs if buffer._version != version]

    def has_changed(self) -> bool:
        """Whether an attribute is another now."""
        return have_changed(self.attributes)

    @contextlib.contextmanager
    def restored(self, model: nn.Module) -> Iterator[None]:
        """What runs inside begins with it, and leaves no trace in random numbers, buffers and attributes of `model`."""
        buffers = _copied(model)
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


def _copied(model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Buffers and their values, without those that were made in inference mode, which nothing can write outside of it."""
    return [(buffer, buffer.detach().clone()) for buffer in model.buffers() if not buffer.is_inference()]

"""Random numbers for passes that sample, from generators of their own: the global streams are never touched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphopt.errors import InputError
from graphopt.runtime.plain_values import from_plain, to_plain


@dataclass(frozen=True)
class _GeneratorState:
    seed: int
    device: str
    state: Tensor


class Uniforms:
    """Generators by seed and device; the same seed repeats a run."""

    def __init__(self) -> None:
        self._generators: dict[tuple[int, str], torch.Generator] = {}
        self._saved: dict[tuple[int, str], Tensor] = {}

    def draw(self, seed: int, count: int, device: torch.device) -> Tensor:
        """`count` numbers in [0, 1), in float64."""
        generator = self._generators.get((seed, str(device)))
        if generator is None:
            generator = torch.Generator(device).manual_seed(seed)
            if (seed, str(device)) in self._saved:
                generator.set_state(self._saved[seed, str(device)])
            self._generators[seed, str(device)] = generator
        return torch.rand(count, dtype=torch.float64, generator=generator, device=device)

    def snapshot(self) -> Any:
        """Where every generator is; see `Stateful`."""
        now = self._saved | {key: generator.get_state() for key, generator in self._generators.items()}
        return to_plain([_GeneratorState(seed, device, state) for (seed, device), state in now.items()])

    def prepare(self, snapshot: Any) -> Callable[[], None]:
        """See `Stateful`. A generator of a device that this machine lacks waits until there is one."""
        saved = {(s.seed, s.device): s.state for s in from_plain(list[_GeneratorState], snapshot, "uniforms")}
        for (_, device), value in saved.items():
            check_generator_state(value, device)

        def restore() -> None:
            self._generators, self._saved = {}, saved

        return restore


def check_generator_state(state: Tensor, device: str = "cpu") -> None:
    """Raise `InputError` unless `state` is that of a generator on `device`, as far as this machine can tell."""
    try:
        generator = torch.Generator(device)
    except RuntimeError:  # no such device here
        return
    try:
        generator.set_state(state)
    except (RuntimeError, TypeError) as error:
        raise InputError(f"the state of a random generator on {device} is none: {error}.") from error

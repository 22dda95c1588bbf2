"""Random numbers for passes that sample, from generators of their own: the global streams are never touched."""

from __future__ import annotations

import hashlib
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
    rank: int


class Uniforms:
    """Generators by seed and device; the same seed repeats a run. Ranks draw different numbers: so their errors average out."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self._generators: dict[tuple[int, str], torch.Generator] = {}
        self._saved: dict[tuple[int, str], _GeneratorState] = {}

    def draw(self, seed: int, count: int, device: torch.device) -> Tensor:
        """`count` numbers in [0, 1), in float64."""
        generator = self._generators.get((seed, str(device)))
        if generator is None:
            generator = self._generators[seed, str(device)] = torch.Generator(device)
            saved = self._saved.get((seed, str(device)))
            if saved is not None and saved.rank == self.rank:
                generator.set_state(saved.state)
            elif saved is not None:  # one rank has written the file for all
                generator.manual_seed(_mixed(seed, self.rank, saved.state.cpu().numpy().tobytes()))
            else:
                generator.manual_seed(seed if self.rank == 0 else _mixed(seed, self.rank))
        return torch.rand(count, dtype=torch.float64, generator=generator, device=device)

    def snapshot(self) -> Any:
        """Where every generator is; see `Stateful`."""
        made = {
            (seed, device): _GeneratorState(seed, device, generator.get_state(), self.rank)
            for (seed, device), generator in self._generators.items()
        }
        return to_plain(list((self._saved | made).values()))

    def prepare(self, snapshot: Any) -> Callable[[], None]:
        """See `Stateful`. A generator of a device that this machine lacks waits until there is one."""
        saved = {(s.seed, s.device): s for s in from_plain(list[_GeneratorState], snapshot, "uniforms")}
        for (_, device), value in saved.items():
            check_generator_state(value.state, device)

        def restore() -> None:
            self._generators, self._saved = {}, saved

        return restore


def _mixed(*parts: object) -> int:
    """A seed that depends on all of these; torch's generator for the CPU reads its last 32 bits alone."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4])


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

"""Random numbers for passes that sample, from generators of their own: the global streams are never touched."""

from __future__ import annotations

import torch
from torch import Tensor


class Uniforms:
    """Generators by seed and device; the same seed repeats a run."""

    def __init__(self) -> None:
        self._generators: dict[tuple[int, str], torch.Generator] = {}

    def draw(self, seed: int, count: int, device: torch.device) -> Tensor:
        """`count` numbers in [0, 1), in float64."""
        generator = self._generators.get((seed, str(device)))
        if generator is None:
            generator = torch.Generator(device).manual_seed(seed)
            self._generators[seed, str(device)] = generator
        return torch.rand(count, dtype=torch.float64, generator=generator, device=device)

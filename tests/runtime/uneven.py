"""Data of which some samples are much harder than the others, so that a sampler has something to leave out."""

from __future__ import annotations

import torch
from torch import Tensor


def batches(count: int, size: int = 16) -> list[tuple[Tensor, Tensor]]:
    """Batches of points with labels that follow a line, but for an eighth of them."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(count):
        x = torch.randn(size, 5, generator=generator)
        labels = (x.sum(1) > 0).long()
        labels[: size // 8] = 2
        found.append((x, labels))
    return found

"""A model whose memory lies in what its blocks keep, in several widths."""

from __future__ import annotations

from torch import Tensor, nn


class Tower(nn.Module):
    """Residual blocks that widen and narrow again; the mean of squares is its loss."""

    def __init__(self, depth: int = 4, width: int = 32, widening: int = 8, activation: type[nn.Module] = nn.Tanh) -> None:
        super().__init__()
        wide = widening * width
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, wide), activation(), nn.Linear(wide, width)) for _ in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()

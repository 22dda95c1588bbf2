"""Sparse projectors learned in closed form: the principal directions of gradients within blocks of rows.

Rows are divided into s/d blocks at random, and a block's rows share d columns, so that P has d non-zeros per row. Of all such P
with P'P = I, the one whose blocks are the leading eigenvectors of the blocks of sum_i G_i G_i' / |G_i|^2 represents most of the
energy of the gradients G_i, |P'G_i|^2. That takes one eigendecomposition of an (m d/s) square matrix per block, no iterations,
and of the gradients only those blocks; so that both stay small, blocks of more than `LARGEST` rows are divided, and the parts
share the columns. The paper (section 4.1) learns values on supports at random by descent instead; of the gradients of other
batches, what it so learns represents less (see `graphopt.passes.lsp.projectors.fit`, which goes on from here).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from graphopt.passes.lsp.projectors import Projector, Subspace, entries_per_column
from torch import Tensor

LARGEST = 384
"""Rows of a block, about: its moments and their eigenvectors take the square and the cube of that."""


@dataclass(frozen=True)
class BlockMoments:
    """Second moments of gradients (m x n) within blocks of rows.

    Attributes:
        rows: (b, r) of each block, -1 where it has fewer than r.
        sums: (b, r, r).
        sharing: so many blocks after one another share their columns.
    """

    rows: Tensor
    sums: Tensor
    sharing: int

    def add(self, gradient: Tensor) -> BlockMoments:
        """With one more gradient, which counts the same however large it is."""
        norm = float(gradient.norm())
        if not norm:
            return self
        rows = self.rows.to(gradient.device)
        blocks = gradient[rows.clamp(min=0)]  # (b, r, n)
        blocks[rows < 0] = 0
        return replace(self, sums=self.sums + (blocks @ blocks.transpose(1, 2) / norm**2).to(self.sums))

    def projector(self, s: int, d: int) -> Projector:
        """P (m x s)."""
        count = self.rows.shape[0]
        absent = torch.diag_embed((self.rows < 0).to(self.sums))  # below every eigenvalue: never among the leading ones
        vectors = torch.linalg.eigh(self.sums - absent)[1][:, :, -d:].flip(-1) / math.sqrt(self.sharing)  # (b, r, d)
        first = torch.arange(count) // self.sharing * d
        columns = (first.view(count, 1, 1) + torch.arange(d)).expand(-1, self.rows.shape[1], -1)
        present = self.rows >= 0
        order = self.rows[present].argsort()
        values = vectors[present][order].contiguous()
        return Projector.of_dense(values) if d == s else Projector(columns[present][order].to(torch.int32), values, s)


def block_sizes(m: int, s: int, d: int) -> tuple[int, int, int]:
    """How many blocks m rows are divided into, how many rows the largest of them have, and how many share their columns."""
    together = entries_per_column(m, d, s)
    sharing = max(1, min(math.ceil(together / LARGEST), m // (s // d) // d))  # a block has at least d rows
    return s // d * sharing, math.ceil(together / sharing), sharing


def draw_blocks(m: int, s: int, d: int, generator: torch.Generator, dtype: torch.dtype = torch.float32) -> BlockMoments:
    """Rows in blocks at random, so that columns have nearly equally many entries; nothing is known of gradients yet.

    Args:
        m, s, d: 1 <= d <= s <= m.
    """
    count, size, sharing = block_sizes(m, s, d)
    groups, together = s // d, entries_per_column(m, d, s)
    rows = torch.cat([torch.randperm(m, generator=generator), torch.full((groups * together - m,), -1)])
    by_group = rows.view(together, groups).t()  # those that share columns; they differ by at most one in size
    padded = torch.cat([by_group, torch.full((groups, size * sharing - together), -1)], 1)
    numbers = padded.view(groups, size, sharing).transpose(1, 2).reshape(count, size)
    return BlockMoments(numbers.contiguous(), torch.zeros(count, size, size, dtype=dtype), sharing)


@dataclass(frozen=True)
class GradientMoments:
    """Of the rows and of the columns of one weight's gradients (m x n)."""

    left: BlockMoments
    right: BlockMoments

    def add(self, gradient: Tensor) -> GradientMoments:
        """With one more gradient."""
        return GradientMoments(self.left.add(gradient), self.right.add(gradient.t()))

    def subspace(self, s: int, d: int) -> Subspace:
        """P and Q, on the moments' device."""
        return Subspace(self.left.projector(s, d), self.right.projector(s, d))


def draw_moments(
    shape: tuple[int, int], s: int, d: int, generator: torch.Generator, dtype: torch.dtype = torch.float32
) -> GradientMoments:
    """Blocks for both sides of a weight, of which no gradient is known yet."""
    return GradientMoments(draw_blocks(shape[0], s, d, generator, dtype), draw_blocks(shape[1], s, d, generator, dtype))


def scaled_to_one(gradient: Tensor) -> Tensor:
    """A multiple of a gradient whose norms neither overflow nor vanish."""
    largest = gradient.abs().max()
    return gradient / largest if float(largest) else gradient

"""Sparse projectors of weights' gradients: G (m x n) is represented by P'GQ (s x s) (LSP-Offload, section 4.1).

P (m x s) and Q (n x s) have d non-zeros per row; where d = s they are dense, and multiplied as such. Freshly drawn they are
unbiased, E[PP'GQQ'] = G, but far from any one G; they are learned from gradients of the training at hand, in closed form
(`learning`) and by descent on their values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from graphopt.ops.sparse import combine_rows

ITERATIONS, LEARNING_RATE = 100, 0.03
"""Of fitting, by Adam; the rate falls to 0 along a cosine."""


@dataclass(frozen=True)
class Projector:
    """A sparse (m x s) matrix with d entries in every row.

    Attributes:
        columns: (m, d) int32, different ones in a row; (0, 0) of a dense matrix.
        values: (m, d); of a dense matrix itself.
        size: s.
    """

    columns: Tensor
    values: Tensor
    size: int

    @classmethod
    def of_dense(cls, values: Tensor) -> Projector:
        """A matrix (m x s) without zeros."""
        return cls(torch.empty(0, 0, dtype=torch.int32, device=values.device), values, values.shape[1])

    @property
    def is_dense(self) -> bool:
        """Whether d = s."""
        return self.values.shape[1] == self.size

    @cached_property
    def _entries(self) -> tuple[Tensor, Tensor]:
        """The entries by column: (s, e) rows and (s, e) places among the flattened values, padded to equally many each."""
        m, d = self.columns.shape
        flat = self.columns.flatten().long()
        order = flat.argsort(stable=True)
        counts = flat.bincount(minlength=self.size)
        most = entries_per_column(m, d, self.size)
        place = torch.arange(m * d, device=flat.device) - (counts.cumsum(0) - counts)[flat[order]]
        places = torch.full((self.size, most), m * d, dtype=torch.int32, device=flat.device)
        places[flat[order], place] = order.to(torch.int32)
        return torch.where(places < m * d, places // d, 0).to(torch.int32), places

    @property
    def rows(self) -> Tensor:
        """(s, e) int32: the rows in which each column has an entry, padded."""
        return self._entries[0]

    @property
    def by_column(self) -> Tensor:
        """(s, e): the values of `rows`, 0 where padded."""
        return torch.cat([self.values.flatten(), self.values.new_zeros(1)])[self._entries[1]]

    def with_values(self, values: Tensor) -> Projector:
        """The same support with other values."""
        result = replace(self, values=values)
        if not self.is_dense:
            result.__dict__["_entries"] = self._entries  # the support is the same
        return result

    def product(self, matrix: Tensor) -> Tensor:
        """P by an (s, N) matrix."""
        return self.values @ matrix if self.is_dense else combine_rows(matrix, self.columns, self.values)

    def transposed_product(self, matrix: Tensor) -> Tensor:
        """P' by an (m, N) matrix."""
        return self.values.t() @ matrix if self.is_dense else combine_rows(matrix, self.rows, self.by_column)

    def dense(self) -> Tensor:
        """P itself."""
        if self.is_dense:
            return self.values
        return self.values.new_zeros(self.columns.shape[0], self.size).scatter_(1, self.columns.long(), self.values)

    def at_entries(self, matrix: Tensor) -> Tensor:
        """What an (m, s) matrix holds where this one has its entries, (m, d)."""
        return matrix if self.is_dense else matrix.gather(1, self.columns.long())

    def to(self, device: torch.device, dtype: torch.dtype) -> Projector:
        """A copy elsewhere."""
        return Projector(self.columns.to(device), self.values.to(device, dtype), self.size)


def entries_per_column(m: int, d: int, s: int) -> int:
    """Most entries that a column of a drawn projector can have."""
    return math.ceil(m / (s // d))


def draw_projector(m: int, s: int, d: int, generator: torch.Generator) -> Projector:
    """A random projector on the CPU in float32, with E[PP'] = I.

    Rows take their columns d at a time from one random permutation after another, so that columns of a row differ, and columns
    have nearly equally many entries. Values are normal with variance 1 / d.

    Args:
        m, s, d: 1 <= d <= s <= m.
    """
    if d == s:
        return Projector.of_dense(torch.randn(m, s, generator=generator) / math.sqrt(s))
    per_permutation = s // d
    permutations = [
        torch.randperm(s, generator=generator)[: per_permutation * d].view(per_permutation, d)
        for _ in range(math.ceil(m / per_permutation))
    ]
    columns = torch.cat(permutations)[:m].to(torch.int32)
    return Projector(columns, torch.randn(m, d, generator=generator) / math.sqrt(d), s)


@dataclass(frozen=True)
class Subspace:
    """P and Q of one weight (m x n)."""

    left: Projector
    right: Projector

    def compress(self, gradient: Tensor) -> Tensor:
        """P'GQ, (s x s), of G (m x n)."""
        return self.right.transposed_product(self.left.transposed_product(gradient).t()).t()

    def decompress(self, compressed: Tensor) -> Tensor:
        """PgQ', (m x n), of g (s x s)."""
        return self.left.product(self.right.product(compressed.t()).t())

    def error(self, gradient: Tensor) -> float:
        """|PP'GQQ' - G| / |G| in the Frobenius norm, not squared; 0 if G = 0."""
        norm = float(gradient.norm())
        return float((self.decompress(self.compress(gradient)) - gradient).norm()) / norm if norm else 0.0

    def to(self, device: torch.device, dtype: torch.dtype) -> Subspace:
        """A copy elsewhere."""
        return Subspace(self.left.to(device, dtype), self.right.to(device, dtype))


def draw_subspace(shape: tuple[int, int], s: int, d: int, generator: torch.Generator) -> Subspace:
    """Random projectors for both sides of a weight."""
    return Subspace(draw_projector(shape[0], s, d, generator), draw_projector(shape[1], s, d, generator))


def fit(
    start: Subspace, gradient: Tensor, target: float = 0.0, iterations: int = ITERATIONS, unseen: Tensor | None = None
) -> Subspace:
    """Minimise the relative error of `gradient` over the values of P and Q: over their scale in closed form, then by Adam.

    Drawn projectors have a relative error of sqrt((1 + m/s)(1 + n/s) - 1), 4 and more, nearly all of which is scale. Adam at a
    rate that can undo this in 100 iterations is too coarse for the rest, whence the scale before and a smaller rate than the
    authors' code has (0.1): with it, more of the gradients of other batches is represented.

    Args:
        target: stop once the error is below.
        unseen: a gradient whose error counts in place of `gradient`'s; stops as soon as that rises.
    Returns:
        The best values that were met; never worse than `start`.
    """
    first = start.error(gradient if unseen is None else unseen)
    factor = _best_scale(start, gradient)
    left, right = start.left.values * factor, start.right.values * factor
    optimizer = torch.optim.Adam([left.requires_grad_(), right.requires_grad_()], lr=LEARNING_RATE)
    best, lowest = start, math.inf
    for i in range(iterations + 1):
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 + math.cos(math.pi * i / (iterations + 1))) / 2
        now = Subspace(start.left.with_values(left.detach()), start.right.with_values(right.detach()))
        error, left.grad, right.grad = _error_and_gradients(now, gradient)
        error = error if unseen is None else now.error(unseen)
        if unseen is not None and error > lowest:
            break
        if error < lowest:
            kept = (left.detach().clone(), right.detach().clone())
            best, lowest = Subspace(start.left.with_values(kept[0]), start.right.with_values(kept[1])), error
        if not math.isfinite(error) or error < target or i == iterations:
            break
        optimizer.step()
    return best if lowest < first else start


def _best_scale(subspace: Subspace, gradient: Tensor) -> float:
    """The factor of all values of P and Q for which the relative error of `gradient` is least; 1 if there is none."""
    represented, norm = subspace.decompress(subspace.compress(gradient)), float(gradient.norm())
    if not norm:
        return 1.0
    along, energy = float((represented * gradient).sum()) / norm**2, float(represented.norm()) ** 2 / norm**2
    factor = (along / energy) ** 0.25 if along > 0 and energy > 0 else 1.0  # P and Q occur twice each
    return factor if math.isfinite(factor) else 1.0


def _error_and_gradients(subspace: Subspace, gradient: Tensor) -> tuple[float, Tensor, Tensor]:
    """The relative error, and its derivatives by the values of P and Q.

    With E = PgQ' - G, g = P'GQ and h = P'EQ: d|E|^2/2 = <(EQ)g' + (GQ)h', dP> + <(E'P)g + (G'P)h, dQ>.
    """
    left, right, norm = subspace.left, subspace.right, float(gradient.norm())
    left_side, right_side = left.transposed_product(gradient), right.transposed_product(gradient.t())  # P'G and (GQ)'
    g = right.transposed_product(left_side.t()).t()
    excess = subspace.decompress(g) - gradient
    distance = float(excess.norm())
    if not norm or not distance:
        return 0.0, torch.zeros_like(left.values), torch.zeros_like(right.values)
    left_excess, right_excess = left.transposed_product(excess), right.transposed_product(excess.t())
    h = right.transposed_product(left_excess.t()).t()
    along_left = right_excess.t() @ g.t() + right_side.t() @ h.t()
    along_right = left_excess.t() @ g + left_side.t() @ h
    scale = 1 / (distance * norm)
    return distance / norm, scale * left.at_entries(along_left), scale * right.at_entries(along_right)


def unseen_energy(old: Subspace, new: Subspace, gradient: Tensor) -> Tensor:
    """What a new subspace sees of a gradient that the old one left out, (s x s), as a multiple of the energy that both see.

    With a = P'C(G)Q and b = P'(G - C(G))Q, where C is the old compression: the squares of b, by their sums over rows and over
    columns, since one gradient says little of single entries (as in Adafactor: Shazeer and Stern, 2018), divided by |a|^2. Hence
    no matter how G is scaled. 0 where that is not finite.
    """
    seen = new.compress(old.decompress(old.compress(gradient)))
    squares = (new.compress(gradient) - seen).square()
    smooth = squares.sum(1, keepdim=True) * (squares.sum(0, keepdim=True) / squares.sum())
    energy = smooth / seen.square().sum()
    return energy if bool(torch.isfinite(energy).all()) else torch.zeros_like(energy)


def transport(old: Subspace, new: Subspace, first: Tensor, second: Tensor, unseen: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Adam's moments (s x s) carried over to a new subspace: LMR and (LoL)V(RoR), with L = P_new'P_old and R = Q_old'Q_new.

    This departs from the paper in one term. V so carried over has only what the old subspace saw of the gradients, where the new
    one sees other parts of them too; second moments that are too small make steps too large, for as many steps as Adam's second
    average is long. So `unseen`, the energy of those parts, is added.

    Args:
        unseen: (s x s), of `unseen_energy`; None: nothing is added, as in the paper.
    """
    left = new.left.transposed_product(old.left.dense())
    right = new.right.transposed_product(old.right.dense()).t()
    carried = (left.square() @ second @ right.square()).clamp(min=0)
    return left @ first @ right, carried if unseen is None else carried + carried.sum() * unseen

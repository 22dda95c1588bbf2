"""Row samplers: which rows are kept, and by what each is scaled so that sums over rows keep their expectation (VCAS).

Row i is kept with probability p_i and scaled by 1 / p_i. A registered operator returns a fixed number of rows, so that
everything computed from them has a static shape.
"""

from __future__ import annotations

import torch
from torch import Tensor

from graphopt.ops.library import library


def in_float64(tensor: Tensor) -> Tensor:
    """Any gradient, also a sparse one; a complex number as two."""
    tensor = tensor.to_dense()
    return (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).double()


def capped_probabilities(weights: Tensor, count: float) -> Tensor:
    """Inclusion probabilities proportional to `weights`, capped at one, that sum to `count`.

    Args:
        weights: (N,) importance of each row, not negative; their scale does not matter.
        count: expected number of rows kept.
    Returns:
        (N,) probabilities min(1, c * weights) in float64 that sum to `count`; where that is at least the number of weights above
        zero, 1 for those and 0 for the others. If some weights are not finite, those rows share `count` equally and no other
        row is kept, so that an overflow stays visible in what is computed from the rows.
    Source: VCAS, section 4.1; capping as in its reference implementation (water-filling), made scale-invariant.
    """
    x = _comparable(weights)
    ordered = torch.sort(x, descending=True).values
    positions = torch.arange(x.numel(), dtype=x.dtype, device=x.device)
    rest = ordered.flip(0).cumsum(0).flip(0)  # what the rows from j on weigh, if the j heaviest are capped
    factor = (count - positions) / rest
    # The caps are right from the first j on at which the next row stays at or below one; j rows are then capped.
    fits = (ordered * factor <= 1) & (rest > 0)
    chosen = factor[fits.to(torch.int8).argmax()]
    scarce = (x > 0).sum() <= count
    return torch.where(scarce, (x > 0).to(x.dtype), (x * chosen).clamp(max=1.0))


def _comparable(weights: Tensor) -> Tensor:
    """Weights in float64 between 0 and 1; if some are not finite, 1 for those and 0 for the others."""
    x = weights.detach().to(torch.float64)
    finite = torch.isfinite(x)
    x = torch.where(finite.all(), x, (~finite).to(x.dtype)).clamp(min=0.0)
    largest = x.max() if x.numel() else x.new_zeros(())
    return x / torch.where(largest > 0, largest, torch.ones_like(largest))


_NEGLIGIBLE = 1e-9
"""A row of weight zero with a smaller share of the places is only there for rounding."""


def filled_probabilities(weights: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """`capped_probabilities`, with what is missing to `count` shared by the rows of weight zero; and which those are."""
    p = capped_probabilities(weights, count)
    spare = p <= 0
    return torch.where(spare, (count - p.sum()) / spare.sum().clamp(min=1), p).clamp(0.0, 1.0), spare


def shuffled(number: int, uniform: Tensor) -> Tensor:
    """(number,) int64: an order of rows that follows from one number in [0, 1), and looks random (splitmix64 of its bits)."""
    x = (uniform.to(torch.float64) * 2.0**53).to(torch.int64)
    x = x + torch.arange(1, number + 1, device=uniform.device) * -7046029254386353131
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * -4658895280553007687
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * -7723592293110705685
    return (x ^ (x >> 31 & (1 << 33) - 1)).argsort()


def systematic_rows(weights: Tensor, uniforms: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Exactly `count` different rows, row i with probability p_i = `capped_probabilities(weights, count)`.

    The probabilities are laid end to end in a random order, and every point u, u + 1, ... falls on a row: two uniform numbers
    give all rows. In the rows' own order the points could fall on the same token of every sample, whose errors do not cancel.
    Rows of weight zero only fill up what others leave, since nothing depends on them.

    Args:
        weights: (N,) importance of each row.
        uniforms: (2,) numbers in [0, 1): the first point u, and what the order follows from.
        count: rows kept, at most N.
    Returns:
        rows: (count,) int64, increasing.
        scale: (count,) float64, 1 / p of each.
        variance: () float64, sum of (1 / p - 1) weights^2: the variance that independent draws would have (VCAS, Eq. 3).
    """
    p, spare = filled_probabilities(weights, count)
    order = shuffled(weights.numel(), uniforms[1])
    ends = p[order].cumsum(0)
    ends = ends * (count / ends[-1])
    points = torch.arange(count, dtype=ends.dtype, device=ends.device) + uniforms[0].to(ends.dtype)
    found = torch.searchsorted(ends, points, right=True)
    places = torch.arange(count, device=ends.device)
    found = (found - places).cummax(0).values.clamp(0, weights.numel() - count) + places  # rounding must not draw a row twice
    rows = order[found].sort().values
    scale = torch.where(spare & (p < _NEGLIGIBLE), torch.ones_like(p), 1 / p)
    terms = (1 / p - 1) * weights.to(torch.float64).square()
    return rows, scale[rows], torch.where(spare, torch.zeros_like(terms), terms).sum()


def row_scales(weights: Tensor, uniforms: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """`systematic_rows` without leaving rows out: the scale of every row, 0 for those not kept.

    Args:
        count: () rows kept, as a tensor, so that one compiled graph serves every ratio; N or more keeps every row as it is.
    Returns:
        scale: (N,) float64.
        variance: see `systematic_rows`.
    """
    kept = int(count)
    if kept >= weights.numel():
        return torch.ones_like(weights, dtype=torch.float64), torch.zeros((), dtype=torch.float64, device=weights.device)
    rows, scale, variance = systematic_rows(weights, uniforms, kept)
    return torch.zeros_like(weights, dtype=torch.float64).index_copy(0, rows, scale), variance


library.define("systematic_rows(Tensor weights, Tensor uniforms, int count) -> (Tensor, Tensor, Tensor)")
library.define("row_scales(Tensor weights, Tensor uniforms, Tensor count) -> (Tensor, Tensor)")
library.impl("systematic_rows", systematic_rows, "CompositeExplicitAutograd")
library.impl("row_scales", row_scales, "CompositeExplicitAutograd")


@torch.library.register_fake("graphopt::systematic_rows", lib=library)
def _(weights: Tensor, uniforms: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    exact = weights.new_empty(count, dtype=torch.float64)
    return weights.new_empty(count, dtype=torch.int64), exact, exact.new_empty(())


@torch.library.register_fake("graphopt::row_scales", lib=library)
def _(weights: Tensor, uniforms: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(weights, dtype=torch.float64), torch.empty((), dtype=torch.float64, device=weights.device)

"""Row samplers: the properties of papers.md 3.8, by enumeration where the outcomes can be listed."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy
import pytest
import torch
from graphopt.passes.vcas.ops import (
    capped_probabilities,
    filled_probabilities,
    row_scales,
    shuffled,
    systematic_rows,
)
from hypothesis import example, given, strategies as st
from torch import Tensor

WEIGHTS = st.lists(st.one_of(st.just(0.0), st.floats(1e-6, 1e6)), min_size=1, max_size=40).map(
    lambda values: torch.tensor(values, dtype=torch.float64)
)


@given(WEIGHTS, st.floats(0.1, 1.0))
def test_probabilities_sum_to_the_count_and_are_proportional_up_to_one(x: Tensor, part: float) -> None:
    positive = int((x > 0).sum())
    count = max(1, round(part * x.numel()))
    p = capped_probabilities(x, count)
    assert (p >= 0).all()
    assert (p <= 1).all()
    assert (p[x > 0] > 0).all()
    assert (p[x == 0] == 0).all()
    assert float(p.sum()) == pytest.approx(min(count, positive), rel=1e-9, abs=1e-9)
    free = (p > 0) & (p < 1)
    ratios = p[free] / x[free]
    assert torch.allclose(ratios, ratios[:1].expand_as(ratios), rtol=1e-9)
    capped = x[p >= 1]
    if capped.numel() and free.any():
        assert capped.min() >= x[free].max() * (1 - 1e-9)


@given(WEIGHTS, st.floats(1e-250, 1e250))
def test_the_scale_of_the_weights_does_not_matter(x: Tensor, scale: float) -> None:
    count = max(1, x.numel() // 2)
    assert torch.allclose(capped_probabilities(x, count), capped_probabilities(x * scale, count), rtol=1e-9, atol=1e-12)


@given(WEIGHTS, st.integers(0, 10**6))
@example(torch.tensor([0.0, 256078.0, 256078.0, 315342.0, 0.015625, 0.00390625], dtype=torch.float64), 0)
def test_no_other_probabilities_have_less_variance(x: Tensor, seed: int) -> None:
    """Moving probability between two rows that are kept with less than certainty only adds variance."""
    p = capped_probabilities(x, max(1, x.numel() // 2))
    free = ((p > 0) & (p < 1)).nonzero().flatten().tolist()
    if len(free) < 2:
        return
    a, b = torch.tensor(free)[torch.randperm(len(free), generator=torch.Generator().manual_seed(seed))[:2]].tolist()
    moved = p.clone()
    step = 0.1 * min(float(p[a]), 1 - float(p[b]))
    moved[a], moved[b] = moved[a] - step, moved[b] + step

    def variance(q: Tensor) -> Fraction:
        """In exact numbers: of probabilities near 1, 1 / q - 1 rounds by more than what a move changes."""
        pairs = ((Fraction(one), Fraction(other)) for one, other in zip(q.tolist(), x.tolist(), strict=True) if one > 0)
        return sum(((1 / one - 1) * other**2 for one, other in pairs), Fraction())

    assert variance(moved) >= variance(p) * (1 - Fraction(1, 10**9))


def test_known_probabilities() -> None:
    assert capped_probabilities(torch.tensor([1.0, 1.0, 1.0, 1.0]), 2).tolist() == [0.5] * 4
    assert capped_probabilities(torch.tensor([10.0, 1.0, 1.0]), 2).tolist() == [1.0, 0.5, 0.5]
    assert capped_probabilities(torch.tensor([0.0, 3.0, 1.0]), 2).tolist() == [0.0, 1.0, 1.0]
    assert capped_probabilities(torch.zeros(3), 2).tolist() == [0.0] * 3
    tiny = torch.tensor([1e-300, 2e-300, 3e-300], dtype=torch.float64)
    torch.testing.assert_close(capped_probabilities(tiny, 1.5), torch.tensor([0.25, 0.5, 0.75]).double())


ORDER = 0.25
"""Decides the order in which rows are laid end to end; probabilities do not depend on it."""


def outcomes(weights: Tensor, count: int) -> list[tuple[float, Tensor, Tensor]]:
    """Every draw of the systematic sampler with its probability: between two ends of rows nothing changes."""
    ends = filled_probabilities(weights, count)[0][shuffled(weights.numel(), torch.tensor(ORDER))].cumsum(0)
    cuts = sorted({0.0, 1.0, *(float(e) % 1.0 for e in ends)})
    found = []
    for low, high in itertools.pairwise(cuts):
        if high - low < 1e-12:  # rounding of the ends
            continue
        rows, scale, _ = systematic_rows(weights, torch.tensor([(low + high) / 2, ORDER], dtype=torch.float64), count)
        found.append((high - low, rows, scale))
    return found


@given(WEIGHTS, st.floats(0.1, 0.9))
def test_systematic_draws_are_unbiased_and_of_one_size(x: Tensor, part: float) -> None:
    count = max(1, math.ceil(part * x.numel()))
    expected = torch.zeros_like(x)
    for probability, rows, scale in outcomes(x, count):
        assert rows.numel() == count == rows.unique().numel()
        assert (rows[1:] > rows[:-1]).all()
        assert torch.isfinite(scale).all()
        expected[rows] += probability * scale * x[rows]
    torch.testing.assert_close(expected, x, rtol=1e-6, atol=1e-9 * float(x.max()))


def test_the_order_is_another_for_every_number() -> None:
    orders = [shuffled(64, torch.tensor(u, dtype=torch.float64)) for u in numpy.linspace(0, 1, 200, endpoint=False)]
    assert all(torch.equal(order.sort().values, torch.arange(64)) for order in orders)
    assert len({tuple(order.tolist()) for order in orders}) == 200
    places = torch.stack([order.argsort() for order in orders]).double()
    assert (places.mean(0) - 31.5).abs().max() < 5 * 18.5 / 200**0.5


def test_systematic_draws_of_rows_with_a_period_have_the_stated_variance() -> None:
    """Tokens of a sample that pull in opposite directions: a step of one sample's length must not always fall on the same."""
    values = torch.tensor([1.0, -1.0, 1.0, -1.0]).repeat(16)
    generator = torch.Generator().manual_seed(0)
    sums, stated = [], 0.0
    for _ in range(2000):
        rows, scale, variance = systematic_rows(values.abs(), torch.rand(2, generator=generator, dtype=torch.float64), 16)
        sums.append(float((values[rows] * scale).sum()))
        stated = float(variance)
    assert abs(sum(sums) / len(sums)) < 5 * (stated / len(sums)) ** 0.5
    assert sum(s * s for s in sums) / len(sums) <= 1.1 * stated


def test_the_variance_that_is_stated_is_that_of_independent_draws() -> None:
    x = torch.tensor([3.0, 0.5, 1.0, 2.0, 0.1, 4.0], dtype=torch.float64)
    p, variance = capped_probabilities(x, 2), 0.0
    for mask in itertools.product((False, True), repeat=6):
        kept = torch.tensor(mask)
        variance += float(torch.where(kept, p, 1 - p).prod() * (torch.where(kept, x / p, 0.0) - x).square().sum())
    assert variance == pytest.approx(float(systematic_rows(x, torch.tensor([0.3, ORDER]), 2)[2]))


@given(WEIGHTS, st.floats(0, 0.999), st.floats(0.1, 1.0))
def test_scales_of_all_rows_are_those_of_the_kept_ones(x: Tensor, u: float, part: float) -> None:
    count = max(1, math.ceil(part * x.numel()))
    scale, variance = row_scales(x, torch.tensor([u, ORDER]), torch.tensor(count))
    if count >= x.numel():
        assert (scale == 1).all()
        return
    rows, expected, stated = systematic_rows(x, torch.tensor([u, ORDER]), count)
    torch.testing.assert_close(scale[rows], expected)
    assert (rows[1:] > rows[:-1]).all()
    assert (scale != 0).sum() == count
    assert variance == stated


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_overflow_is_kept_where_it_can_be_seen(bad: float) -> None:
    x = torch.tensor([1.0, bad, 2.0, 3.0])
    for u in numpy.linspace(0, 0.99, 7):
        rows, scale, _ = systematic_rows(x, torch.tensor([u, ORDER]), 2)
        assert 1 in rows.tolist()
        assert torch.isfinite(scale).all()


def test_rows_that_weigh_nothing_fill_up_the_places() -> None:
    for x in (torch.zeros(5), torch.tensor([0.0, 0.0, 2.0, 0.0, 0.0])):
        rows, scale, variance = systematic_rows(x, torch.tensor([0.3, ORDER]), 3)
        assert rows.unique().numel() == 3
        assert torch.isfinite(scale).all()
        assert float(variance) == 0.0


def test_the_operators_are_registered() -> None:
    weights, uniforms = torch.rand(9), torch.tensor([0.4, ORDER])
    torch.library.opcheck(torch.ops.graphopt.systematic_rows.default, (weights, uniforms, 4))
    torch.library.opcheck(torch.ops.graphopt.row_scales.default, (weights, uniforms, torch.tensor(4)))

"""Sparse projectors (papers.md 2.8)."""

from __future__ import annotations

import math

import pytest
import torch
from graphopt.passes.lsp.projectors import (
    Projector,
    Subspace,
    _error_and_gradients,
    draw_projector,
    draw_subspace,
    entries_per_column,
    fit,
    transport,
    unseen_energy,
)
from hypothesis import given, settings, strategies as st
from torch import Tensor

SIZES = st.tuples(st.integers(1, 40), st.integers(1, 40), st.integers(1, 40)).map(
    lambda t: (max(t), sorted(t)[1], min(t))  # d <= s <= m
)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def drawn(m: int, n: int, s: int, d: int, seed: int = 0) -> Subspace:
    return draw_subspace((m, n), s, d, generator(seed)).to(torch.device("cpu"), torch.float64)


def identity(m: int) -> Projector:
    return Projector(torch.randperm(m).view(m, 1).to(torch.int32), torch.ones(m, 1, dtype=torch.float64), m)


@given(SIZES)
def test_every_row_has_d_different_columns_and_columns_are_balanced(sizes: tuple[int, int, int]) -> None:
    m, s, d = sizes
    projector = draw_projector(m, s, d, generator())
    entries = projector.dense() != 0
    assert entries.shape == (m, s)
    assert entries.sum(1).tolist() == [d] * m
    assert int(entries.sum(0).max()) <= entries_per_column(m, d, s)
    assert projector.is_dense or projector.rows.shape == (s, entries_per_column(m, d, s))


@given(SIZES, st.integers(1, 5))
def test_products_are_those_of_the_dense_matrix(sizes: tuple[int, int, int], width: int) -> None:
    m, s, d = sizes
    projector = draw_projector(m, s, d, generator()).to(torch.device("cpu"), torch.float64)
    dense = projector.dense()
    assert int((dense != 0).sum()) == m * d
    tall, short = torch.randn(m, width, dtype=torch.float64), torch.randn(s, width, dtype=torch.float64)
    torch.testing.assert_close(projector.transposed_product(tall), dense.t() @ tall)
    torch.testing.assert_close(projector.product(short), dense @ short)


def test_the_expected_product_of_drawn_projectors_is_the_identity() -> None:
    """P3; a support drawn with replacement fails this."""
    gradient = torch.randn(7, 6, dtype=torch.float64, generator=generator(9))
    draws = 4000
    products = torch.stack([(s := drawn(7, 6, 6, 2, seed)).decompress(s.compress(gradient)) for seed in range(draws)])
    errors = (products.mean(0) - gradient).abs() / (products.std(0) / math.sqrt(draws))
    assert float(errors.max()) < 5
    assert 0.97 < float((products.mean(0) * gradient).sum() / gradient.square().sum()) < 1.03


def test_compression_is_linear_and_in_any_order() -> None:
    subspace = drawn(12, 9, 5, 2)
    x, dy = torch.randn(20, 12, dtype=torch.float64), torch.randn(20, 9, dtype=torch.float64)
    a, b = torch.randn(12, 9, dtype=torch.float64), torch.randn(12, 9, dtype=torch.float64)
    torch.testing.assert_close(subspace.compress(2 * a - b), 2 * subspace.compress(a) - subspace.compress(b))
    chained = subspace.left.transposed_product(x.t()) @ subspace.right.transposed_product(dy.t()).t()
    torch.testing.assert_close(chained, subspace.compress(x.t() @ dy))


def test_permutations_lose_nothing_and_orthonormal_projectors_are_a_projection() -> None:
    whole = Subspace(identity(6), identity(6))
    gradient = torch.randn(6, 6, dtype=torch.float64)
    torch.testing.assert_close(whole.decompress(whole.compress(gradient)), gradient)
    assert whole.error(gradient) < 1e-12
    columns = torch.tensor([0, 1, 2, 0, 1, 2]).view(6, 1).to(torch.int32)
    half = Projector(columns, torch.full((6, 1), 0.5**0.5, dtype=torch.float64), 3)
    subspace = Subspace(half, half)
    once = subspace.decompress(subspace.compress(gradient))
    torch.testing.assert_close(subspace.decompress(subspace.compress(once)), once)
    assert once.norm() <= gradient.norm()


@settings(max_examples=20)
@given(st.integers(0, 1000))
def test_derivatives_are_autograds(seed: int) -> None:
    subspace = drawn(7, 5, 4, 2, seed)
    gradient = torch.randn(7, 5, dtype=torch.float64, generator=generator(seed))
    error, left, right = _error_and_gradients(subspace, gradient)

    def loss(p: Tensor, q: Tensor) -> Tensor:
        dense_p = torch.zeros(7, 4, dtype=torch.float64).scatter(1, subspace.left.columns.long(), p)
        dense_q = torch.zeros(5, 4, dtype=torch.float64).scatter(1, subspace.right.columns.long(), q)
        return (dense_p @ dense_p.t() @ gradient @ dense_q @ dense_q.t() - gradient).norm() / gradient.norm()

    p, q = subspace.left.values.clone().requires_grad_(), subspace.right.values.clone().requires_grad_()
    expected = loss(p, q)
    expected.backward()
    assert error == pytest.approx(float(expected))
    torch.testing.assert_close(left, p.grad)
    torch.testing.assert_close(right, q.grad)


def test_fitting_learns_a_low_rank_gradient() -> None:
    """papers.md 2.4: 128 x 128, s = 64, d = 8, rank 8: error 2.87, then 0.13 after 100 iterations."""
    subspace = draw_subspace((128, 128), 64, 8, generator())
    factors = torch.randn(128, 8, generator=generator(1)), torch.randn(8, 128, generator=generator(2))
    gradient = factors[0] @ factors[1]
    assert subspace.error(gradient) > 2
    assert fit(subspace, gradient).error(gradient) < 0.2


def test_fitting_never_makes_it_worse_and_stops_at_the_target() -> None:
    gradient = torch.randn(20, 16, dtype=torch.float64, generator=generator(3))
    subspace = drawn(20, 16, 8, 4)
    error = fit(subspace, gradient, target=2.0).error(gradient)
    assert error <= subspace.error(gradient)
    assert error < 2.0
    assert error > fit(subspace, gradient).error(gradient)
    for odd in (torch.zeros(20, 16, dtype=torch.float64), torch.full((20, 16), math.nan, dtype=torch.float64)):
        assert fit(subspace, odd) is subspace


@pytest.mark.parametrize("shape", [(40, 30), (64, 16)])
def test_fitting_first_takes_the_best_scale(shape: tuple[int, int]) -> None:
    start, gradient = drawn(*shape, 8, 3), torch.randn(*shape, dtype=torch.float64, generator=generator(3))
    found = fit(start, gradient, iterations=0)
    assert start.error(gradient) > 2
    assert found.error(gradient) < 1
    ratios = found.left.values / start.left.values
    torch.testing.assert_close(ratios, ratios[0, 0].expand_as(ratios))
    for factor in (0.95, 1.05):
        other = Subspace(*(p.with_values(factor * p.values) for p in (found.left, found.right)))
        assert other.error(gradient) > found.error(gradient)


def test_second_moments_in_a_new_subspace_are_as_large_as_its_gradients() -> None:
    """Without what the old subspace did not see they are too small, and steps too large."""
    rank_two = [torch.randn(40, 2, dtype=torch.float64, generator=generator(i)) for i in range(2)]
    mixtures = torch.randn(60, 2, 2, dtype=torch.float64, generator=generator(2))
    gradients = [rank_two[0] @ mixture @ rank_two[1].t() for mixture in mixtures]
    start = drawn(40, 40, 8, 3)
    old = fit(start, torch.randn(40, 40, dtype=torch.float64, generator=generator(3)))  # sees little of them
    new = fit(start, gradients[0])
    second, expected = (torch.stack([s.compress(g).square() for g in gradients]).mean(0) for s in (old, new))
    first = torch.zeros(8, 8, dtype=torch.float64)
    _, alone = transport(old, new, first, second)
    _, whole = transport(old, new, first, second, unseen_energy(old, new, gradients[-1]))
    assert float(alone.sum()) < 0.1 * float(expected.sum())
    assert 0.3 < float(whole.sum() / expected.sum()) < 3
    assert float((whole - alone).min()) >= 0


def test_unseen_energy_is_a_part_of_the_gradients_and_has_no_scale() -> None:
    gradient = torch.randn(10, 8, dtype=torch.float64, generator=generator(4))
    old, new = drawn(10, 8, 6, 3, 0), drawn(10, 8, 6, 3, 1)
    energy = unseen_energy(old, new, gradient)
    seen = new.compress(old.decompress(old.compress(gradient)))
    missed = new.compress(gradient) - seen
    assert float(energy.sum()) == pytest.approx(float(missed.square().sum() / seen.square().sum()))
    torch.testing.assert_close(energy.sum(1) * seen.square().sum(), missed.square().sum(1))
    torch.testing.assert_close(unseen_energy(old, new, 1e4 * gradient), energy)
    whole = Subspace(identity(6), identity(6))
    assert float(unseen_energy(whole, whole, gradient[:6, :6]).abs().max()) < 1e-12
    assert not unseen_energy(old, new, torch.zeros(10, 8, dtype=torch.float64)).any()


def test_moments_are_carried_over() -> None:
    first, second = torch.randn(6, 6, dtype=torch.float64), torch.rand(6, 6, dtype=torch.float64)
    whole = Subspace(identity(6), identity(6))
    moved = transport(whole, whole, first, second)
    torch.testing.assert_close(moved[0], first)
    torch.testing.assert_close(moved[1], second)
    old, new = drawn(10, 8, 6, 3, 0), drawn(10, 8, 6, 3, 1)
    moved = transport(old, new, first, second)
    left, right = new.left.dense().t() @ old.left.dense(), old.right.dense().t() @ new.right.dense()
    torch.testing.assert_close(moved[0], left @ first @ right)
    torch.testing.assert_close(moved[1], left.square() @ second @ right.square())
    assert float(transport(old, new, first, torch.zeros(6, 6, dtype=torch.float64))[1].min()) >= 0

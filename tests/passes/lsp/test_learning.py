"""Projectors learned in closed form: they are what their docstrings say, and better than descent on other batches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from graphopt.passes.lsp import learning as block_projectors
from graphopt.passes.lsp.learning import draw_blocks, draw_moments
from graphopt.passes.lsp.projectors import Subspace, draw_subspace, entries_per_column, fit, transport
from hypothesis import given, strategies as st
from torch import Tensor

SIZES = st.tuples(st.integers(1, 40), st.integers(1, 40), st.integers(1, 40)).map(
    lambda t: (max(t), sorted(t)[1], min(t))  # d <= s <= m
)
EXACT = torch.float64


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=EXACT, generator=generator(seed))


def learned(gradients: list[Tensor], s: int, d: int, seed: int = 0) -> Subspace:
    moments = draw_moments((gradients[0].shape[0], gradients[0].shape[1]), s, d, generator(seed), EXACT)
    for gradient in gradients:
        moments = moments.add(gradient)
    return moments.subspace(s, d)


@given(SIZES, st.integers(1, 5), st.integers(0, 3))
def test_columns_are_orthonormal_distinct_in_a_row_and_balanced(sizes: tuple[int, int, int], n: int, gradients: int) -> None:
    m, s, d = sizes
    blocks = draw_blocks(m, s, d, generator(), EXACT)
    assert sorted(blocks.rows[blocks.rows >= 0].tolist()) == list(range(m))
    for i in range(gradients):
        blocks = blocks.add(random(m, n, seed=i))
    projector = blocks.projector(s, d)
    assert projector.values.shape == (m, d)
    if d < s:
        assert projector.columns.shape == (m, d)
        assert all(len(set(row)) == d for row in projector.columns.tolist())
        assert int(projector.columns.max()) < s
        assert projector.rows.shape == (s, entries_per_column(m, d, s))
    used = s // d * d
    gram = projector.dense().t() @ projector.dense()
    torch.testing.assert_close(gram[:used, :used], torch.eye(used, dtype=EXACT))
    assert not gram[used:].any()
    torch.testing.assert_close(projector.transposed_product(random(m, 2)), projector.dense().t() @ random(m, 2))


@given(SIZES)
def test_compression_is_a_projection_and_its_own_transport_the_identity(sizes: tuple[int, int, int]) -> None:
    """P2."""
    m, s, d = sizes
    gradient = random(m, m)
    subspace = learned([gradient], s, d)
    once = subspace.decompress(subspace.compress(gradient))
    torch.testing.assert_close(subspace.decompress(subspace.compress(once)), once)
    assert float(once.norm()) <= float(gradient.norm()) * (1 + 1e-12)
    compressed = subspace.compress(gradient)
    first, _ = transport(subspace, subspace, compressed, compressed.square())
    torch.testing.assert_close(first, compressed)


def test_no_other_values_in_the_same_blocks_represent_more_energy() -> None:
    gradients = [random(24, 7, seed=i) @ random(7, 10, seed=9) for i in range(3)]
    blocks = draw_blocks(24, 6, 2, generator(), EXACT)
    for gradient in gradients:
        blocks = blocks.add(gradient)

    def energy(dense: Tensor) -> float:
        return sum(float((dense.t() @ g).square().sum() / g.square().sum()) for g in gradients)

    best = blocks.projector(6, 2).dense()
    for seed in range(20):
        sums = blocks.sums + 0.1 * random(*blocks.sums.shape, seed=seed)
        other = replace(blocks, sums=sums + sums.transpose(1, 2))
        assert energy(other.projector(6, 2).dense()) < energy(best)


@given(SIZES, st.integers(1, 6))
def test_large_blocks_are_divided_and_their_parts_share_columns(sizes: tuple[int, int, int], largest: int) -> None:
    m, s, d = sizes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_projectors, "LARGEST", largest)
        blocks = draw_blocks(m, s, d, generator(), EXACT).add(random(m, 3))
    assert blocks.rows.shape[1] <= max(largest, 2 * d) + 1
    projector = blocks.projector(s, d)
    gram = projector.dense().t() @ projector.dense()
    torch.testing.assert_close(gram, torch.diag(torch.arange(s) < s // d * d).to(EXACT))
    assert projector.is_dense or int(projector.columns.flatten().bincount().max()) <= entries_per_column(m, d, s)


def test_a_vocabulary_is_learned_in_small_blocks() -> None:
    count, size, sharing = block_projectors.block_sizes(128_256, 512, 16)
    assert count == 32 * sharing
    assert size <= block_projectors.LARGEST


def test_the_size_of_a_gradient_does_not_matter_and_none_is_no_harm() -> None:
    gradients = [random(12, 9, seed=i) for i in range(3)]
    scaled = [gradients[0] * 1e150, gradients[1] * 1e-150, torch.zeros(12, 9, dtype=EXACT), gradients[2]]
    torch.testing.assert_close(learned(scaled, 6, 2).left.dense().abs(), learned(gradients, 6, 2).left.dense().abs())


@pytest.mark.parametrize(("s", "d"), [(16, 16), (16, 1)])
def test_nothing_is_lost_where_nothing_need_be(s: int, d: int) -> None:
    """One block of all rows sees a gradient of rank s whole; as many columns as rows see any gradient (P5)."""
    gradient = random(40, 16) @ random(16, 30, seed=1) if d == 16 else random(16, 16)
    assert learned([gradient], s, d).error(gradient) < 1e-12


def test_low_rank_gradients_are_represented_where_descent_leaves_a_tenth() -> None:
    """papers.md 2.4: 128 x 128, s = 64, d = 8, rank 8: 0.13 after 100 iterations of the paper's fit."""
    gradient = random(128, 8) @ random(8, 128, seed=1)
    assert learned([gradient], 64, 8).error(gradient) < 1e-12
    assert fit(draw_subspace((128, 128), 64, 8, generator()), gradient.float()).error(gradient.float()) > 0.05


def test_more_of_other_batches_is_represented_than_by_descent() -> None:
    """Gradients that share a part of their directions, as those of one model's batches do."""
    scale = 0.9 ** torch.arange(64, dtype=EXACT)
    basis = torch.linalg.qr(random(64, 64))[0]
    gradients = [basis * scale @ random(64, 64, seed=i) * scale @ basis.t() for i in range(1, 11)]
    seen, others = gradients[:5], gradients[5:]
    closed = learned(seen, 24, 4)
    fitted = fit(draw_subspace((64, 64), 24, 4, generator()), sum(seen[1:], seen[0]).float())

    def error(subspace: Subspace, dtype: torch.dtype) -> float:
        return sum(subspace.error(g.to(dtype)) for g in others) / len(others)

    assert error(closed, EXACT) < error(fitted, torch.float32) - 0.03


def test_fitting_further_stops_where_an_unseen_gradient_is_represented_worse() -> None:
    seen, unseen = random(20, 16), random(20, 16, seed=1)
    start = learned([seen], 8, 2)
    error = fit(start, seen, unseen=unseen).error(unseen)
    assert error <= start.error(unseen)
    assert fit(start, seen).error(unseen) >= error

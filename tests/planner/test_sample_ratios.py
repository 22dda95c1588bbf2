"""How ratios follow from what a calibration measured (papers.md 3.4, 3.8)."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from graphopt.planner.sample_ratios import Calibration, SampleRatios, adapt, bucket, kept_fraction

NORMS = st.lists(st.floats(0.0, 1e3), min_size=1, max_size=32).map(lambda v: torch.tensor(v, dtype=torch.float64))


def seen(norms: list[Tensor], rows: float, tokens: float = 0.0, batch: float = 1.0) -> Calibration:
    return Calibration({f"b{i}": [n] for i, n in enumerate(norms)}, batch, rows, {"w": 1.0}, {"w": tokens})


def chain(count: int) -> dict[str, str | None]:
    return {f"b{i}": f"b{i - 1}" if i else None for i in range(count)}


@given(NORMS, st.floats(0, 1))
def test_kept_rows_have_the_stated_part_of_the_norms_and_one_fewer_has_not(norms: Tensor, preserved: float) -> None:
    kept = round(kept_fraction(norms, preserved) * norms.numel())
    ordered = norms.sort(descending=True).values
    assert 1 <= kept <= norms.numel()
    if norms.sum() > 0:
        assert ordered[:kept].sum() >= preserved * norms.sum() * (1 - 1e-9)
        assert kept == 1 or ordered[: kept - 1].sum() < preserved * norms.sum() * (1 + 1e-9)


def test_the_ends_of_the_schedule() -> None:
    norms = torch.tensor([1.0, 0.0, 3.0, 2.0])
    assert kept_fraction(norms, 0.0) == 0.25
    assert kept_fraction(norms, 1.0) == 0.75
    assert kept_fraction(torch.zeros(4), 0.5) == 1.0
    assert kept_fraction(torch.tensor([1.0, math.nan]), 0.5) == 1.0


@given(st.lists(st.lists(st.floats(0.01, 10), min_size=8, max_size=8), min_size=2, max_size=5), st.booleans())
def test_rows_never_increase_towards_the_input_and_shrink_with_what_is_preserved(values: list[list[float]], big: bool) -> None:
    norms = [torch.tensor(v) for v in values]
    state = SampleRatios(0.8)
    after = adapt(state, seen(norms, 1.0 if big else 0.0), chain(len(norms)), 0.025)
    ratios = [after.rows[f"b{i}"] for i in range(len(norms))]
    assert ratios == sorted(ratios, reverse=True)
    assert after.preserved == pytest.approx(0.81 if big else 0.79)
    fewer = adapt(SampleRatios(0.4), seen(norms, 0.0), chain(len(norms)), 0.025)
    assert all(fewer.rows[name] <= after.rows[name] + 1e-12 for name in after.rows)


@pytest.mark.parametrize(("variance", "expected"), [(0.0, 0.95 * 0.5), (1.0, 0.5 / 0.95)])
def test_terms_follow_their_own_variance(variance: float, expected: float) -> None:
    """Eq. 7 with its sign corrected: more variance than allowed keeps more terms."""
    state = SampleRatios(1.0, {}, {"w": 0.5})
    assert adapt(state, seen([torch.ones(4)], 0.0, variance), chain(1), 0.025).tokens["w"] == pytest.approx(expected)


@given(st.lists(st.booleans(), min_size=1, max_size=120))
def test_state_stays_in_its_range(too_much: list[bool]) -> None:
    state = SampleRatios()
    for big in too_much:
        state = adapt(
            state, seen([torch.tensor([1.0, 2.0])], 9.0 if big else 0.0, 9.0 if big else 0.0), chain(1), 0.025, fewest=0.1
        )
        assert 0.0 <= state.preserved <= 1.0
        assert 0.0 < state.rows["b0"] <= 1.0
        assert 0.1 <= state.tokens["w"] <= 1.0


@pytest.mark.parametrize("batch", [0.0, math.nan, math.inf])
def test_nothing_to_compare_with_changes_nothing(batch: float) -> None:
    state = SampleRatios(0.7, {"b0": 0.5}, {"w": 0.5})
    assert adapt(state, seen([torch.ones(2)], 0.0, batch=batch), chain(1), 0.025) is state


@given(st.floats(0.001, 1.0))
def test_buckets_never_keep_less(ratio: float) -> None:
    assert ratio - 1e-9 <= bucket(ratio) <= min(1.0, ratio + 1 / 8)

"""How ratios follow from what a calibration measured (papers.md 3.4, 3.8)."""

from __future__ import annotations

import math

import pytest
import torch
from graphopt.passes.vcas.ratios import (
    Calibration,
    Norms,
    SampleRatios,
    bucket,
    corrected,
    kept_fraction,
    proposed,
)
from hypothesis import given, strategies as st
from torch import Tensor

NORMS = st.lists(st.floats(0.0, 1e3), min_size=1, max_size=32).map(lambda v: torch.tensor(v, dtype=torch.float64))


def seen(rows: float, tokens: float = 0.0, batch: float = 1.0) -> Calibration:
    return Calibration(batch, rows, {"w": 1.0}, {"w": tokens})


def chain(*norms: Tensor) -> Norms:
    return Norms({f"b{i}": [n] for i, n in enumerate(norms)}, {f"b{i}": f"b{i - 1}" if i else None for i in range(len(norms))})


def test_products_of_one_weight_share_what_is_allowed_of_it() -> None:
    one = Calibration(1.0, 0.0, {"w": 1.0, "v": 1.0}, {"w": 0.04, "v": 0.04})
    several = Calibration(1.0, 0.0, {"w": 1.0, "v": 1.0}, {"w": 0.04, "w #2": 0.04, "v": 0.04})
    assert one.too_few_terms(0.05) == []
    assert several.too_few_terms(0.05) == ["w", "w #2"]


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


@given(st.lists(st.lists(st.floats(0.01, 10), min_size=8, max_size=8), min_size=2, max_size=5))
def test_rows_never_increase_towards_the_input_and_shrink_with_what_is_preserved(values: list[list[float]]) -> None:
    norms = chain(*(torch.tensor(v) for v in values))
    state = SampleRatios(0.8)
    after = proposed(state, norms, ["w"])
    ratios = [after.rows[f"b{i}"] for i in range(len(values))]
    assert ratios == sorted(ratios, reverse=True)
    assert after.preserved == pytest.approx(0.79)
    assert after.tokens == {"w": 0.95}
    fewer = proposed(SampleRatios(0.4), norms, ["w"])
    assert all(fewer.rows[name] <= after.rows[name] + 1e-12 for name in after.rows)


def test_within_the_budget_a_proposal_stands() -> None:
    norms = chain(torch.arange(1.0, 9.0))
    state = SampleRatios(0.8, {"b0": 0.75}, {"w": 0.5})
    candidate = proposed(state, norms, ["w"])
    assert corrected(candidate, seen(0.025, 0.025), state, norms, 0.025, 0.025) is candidate


@pytest.mark.parametrize("much", [1.0, math.inf, math.nan])
def test_too_much_variance_raises_what_adds_it_and_nothing_else(much: float) -> None:
    """Eq. 5 and 7 with their signs corrected: more variance than allowed keeps more."""
    norms = chain(torch.arange(1.0, 9.0))
    state = SampleRatios(0.6, {"b0": 0.5}, {"w": 0.5})
    candidate = proposed(state, norms, ["w"])
    rows = corrected(candidate, seen(much, 0.0), state, norms, 0.025, 0.025)
    assert rows.rounded.rows["b0"] > candidate.rounded.rows["b0"]
    assert rows.tokens == candidate.tokens
    terms = corrected(candidate, seen(0.0, much), state, norms, 0.025, 0.025)
    assert terms.rounded.tokens["w"] == candidate.rounded.tokens["w"] + 1 / 8
    assert terms.rows == candidate.rows
    assert terms.preserved == candidate.preserved


@given(st.lists(st.booleans(), min_size=1, max_size=60))
def test_state_stays_in_its_range_and_corrections_end_with_every_row(too_much: list[bool]) -> None:
    state, norms = SampleRatios(), chain(torch.tensor([1.0, 2.0]))
    for big in too_much:
        candidate = proposed(state, norms, ["w"], fewest=0.1)
        for _ in range(40):
            better = corrected(candidate, seen(9.0 if big else 0.0, 9.0 if big else 0.0), state, norms, 0.025, 0.025)
            if better is candidate:
                break
            candidate = better
        state = candidate
        assert 0.0 <= state.preserved <= 1.0
        assert 0.0 < state.rows["b0"] <= 1.0
        assert 0.1 <= state.tokens["w"] <= 1.0
        if big:
            assert state.rows == {"b0": 1.0}
            assert state.tokens == {"w": 1.0}


@pytest.mark.parametrize("batch", [0.0, math.nan, math.inf])
def test_without_variance_of_the_batch_there_is_nothing_to_compare_with(batch: float) -> None:
    assert not seen(0.0, batch=batch).comparable


@given(st.floats(0.001, 1.0))
def test_buckets_never_keep_less(ratio: float) -> None:
    assert ratio - 1e-9 <= bucket(ratio) <= min(1.0, ratio + 1 / 8)


def test_without_rows_or_a_step_nothing_is_raised_for_their_variance() -> None:
    candidate = SampleRatios(0.9, {}, {"w": 0.8})
    assert corrected(candidate, seen(1e-14), SampleRatios(0.9, {}, {"w": 0.8}), Norms({}, {}), 0.0, 0.3, 0.0) is candidate

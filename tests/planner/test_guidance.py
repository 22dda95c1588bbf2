"""What a budget buys: points within their budgets, cliffs where a large part no longer fits, and suggestions that pay."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

import graphopt
from graphopt.analysis.flops import FlopProfile
from graphopt.api import worth
from graphopt.planner.capacity import capacity
from graphopt.planner.costs import BackwardCosts, smallest_ratio
from graphopt.planner.guidance import REACH, STEP, Worth, cliffs, next_better, worth_of_flops
from tests import zoo
from tests.planner.test_selection import best_value, chain, problems


def line(*points: tuple[float, float]) -> list[Worth]:
    return [Worth(flops, value, k) for k, (flops, value) in enumerate(points)]


STRAIGHT = line(*((0.3 + 0.02 * k, 0.1 + 0.02 * k) for k in range(36)))


def with_a_dear_gradient() -> tuple[BackwardCosts, list[float]]:
    """29 tensors that cost 20 each, and below them 5 that a gradient reaches for 195 and that are then had for nothing.

    A full step takes 1000, 195 of them in the forward, and 30 for a tensor that is worth nothing. From 0.4 of it on, the 5 fit.
    """
    classes = [(1 << k, 20) for k in range(29)] + [(1 << 29, 30), ((1 << 35) - (1 << 30), 195)]
    costs = BackwardCosts(tuple(f"t{k}" for k in range(35)), 195, tuple(classes), (*[20] * 29, 30, *[0] * 5))
    return costs, [*[1.0] * 29, 0.0, *[4.0] * 5]


@given(problems(), st.lists(st.floats(0.01, 1.0), max_size=3))
@settings(deadline=None, max_examples=40)
def test_every_point_is_within_its_budget_and_everything_is_trained_at_the_end(problem: Any, ratios: Any) -> None:
    costs, values = problem
    values = [max(0.0, value) for value in values]
    curve = worth_of_flops(costs, values, ratios)
    total = sum(values) or 1.0
    assert [w.flops for w in curve] == sorted({w.flops for w in curve})
    assert curve[0].flops == pytest.approx(smallest_ratio(costs), abs=1e-6)
    assert {round(r, 6) for r in ratios if r > smallest_ratio(costs)} <= {w.flops for w in curve}
    assert all(above.flops - below.flops <= STEP + 1e-6 for below, above in itertools.pairwise(curve))
    for w in curve[:-1]:
        assert w.value * total <= best_value(costs, values, w.flops) + 1e-6
    assert (curve[-1].flops, curve[-1].trained) == (1.0, len(costs.names))
    assert curve[-1].value == pytest.approx(sum(values) / total)


@given(problems("chain"))
@settings(deadline=None, max_examples=40)
def test_on_a_chain_more_flops_never_buy_less(problem) -> None:  # type: ignore[no-untyped-def]
    costs, values = problem
    curve = worth_of_flops(costs, [max(0.0, value) for value in values])
    assert all(above.value >= below.value - 1e-9 for below, above in itertools.pairwise(curve))


def test_tensors_that_do_harm_count_as_nothing_in_the_total() -> None:
    costs = chain([5, 5, 5], [5, 5, 5], 15)
    below, *_, full = worth_of_flops(costs, [2.0, -1.0, 2.0])
    assert below.value == pytest.approx(0.5)
    assert max(w.value for w in worth_of_flops(costs, [2.0, -1.0, 2.0])) <= 1.0
    assert full.trained == 3
    assert worth_of_flops(costs, [0.0, 0.0, 0.0])[-1].value == 0.0


def test_a_cliff_is_where_a_dear_gradient_begins_to_fit() -> None:
    costs, values = with_a_dear_gradient()
    assert (costs.forward_flops, costs.step_flops) == (195, 1000)
    curve = worth_of_flops(costs, values)
    assert {w.flops: round(w.value * 49) for w in curve if 0.35 < w.flops < 0.43} == {0.36: 8, 0.38: 9, 0.4: 20, 0.42: 21}
    assert cliffs(curve) == (0.4,)


def test_a_cliff_is_the_fraction_above_the_jump() -> None:
    curve = line((0.3, 0.1), (0.32, 0.11), (0.34, 0.12), (0.36, 0.4), (0.38, 0.41), (0.4, 0.42))
    assert cliffs(curve) == (0.36,)
    assert cliffs(STRAIGHT) == ()
    assert cliffs(STRAIGHT[:1]) == cliffs([]) == ()


def test_a_cliff_that_is_at_the_first_or_at_the_last_step_is_found() -> None:
    assert cliffs(line((0.3, 0.1), (0.32, 0.5), (0.34, 0.51))) == (0.32,)
    assert cliffs(line((0.3, 0.1), (0.32, 0.11), (0.34, 0.5))) == (0.34,)


def test_a_flat_curve_has_no_cliffs() -> None:
    assert cliffs(line((0.3, 0.5), (0.32, 0.5), (0.34, 0.5))) == ()


@pytest.mark.parametrize("flops", [0.2, 0.3, 0.5, 0.51, 0.98, 1.0])
def test_on_a_straight_line_nothing_is_better(flops: float) -> None:
    assert next_better(STRAIGHT, flops) is None


def test_below_a_cliff_the_step_over_it_is_suggested_and_above_it_none() -> None:
    curve = worth_of_flops(*with_a_dear_gradient())
    for flops in (0.36, 0.38, 0.39):
        found = next_better(curve, flops)
        assert found is not None
        assert (found.flops, found.trained) == (0.4, 5)
    for flops in (0.26, 0.4, 0.42, 0.7):
        assert next_better(curve, flops) is None


def test_a_budget_between_the_fractions_is_compared_from_where_it_is() -> None:
    curve = worth_of_flops(*with_a_dear_gradient(), ratios=(0.385,))
    found = next_better(curve, 0.385)
    assert found is not None
    assert found.flops == 0.4


def test_what_is_out_of_reach_is_not_suggested() -> None:
    far = 0.5 + REACH + 0.02
    assert next_better(line((0.5, 0.3), (0.52, 0.31), (0.56, 0.33), (0.6, 0.35), (far, 0.9)), 0.5) is None


def test_a_budget_below_the_smallest_or_above_all_has_no_suggestion() -> None:
    assert next_better(STRAIGHT, 0.1) is None
    assert next_better(STRAIGHT, 1.0) is None
    assert next_better([], 0.5) is None


def test_what_gains_nothing_is_not_suggested() -> None:
    assert next_better(line((0.5, 0.5), (0.52, 0.5), (0.54, 0.5), (0.56, 0.5)), 0.5) is None
    assert next_better(line((0.5, 0.5), (0.52, 0.49), (0.54, 0.48)), 0.5) is None


@given(problems(), st.floats(0.05, 1.0))
@settings(deadline=None, max_examples=40)
def test_a_suggestion_is_a_little_above_the_budget_and_worth_more(problem, flops) -> None:  # type: ignore[no-untyped-def]
    costs, values = problem
    curve = worth_of_flops(costs, [max(0.0, value) for value in values], (flops,))
    found = next_better(curve, flops)
    if found is None:
        return
    now = max((w for w in curve if w.flops <= flops + 1e-6), key=lambda w: w.flops)
    assert now.flops < found.flops <= now.flops + REACH + 1e-6
    assert found.value > now.value


def test_the_worth_of_a_model_is_found_without_a_step() -> None:
    model, inputs = zoo.make("mlp")
    curve = worth(graphopt.analyze(model, inputs).graph)
    assert curve[-1].value == pytest.approx(1.0)
    assert curve[-1].trained == len(list(model.parameters()))
    assert all(above.value >= below.value - 1e-9 for below, above in itertools.pairwise(curve))
    opt = graphopt.optimize(model, inputs, 0.6, backend="aot_eager")
    there = next(w for w in curve if math.isclose(w.flops, 0.6))
    analysis = graphopt.analyze(model, inputs)
    assert isinstance(analysis.flops, FlopProfile)
    values = capacity(analysis.graph, analysis.flops).values
    assert there.value == pytest.approx(sum(values[name] for name in opt.selected) / sum(values.values()))
    assert {p.grad for p in model.parameters()} == {None}

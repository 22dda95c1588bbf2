"""Simple rules: tensors in a stated order, as long as the exact cost allows."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from graphopt.planner.costs import BackwardCosts
from graphopt.planner.simple_rules import SIMPLE_RULES, Shapes, in_order, is_vector, shuffled, small_first, topmost
from tests.planner.test_selection import chain, problems

SHAPES = st.sampled_from([(), (5,), (1, 5), (1, 1), (4, 3), (2, 3, 4), (1, 7, 1)])


@st.composite
def shaped(draw: st.DrawFn) -> tuple[BackwardCosts, Shapes, int]:
    """Costs, shapes, and a limit."""
    costs, _ = draw(problems())
    shapes = {name: draw(SHAPES) for name in costs.names}
    return costs, shapes, draw(st.integers(-5, costs.backward_flops + 5))


def greedily(costs: BackwardCosts, order: list[int], chosen: list[int], limit: int) -> bool:
    """Whether each tensor of `order` was taken unless it and those taken before it cost more than the limit."""
    taken: list[int] = []
    for index in order:
        if (index in chosen) != (costs.cost([*taken, index]) <= limit):
            return False
        taken += [index] if index in chosen else []
    return taken == [k for k in order if k in chosen]


@given(shaped())
@settings(deadline=None, max_examples=100)
@pytest.mark.parametrize("name", SIMPLE_RULES)
def test_no_rule_exceeds_the_limit(name: str, problem: tuple[BackwardCosts, Shapes, int]) -> None:
    costs, shapes, limit = problem
    chosen = SIMPLE_RULES[name](costs, shapes, limit)
    assert chosen == sorted(set(chosen))
    assert not chosen or costs.cost(chosen) <= limit
    if limit >= costs.backward_flops:
        assert chosen == list(range(len(costs.names)))


@given(shaped(), st.randoms())
@settings(deadline=None, max_examples=100)
def test_tensors_are_taken_in_order_and_one_that_does_not_fit_is_passed_over(problem: Any, random: Any) -> None:
    costs, _, limit = problem
    order = list(range(len(costs.names)))
    random.shuffle(order)
    assert greedily(costs, order, in_order(costs, order, limit), limit)


@given(shaped())
@settings(deadline=None, max_examples=50)
def test_topmost_takes_from_the_output_down(problem: tuple[BackwardCosts, Shapes, int]) -> None:
    costs, shapes, limit = problem
    assert greedily(costs, list(range(len(costs.names))), topmost(costs, shapes, limit), limit)


def test_topmost_stops_where_the_next_does_not_fit() -> None:
    costs = chain([5, 5, 5, 5], [5, 5, 5, 5], 20)
    shapes = dict.fromkeys(costs.names, (2, 2))
    assert topmost(costs, shapes, 15) == [0, 1]
    assert topmost(costs, shapes, 14) == [0]
    assert topmost(costs, shapes, 4) == topmost(costs, shapes, -1) == []


@given(shaped())
@settings(deadline=None, max_examples=50)
def test_biases_and_norms_come_before_anything_else(problem: tuple[BackwardCosts, Shapes, int]) -> None:
    costs, shapes, limit = problem
    small = [k for k, name in enumerate(costs.names) if is_vector(shapes[name])]
    rest = [k for k in range(len(costs.names)) if k not in small]
    chosen = small_first(costs, shapes, limit)
    assert greedily(costs, [*small, *rest], chosen, limit)
    assert {k for k in chosen if k in small} == set(in_order(costs, small, limit))


def test_biases_are_trained_as_deep_as_the_limit_reaches_then_weights_from_the_top() -> None:
    costs = chain([0, 5, 0, 5, 0, 5], [0, 5, 0, 5, 0, 5], 20)  # bias and weight of three layers
    shapes = {name: (2, 2) if k % 2 else (2,) for k, name in enumerate(costs.names)}
    assert small_first(costs, shapes, 10) == [0, 2, 4]
    assert small_first(costs, shapes, 15) == [0, 1, 2, 4]
    assert topmost(costs, shapes, 15) == [0, 1, 2, 3]


@given(shaped(), st.integers(0, 1000))
@settings(deadline=None, max_examples=50)
def test_a_seed_draws_the_same_set_every_time(problem: tuple[BackwardCosts, Shapes, int], seed: int) -> None:
    costs, shapes, limit = problem
    assert shuffled(costs, shapes, limit, seed) == shuffled(costs, shapes, limit, seed)
    assert SIMPLE_RULES["random"](costs, shapes, limit) == shuffled(costs, shapes, limit, 0)


def test_seeds_draw_different_sets() -> None:
    costs = BackwardCosts(tuple("abcdefgh"), 8, tuple((1 << k, 1) for k in range(8)), (1,) * 8)
    shapes = dict.fromkeys(costs.names, (2, 2))
    drawn = [tuple(shuffled(costs, shapes, 4, seed)) for seed in range(20)]
    assert {len(chosen) for chosen in drawn} == {4}
    assert len(set(drawn)) > 5
    assert set().union(*drawn) == set(range(8))


@pytest.mark.parametrize("shape", [(), (5,), (1, 5), (5, 1, 1), (1, 1), (1,)])
def test_what_has_one_dimension_but_for_ones_is_a_vector(shape: tuple[int, ...]) -> None:
    assert is_vector(shape)


@pytest.mark.parametrize("shape", [(2, 2), (1, 3, 4), (8, 3, 3, 3)])
def test_what_has_more_is_not(shape: tuple[int, ...]) -> None:
    assert not is_vector(shape)

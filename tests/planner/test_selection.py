"""Selection: brute force on small problems, stated properties on random ones (papers.md, properties P1 to P5 and P10)."""

import itertools
import re

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from graphopt import BudgetError, ImportanceError
from graphopt.planner.costs import BackwardCosts, smallest_ratio
from graphopt.planner.knapsack import chain_knapsack
from graphopt.planner.selection import select
from tests.planner.paper_selection import paper_selection


def chain(dw: list[int], dy: list[int], forward: int) -> BackwardCosts:
    """A chain: passing the gradient below tensor i costs dy[i], and serves every deeper tensor."""
    n = len(dw)
    classes = [(1 << i, w) for i, w in enumerate(dw) if w]
    classes += [((1 << n) - (1 << i + 1), y) for i, y in enumerate(dy[:-1]) if y]
    return BackwardCosts(tuple(f"t{i}" for i in range(n)), forward, tuple(classes), tuple(dw))


@st.composite
def problems(draw: st.DrawFn, kind: str = "any") -> tuple[BackwardCosts, list[float]]:
    n = draw(st.integers(2, 8))
    flops = st.integers(0, 30)
    forward = draw(st.integers(1, 100))
    importance = draw(st.lists(st.integers(-3, 20).map(float), min_size=n, max_size=n))
    dw = draw(st.lists(flops, min_size=n, max_size=n))
    if kind == "chain" or draw(st.booleans()):
        return chain(dw, draw(st.lists(flops, min_size=n, max_size=n)), forward), importance
    shared = draw(st.lists(st.tuples(st.integers(1, 2**n - 1), st.integers(1, 30)), max_size=8))
    classes = [(1 << i, w) for i, w in enumerate(dw) if w] + shared
    return BackwardCosts(tuple(f"t{i}" for i in range(n)), forward, tuple(classes), tuple(dw)), importance


def best_value(costs: BackwardCosts, importance: list[float], ratio: float) -> float:
    limit = costs.affordable(ratio)
    n = len(importance)
    subsets = itertools.chain.from_iterable(itertools.combinations(range(n), k) for k in range(n + 1))
    return max(sum(importance[i] for i in s) for s in subsets if costs.cost(s) <= limit)


RATIOS = st.floats(0.3, 1.0)


@given(problems(), RATIOS, st.booleans(), st.integers(1, 50))
@settings(deadline=None, max_examples=150)
def test_the_budget_is_never_exceeded(problem, ratio, quick, resolution) -> None:  # type: ignore[no-untyped-def]
    costs, importance = problem
    try:
        selection = select(costs, importance, ratio, quick=quick, resolution=resolution)
    except BudgetError:
        return
    chosen = [costs.names.index(n) for n in selection.names]
    assert selection.backward_flops == costs.cost(chosen)
    assert selection.backward_flops <= costs.affordable(ratio)


@given(problems(), RATIOS)
@settings(deadline=None, max_examples=100)
def test_the_optimum_is_found_on_any_graph(problem, ratio) -> None:  # type: ignore[no-untyped-def]
    costs, importance = problem
    if ratio == 1.0:
        return
    try:
        selection = select(costs, importance, ratio)
    except BudgetError:
        return
    assert selection.value == pytest.approx(best_value(costs, importance, ratio))


@given(problems("chain"), RATIOS)
@settings(deadline=None, max_examples=100)
def test_the_knapsack_is_exact_on_chains(problem, ratio) -> None:  # type: ignore[no-untyped-def]
    costs, importance = problem
    limit = costs.affordable(ratio)
    if limit < 0:
        return
    chosen = chain_knapsack(costs, importance, limit, max(limit, 1))  # one step per FLOP: nothing is rounded
    assert sum(importance[i] for i in chosen) == pytest.approx(best_value(costs, importance, ratio))


@given(problems(), st.data())
def test_the_chain_model_never_undercounts(problem, data) -> None:  # type: ignore[no-untyped-def]
    costs, importance = problem
    chosen = data.draw(st.sets(st.integers(0, len(importance) - 1), min_size=1))
    modelled = costs.chain_prefix[max(chosen)] + sum(costs.weight_grad_flops[i] for i in chosen)
    assert modelled >= costs.cost(chosen) >= 0


@given(problems(), RATIOS, RATIOS)
@settings(deadline=None, max_examples=50)
def test_more_budget_is_never_worth_less(problem, first, second) -> None:  # type: ignore[no-untyped-def]
    costs, importance = problem
    low, high = sorted((first, second))
    try:
        small = select(costs, importance, low)
    except BudgetError:
        return
    if high < 1:
        assert select(costs, importance, high).value >= small.value - 1e-9


@given(problems(), st.floats(0.4, 0.99), st.integers(2, 1000), st.floats(0.01, 100))
@settings(deadline=None, max_examples=50)
def test_units_of_cost_and_importance_do_not_matter(problem, ratio, factor, scale) -> None:  # type: ignore[no-untyped-def]
    costs, importance = problem
    scaled = BackwardCosts(
        costs.names,
        costs.forward_flops * factor,
        tuple((mask, flops * factor) for mask, flops in costs.classes),
        tuple(w * factor for w in costs.weight_grad_flops),
    )
    try:
        expected = select(costs, importance, ratio)
    except BudgetError:
        return
    assert select(scaled, [i * scale for i in importance], ratio).value == pytest.approx(expected.value * scale)


@given(problems(), RATIOS)
@settings(deadline=None, max_examples=50)
def test_the_smallest_feasible_ratio_can_be_typed_back(problem, ratio) -> None:  # type: ignore[no-untyped-def]
    costs, _ = problem
    importance = [1.0] * len(costs.names)
    assert select(costs, importance, smallest_ratio(costs)).names
    try:
        select(costs, importance, ratio)
    except BudgetError as error:
        stated = float(re.search(r"Smallest feasible: ([\d.]+)\.$", str(error)).group(1))  # type: ignore[union-attr]
        assert select(costs, importance, stated).names
        assert stated > ratio


def test_a_full_budget_trains_everything() -> None:
    costs = chain([5, 5, 5], [5, 5, 5], 15)
    assert select(costs, [1.0, -1.0, 0.0], 1.0).names == costs.names


def test_tensors_without_cost_are_always_taken_and_harmful_ones_never() -> None:
    costs = chain([10, 0, 10, 0], [10, 0, 10, 0], 20)
    selection = select(costs, [5.0, 1e-6, -2.0, 4.0], 0.8)
    assert "t1" in selection.names
    assert "t2" not in selection.names
    assert select(costs, [-1.0, -1.0, 0.0, -2.0], 0.9).names == ()


def opt_2_7b() -> BackwardCosts:
    """516 tensors shaped like OPT-2.7B at batch 4 x 512."""
    product = 2 * 2048 * 2560 * 2560
    core = 5 * 2 * 4 * 512 * 512 * 2560
    layer = [(0, 0), (4 * product, 4 * product)] * 2 + [(0, 0), (0, 0), (0, 0), (product, product + core)]
    layer += [(0, 0), (product, product)] * 3 + [(0, 0), (0, 0)]
    tensors = [(0, 0), (0, 0), *(layer * 32), (0, 0), (2 * 2048 * 2560 * 50272, 0)]
    costs = chain([w for w, _ in tensors], [y for _, y in tensors], 32 * (12 * product + core // 2))
    head = ((1 << len(tensors)) - 1, 2 * 2048 * 2560 * 50272)
    return BackwardCosts(costs.names, costs.forward_flops + head[1], (*costs.classes, head), costs.weight_grad_flops)


@pytest.mark.parametrize("ratio", [0.4, 0.5, 0.7])
def test_little_of_the_budget_is_wasted_at_scale(ratio: float) -> None:
    costs = opt_2_7b()
    assert len(costs.names) == 516
    importance = np.random.default_rng(0).exponential(size=516).tolist()
    selection = select(costs, importance, ratio, quick=True)
    assert ratio - 0.005 < costs.part(costs.forward_flops + selection.backward_flops) <= ratio


def test_the_papers_own_rounding_exceeds_the_budget_where_ours_does_not() -> None:
    costs = opt_2_7b()
    n = len(costs.names)
    dy = [costs.chain_prefix[i + 1] - costs.chain_prefix[i] if i + 1 < n else 0 for i in range(n)]
    importance = np.random.default_rng(1).exponential(size=n).tolist()
    limit = costs.affordable(0.7)
    theirs = paper_selection(dy, costs.weight_grad_flops, importance, limit, resolution=100)
    assert costs.cost(theirs) > limit
    assert select(costs, importance, 0.7, quick=True, resolution=100).backward_flops <= limit


def test_the_papers_recurrence_finds_no_more_than_ours() -> None:
    costs = chain([5, 5, 5, 5, 5], [5, 5, 5, 5, 5], 25)
    importance = [3.0, 1.0, 2.0, 5.0, 4.0]
    theirs = paper_selection([5, 5, 5, 5, 0], costs.weight_grad_flops, importance, costs.affordable(0.8), resolution=1_000)
    ours = select(costs, importance, 0.8)
    assert 0 < sum(importance[i] for i in theirs) <= ours.value


def test_importance_must_be_finite() -> None:
    with pytest.raises(ImportanceError, match="finite"):
        select(chain([1, 1], [1, 1], 1), [float("nan"), 1.0], 0.9)

from typing import Any

import numpy as np
import pytest
from graphopt.passes import DeadRows, GreenTrainer, LinearCrossEntropy, RunLora
from hypothesis import given, strategies as st

from graphopt import Budget, BudgetError, PassError
from graphopt.budget import parse_bytes
from graphopt.planner.plan import resolve_passes


@pytest.mark.parametrize("flops", [0, -0.1, 1.0001, float("nan"), float("inf"), "0.5", True])
def test_flops_outside_its_range_is_refused_at_construction(flops: object) -> None:
    with pytest.raises(BudgetError, match="flops="):
        Budget(flops=flops)  # type: ignore[arg-type]


@pytest.mark.parametrize("memory", ["24 elephants", "-1GiB", 0, "", "GiB", -5])
def test_malformed_memory_is_refused(memory: object) -> None:
    with pytest.raises(BudgetError, match="memory="):
        Budget(memory=memory)  # type: ignore[arg-type]


@pytest.mark.parametrize("variance", [0, -1, float("nan")])
def test_variance_must_be_positive(variance: float) -> None:
    with pytest.raises(BudgetError, match="variance="):
        Budget(variance=variance)


def test_a_number_of_any_size_and_of_numpys_is_a_number() -> None:
    for name in ("memory", "flops", "variance"):
        with pytest.raises(BudgetError, match=f"{name}="):
            Budget(**{name: 10**400})
    assert Budget(flops=np.float32(0.5), variance=np.float64(0.1)) == Budget(flops=0.5, variance=0.1)
    assert Budget.of(np.float32(0.5)).stated() == {"flops": 0.5}


def test_memory_units() -> None:
    assert Budget(memory="24GiB").memory == 24 * 2**30
    assert Budget(memory="800 MB").memory == 800 * 10**6
    assert parse_bytes("1.5kib") == 1536


@given(st.floats(min_value=0, max_value=1, exclude_min=True))
def test_a_bare_number_is_a_flops_fraction(value: float) -> None:
    assert Budget.of(value) == Budget(flops=value)


def test_a_budget_by_itself_begins_with_half_of_the_flops_and_may_be_raised() -> None:
    assert Budget.of("auto") == Budget(flops=0.5, or_more=True)
    with pytest.raises(BudgetError, match="or_more=True needs flops="):
        Budget(or_more=True)
    with pytest.raises(BudgetError, match="nor 'auto'"):
        Budget.of("automatic")  # type: ignore[arg-type]


def test_fields_that_no_pass_serves_are_refused_not_ignored() -> None:
    with pytest.raises(BudgetError, match="served by no pass"):
        resolve_passes([], Budget(variance=0.1))
    with pytest.raises(BudgetError, match="served by no pass"):
        resolve_passes([], Budget(flops=0.5))


def test_auto_runs_only_what_the_budget_needs() -> None:
    exact = (DeadRows(), RunLora(), LinearCrossEntropy())
    assert resolve_passes("auto", Budget()) == exact
    assert resolve_passes("auto", Budget(flops=0.5)) == (exact[0], GreenTrainer(), *exact[1:])


@pytest.mark.parametrize("passes", [None, GreenTrainer(), GreenTrainer, "greentrainer"])
def test_passes_that_are_no_list_are_refused(passes: Any) -> None:
    with pytest.raises(PassError, match="use 'auto' or a list of"):
        resolve_passes(passes, Budget())

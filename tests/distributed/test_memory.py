"""The memory of a rank, predicted where there are no others, beside what the allocator says on each of two."""

from __future__ import annotations

import pytest

import graphopt
from graphopt.planner.parallel import Layout, Method, strategy_bytes
from graphopt.planner.sharded_memory import sharded_peak
from tests import zoo
from tests.distributed import work_memory
from tests.distributed.spawned import results

Measured = list[dict[tuple[str, str], int]]


@pytest.fixture(scope="module")
def measured() -> Measured:
    return results(work_memory.work)


def analysis_of(name: str) -> graphopt.Analysis:
    made = work_memory.half_frozen() if name == work_memory.FROZEN else zoo.make(name, work_memory.BATCH)
    return graphopt.analyze(*made, backend="aot_eager")


@pytest.mark.parametrize("name", work_memory.AVERAGED)
def test_the_peak_of_a_rank_that_averages_is_the_allocators(measured: Measured, name: str) -> None:
    analysis = analysis_of(name)
    on_two = analysis.memory_on(2)
    assert on_two is not None
    for found in measured:
        assert on_two.peak_bytes == pytest.approx(found["averaged", name], rel=0.01)
    assert on_two.peak_bytes < strategy_bytes(analysis.memory, Layout(Method.CDP, 2))


@pytest.mark.parametrize("name", [*work_memory.SHARDED, work_memory.FROZEN])
def test_the_peak_of_a_rank_with_sharded_weights_is_the_allocators(measured: Measured, name: str) -> None:
    memory = analysis_of(name).memory
    fullest = max(found["sharded", name] for found in measured)  # rows that two ranks cannot divide make the other's less
    assert sharded_peak(memory, 2, copies=True) == pytest.approx(fullest, rel=0.01)  # gloo copies what it gathers
    assert sharded_peak(memory, 2) <= sharded_peak(memory, 2, copies=True)

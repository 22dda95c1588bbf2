"""The memory of a rank, predicted where there are no others, beside what the allocator says on each of two."""

from __future__ import annotations

import pytest

import graphopt
from graphopt.analysis.layouts import Layout, Method
from graphopt.planner.parallel import strategy_bytes
from tests import zoo
from tests.distributed import work_memory
from tests.distributed.spawned import results


@pytest.fixture(scope="module")
def measured() -> list[dict[str, int]]:
    return results(work_memory.work)


@pytest.mark.parametrize("name", work_memory.MODELS)
def test_the_peak_of_a_rank_is_the_allocators(measured: list[dict[str, int]], name: str) -> None:
    analysis = graphopt.analyze(*zoo.make(name, work_memory.BATCH), backend="aot_eager")
    alone, on_two = analysis.memory, analysis.memory_on(2)
    assert on_two is not None
    for found in measured:
        assert on_two.peak_bytes - on_two.static_bytes == pytest.approx(found[name], rel=0.01)
    assert on_two.peak_bytes < strategy_bytes(alone, Layout(Method.CDP, 2))

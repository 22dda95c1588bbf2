"""Averaging in the graph, for models and loops that are out of the ordinary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed import work_mesh_models
from tests.distributed.spawned import results


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.long)])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("ranks")
    return results(work_mesh_models.work, str(folder), size=request.param)


@pytest.mark.parametrize(("name", "in_graph"), [("Tied", True), ("Sparse", False), ("Mixed", True)])
def test_models(ranks: list[dict[str, Any]], name: str, in_graph: bool) -> None:
    for found in ranks:
        assert found[name][0] < 1e-5
        assert found[name][1] == in_graph


@pytest.mark.parametrize("name", ["ways", "orders", "logits", "copies"])
def test_loops(ranks: list[dict[str, Any]], name: str) -> None:
    for found in ranks:
        assert max(found[name]) < 1e-5, found[name]


def test_ranks_stay_together_with_a_sampler(ranks: list[dict[str, Any]]) -> None:
    assert len({found["sampled"] for found in ranks}) == 1


def test_a_state_is_read_on_any_number_of_ranks(ranks: list[dict[str, Any]]) -> None:
    assert len({str(found["state"]) for found in ranks}) == 1
    assert ranks[0]["state"][0] == ranks[0]["state"][1]


def test_verify_compares_a_rank_with_itself(ranks: list[dict[str, Any]]) -> None:
    assert {found["verified"] for found in ranks} == {"OptimizedModule"}

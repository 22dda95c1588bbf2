"""The Trainer of transformers on two ranks, with gradients averaged in the graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import work_trainer
from tests.distributed.spawned import results


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("trainer")
    return results(work_trainer.work, str(folder))


@pytest.mark.parametrize("accumulation", [1, 2])
def test_weights_are_those_of_the_trainer_alone(ranks: list[dict[str, Any]], accumulation: int) -> None:
    for found in ranks:
        plain, ours = found[f"accumulation {accumulation}"]
        for name, weight in plain.items():
            torch.testing.assert_close(ours[name], weight, rtol=0, atol=2e-5, msg=name)
        assert found["wrapped"] == ("DistributedDataParallel", ["unless_silenced"])


def test_ranks_that_the_trainer_does_not_know_of_are_refused(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["alone"].startswith("InputError: mesh= has 2 ranks, and the Trainer does not know of them.")


def test_a_selection_is_trained_alike_and_sent_alone(ranks: list[dict[str, Any]]) -> None:
    names, weights, sent = ranks[0]["selected"]
    assert ranks[1]["selected"][0] == names
    assert sent == ranks[0]["gradients"]
    for name, weight in weights.items():
        assert torch.equal(weight, ranks[1]["selected"][1][name]), name


def test_what_is_more_than_the_optimised_model_is_averaged_as_before(ranks: list[dict[str, Any]]) -> None:
    assert [found["part"] for found in ranks] == [[0.0] * 4] * 2


@pytest.mark.parametrize("name", ["exact", "selected"])
def test_weights_that_the_trainer_divides(ranks: list[dict[str, Any]], name: str) -> None:
    for found in (of["fsdp"] for of in ranks):
        plain, ours, selected = found[name]
        assert (len(selected) < len(plain)) == (name == "selected")
        assert selected == ranks[0]["fsdp"][name][2]
        for parameter, weight in plain.items():
            torch.testing.assert_close(ours[parameter], weight, rtol=0, atol=2e-5, msg=parameter)
        assert found[f"{name}, done"] == (0, 0, True)


def test_what_the_trainer_cannot_divide_under_a_plan_is_refused(ranks: list[dict[str, Any]]) -> None:
    for found in (of["fsdp"] for of in ranks):
        assert found["given"].startswith("InputError: TrainerCallback(opt): the Trainer divides the weights only now")
        assert "FSDP2 (fsdp_config={'version': 2})" in found["version 1"]

"""DistributedDataParallel around an optimised module, on two ranks with quite different data."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed import work_ddp
from tests.distributed.spawned import results
from tests.distributed.work_ddp import joint_batch, model, optimised


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return results(work_ddp.work)


def of_joint_batch(seed: int = 1, change: Any = None) -> dict[str, Tensor]:
    """Autograd's gradients in one process."""
    eager = model()
    if change is not None:
        change(eager)
    eager(*joint_batch(seed))[0].backward()
    return {name: p.grad for name, p in eager.named_parameters() if p.grad is not None}


def assert_mean(found: dict[str, Tensor | None], wanted: dict[str, Tensor], selected: list[str]) -> None:
    assert sorted(name for name, gradient in found.items() if gradient is not None) == sorted(selected)
    for name in selected:
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-5, atol=1e-7)


def test_ranks_select_what_one_process_selects_on_the_joint_batch(ranks: list[dict[str, Any]]) -> None:
    joint = optimised(joint_batch())
    assert ranks[0]["selected alone"] != ranks[1]["selected alone"]
    assert ranks[0]["selected"] == ranks[1]["selected"] == sorted(joint.selected)
    assert ranks[0]["importance"] == ranks[1]["importance"]
    for name, value in joint.plan.importance.values.items():
        assert ranks[0]["importance"][name] == pytest.approx(value, abs=1e-5)
    for name, norm in optimised(joint_batch(), passes="auto").plan.importance.norms.items():
        assert ranks[0]["steepness"][name] == pytest.approx(norm, rel=1e-4)


def test_gradients_are_the_mean_and_the_graph_is_whole(ranks: list[dict[str, Any]]) -> None:
    wanted, more = of_joint_batch(), of_joint_batch(2)
    for found in ranks:
        assert found["buckets"] > 2
        assert found["regions"] == 1
        assert_mean(found["gradients"], wanted, found["selected"])
        assert_mean(found["exact"], wanted, list(wanted))
        total = {name: gradient + more[name] for name, gradient in wanted.items()}
        assert_mean(found["accumulated"], total, found["selected"])


def test_options_that_cannot_work_are_refused_with_the_remedy(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        for name in ("by default", "static"):
            assert found[name].startswith("InputError")
            assert "DistributedDataParallel(opt, find_unused_parameters=True)" in found[name]
        assert "trains on 2 ranks, and optimize() made a plan for 1" in found["another group"]
        assert "every rank would select tensors by itself" in found["backend"]
        assert found["lsp"].startswith("PassError: lsp cannot train on several ranks: it keeps gradients where")


def test_selecting_anew_agrees(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["reselected"] == ranks[1]["reselected"]
    assert ranks[0]["reselected"][0]
    assert ranks[0]["reselected"][2] != ranks[0]["selected"]
    assert ranks[0]["reselected anew"] == ranks[1]["reselected anew"]

    def doubled(eager: Any) -> None:
        with torch.no_grad():
            eager.head.weight.mul_(2)

    wanted = of_joint_batch(5, doubled)
    for found in ranks:
        assert_mean(found["after reselecting"], wanted, found["reselected anew"][1])


def test_a_mismatch_raises_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["mismatch"].startswith("RankError: ranks 0 and 1 do not agree on a plan to adopt")
        assert not found["mismatch changed"]


def test_an_error_on_one_rank_is_raised_on_all(ranks: list[dict[str, Any]]) -> None:
    own, theirs = ranks[1]["bad batch"], ranks[0]["bad batch"]
    assert own.startswith("BatchError")
    assert theirs.startswith("BatchError: on rank 1: ")
    for found in ranks:
        assert found["after that"] == found["selected"]
    for mine, others in zip(ranks[0]["no batch"], ranks[1]["no batch"], strict=True):
        assert mine.startswith("InputError")
        assert others.startswith("InputError: on rank 0: ")


def test_a_limit_on_memory_that_only_one_rank_exceeds(ranks: list[dict[str, Any]]) -> None:
    assert ranks[1]["memory alone"][0] == len(dict(model().named_parameters())) - 1  # `unused`
    assert ranks[0]["memory alone"][1] == ranks[1]["memory alone"][1]
    assert 0 < len(ranks[0]["memory alone"][1]) < ranks[1]["memory alone"][0]


def test_a_rank_that_cannot_compile_trains_the_same_tensors(ranks: list[dict[str, Any]]) -> None:
    wanted = of_joint_batch()
    for found in ranks:
        assert_mean(found["fell back"], wanted, found["selected"])
    assert any("no compiler here" in note for note in ranks[1]["fell back notes"])
    assert ranks[0]["fell back notes"] == []


def test_samplers_have_the_same_ratios_and_other_draws(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["ratios"]
    for name in ("ratios", "variances", "weights"):
        assert ranks[0][name] == ranks[1][name]
    assert not set(ranks[0]["draws"]) & set(ranks[1]["draws"])
    assert ranks[0]["copied"] == 2

"""How ranks agree, and what they are told when one of them fails, is missing, or is somewhere else."""

from __future__ import annotations

import copy
import os
import pickle
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from graphopt.compat.distributed import store_of
from graphopt.distributed.agreement import require_same_weights
from graphopt.distributed.ranks import Ranks
from graphopt.errors import BudgetError, InputError, RankError
from tests.distributed.spawned import on_ranks, results


def _error(make: Any) -> tuple[str, str, float]:
    start = time.monotonic()
    try:
        make()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "", "", time.monotonic() - start


def _fails(rank: int, error: Exception) -> int:
    if rank == 1:
        raise error
    return rank


def agreeing(rank: int) -> dict[str, Any]:
    ranks = Ranks()
    found: dict[str, Any] = {"size": (ranks.size, ranks.rank, pickle.loads(pickle.dumps(ranks)).size, copy.deepcopy(ranks).rank)}
    found["gather"] = ranks.gather({"of": rank}, "a")
    found["same"] = ranks.same(f"of {rank}", "b")
    found["all"] = ranks.all(True, "c"), ranks.all(rank == 0, "c")
    sparse = torch.eye(2).to_sparse() if rank == 0 else None
    half = torch.full((2,), 1 + 2.0**-7 * (1 + rank), dtype=torch.bfloat16)
    found["mean"] = ranks.mean([torch.tensor([1.0, rank]), None, sparse, half], "d")
    found["together"] = ranks.together(lambda: rank, "e")
    found["told"] = _error(lambda: ranks.together(lambda: _fails(rank, BudgetError("too little")), "f"))
    found["odd"] = _error(lambda: ranks.together(lambda: _fails(rank, UnicodeDecodeError("utf-8", b"x", 0, 1, "bad")), "g"))

    def inner() -> Any:
        if rank == 1:
            raise BudgetError("before they meet")
        return ranks.gather(rank, "inside")

    found["nested"] = _error(lambda: ranks.together(inner, "outside"))
    found["told inside"] = _error(
        lambda: ranks.together(lambda: ranks.together(lambda: _fails(rank, OSError("no")), "in"), "out")
    )
    found["differ"] = _error(lambda: ranks.check_same(rank, "the plan"))
    found["elsewhere"] = _error(lambda: ranks.gather(rank, f"place {rank}"))
    found["smallest"] = float(ranks.smallest(torch.tensor(float(rank))))
    found["in step"] = ranks.gather(rank, "z")
    return found


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return results(agreeing)


def test_what_they_agree_on(found: list[dict[str, Any]]) -> None:
    for rank, own in enumerate(found):
        assert own["size"] == (2, rank, 2, rank)
        assert own["gather"] == [{"of": 0}, {"of": 1}]
        assert own["same"] == "of 0"
        assert own["all"] == (True, False)
        assert own["together"] == rank
        assert own["smallest"] == 0.0
        assert own["in step"] == [0, 1]
        mean, nothing, sparse, half = own["mean"]
        assert nothing is None
        assert torch.equal(mean, torch.tensor([1.0, 0.5]))
        assert torch.equal(sparse, torch.eye(2) / 2)
        assert torch.equal(half, torch.full((2,), 1 + 1.5 * 2.0**-7))  # which bfloat16 does not have


def test_an_error_on_one_rank_is_raised_on_all(found: list[dict[str, Any]]) -> None:
    assert found[0]["told"][:2] == ("BudgetError", "on rank 1: too little")
    assert found[1]["told"][:2] == ("BudgetError", "too little")
    assert found[0]["odd"][0] == "UnicodeError"  # the nearest base that takes a message alone
    assert found[1]["odd"][0] == "UnicodeDecodeError"
    assert found[0]["nested"][:2] == ("RankError", "rank 1 failed at outside (BudgetError): before they meet")
    assert found[1]["nested"][:2] == ("BudgetError", "before they meet")
    assert [own["told inside"][:2] for own in found] == [("OSError", "on rank 1: no"), ("OSError", "no")]


def test_ranks_that_differ_are_told_on_every_rank(found: list[dict[str, Any]]) -> None:
    for rank, own in enumerate(found):
        assert own["differ"][0] == own["elsewhere"][0] == "RankError"
        assert "ranks 0 and 1 do not agree on the plan" in own["differ"][1]
        assert f"rank {rank} is at place {rank}, and rank {1 - rank} at place {1 - rank}" in own["elsewhere"][1]


def missing(rank: int) -> Any:
    store = store_of(dist.group.WORLD)
    if rank == 1:
        store.wait(["rank 0 has joined"])  # one that is killed before is missed by the process group itself
        os.kill(os.getpid(), 9)
    store.set("rank 0 has joined", "")
    return _error(lambda: Ranks().gather(rank, "planning"))


def test_a_rank_that_was_killed_is_named_once_the_time_is_up() -> None:
    kind, message, seconds = on_ranks(missing, timeout=3)[0]
    assert kind == "RankError"
    assert "rank 1 did not come to planning" in message
    assert seconds < 30


def test_one_process_is_alone() -> None:
    ranks = Ranks()
    assert (ranks.size, ranks.several) == (1, False)
    assert ranks.gather(3, "a") == [3]
    assert ranks.same(3, "a") == 3
    tensor = torch.ones(2, dtype=torch.bfloat16)
    assert ranks.mean([tensor, None], "a")[0] is tensor
    ranks.check_same(3, "a")
    with pytest.raises(RankError, match="own"):
        ranks.together(lambda: _fails(1, RankError("own")), "a")


def test_equal_weights_are_equal_with_any_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum of floating-point numbers depends on the order in which threads take them."""
    weights = nn.ParameterDict({"a": torch.randn(3_000_001), "b": torch.randn(3, dtype=torch.complex64)})
    weights["c"] = nn.Parameter(torch.tensor([True]), requires_grad=False)
    weights["d"] = nn.Parameter(torch.randn(3, dtype=torch.complex64).conj(), requires_grad=False)
    before, others = torch.get_num_threads(), []
    ranks = Ranks.alone()
    monkeypatch.setattr(ranks, "gather", lambda value, what: others.append(value) or others)
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            require_same_weights(weights, ranks)
    finally:
        torch.set_num_threads(before)
    with torch.no_grad():
        weights["b"][0].neg_()
    with pytest.raises(InputError, match="b is not the same on ranks 0 and 3"):
        require_same_weights(weights, ranks)

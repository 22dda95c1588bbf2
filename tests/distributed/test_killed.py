"""A rank that is killed in the middle of training: the others learn of it in time, and any number of ranks goes on."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.distributed import work_killed
from tests.distributed.spawned import on_ranks, results

TIMEOUT = 10.0


def mean(of_ranks: list[dict[int, float]]) -> dict[int, float]:
    return {step: sum(losses[step] for losses in of_ranks) / len(of_ranks) for step in of_ranks[0]}


def test_others_learn_of_it_and_training_goes_on_with_one_rank_or_two(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("whole", "killed", "alone")]
    for folder in folders[:2]:
        folder.mkdir()
    whole = mean(results(work_killed.work, str(folders[0]), None))
    survivor, killed = on_ranks(work_killed.work, str(folders[1]), 4, timeout=TIMEOUT)
    assert killed is None
    message, seconds = survivor
    assert message
    assert seconds < TIMEOUT + 5
    shutil.copytree(folders[1], folders[2])
    for folder, size in ((folders[1], 2), (folders[2], 1)):
        rest = mean(results(work_killed.work, str(folder), None, size=size))
        assert sorted(rest) == [4, 5, 6]
        assert rest == pytest.approx({step: whole[step] for step in rest}, abs=1e-5)

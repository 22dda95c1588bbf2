"""A rank that is killed in the middle of training: the others learn of it in time, and any number of ranks goes on."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.distributed import work_killed
from tests.distributed.spawned import on_ranks, results

TIMEOUT = 10.0


def test_others_learn_of_it_and_training_goes_on_with_one_rank_or_two(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("whole", "killed", "alone")]
    for folder in folders[:2]:
        folder.mkdir()
    whole = work_killed.work(0, str(folders[0]), None)  # one process on the joint batches
    survivor, killed = on_ranks(work_killed.work, str(folders[1]), 4, timeout=TIMEOUT)
    assert killed is None
    late, others = survivor
    assert late[2] >= work_killed.LATE
    assert "Timed out" in late[1]
    assert len(others) == 3
    assert all("by peer" in cause for _, cause, _ in others)
    for message, _, seconds in (late, *others):
        assert "another rank has ended, or has not answered within the time-out" in message
        assert "init_process_group(timeout=...)" in message
        assert "on another number of ranks" in message
        assert seconds < TIMEOUT + 5
    shutil.copytree(folders[1], folders[2])
    both = results(work_killed.work, str(folders[1]), None)
    alone = work_killed.work(0, str(folders[2]), None)
    assert sorted(alone) == [4, 5, 6]
    for step, loss in alone.items():
        assert loss == pytest.approx(whole[step], abs=1e-5)
        assert sum(losses[step] for losses in both) / 2 == pytest.approx(whole[step], abs=1e-5)

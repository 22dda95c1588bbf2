"""A rank that is killed while the Trainer of transformers trains on two: it goes on from its last checkpoint on one or on two."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from tests.distributed import work_trainer_killed
from tests.distributed.spawned import on_ranks, results

TIMEOUT = 20.0


def test_the_trainer_goes_on_from_its_last_checkpoint(tmp_path: Path) -> None:
    folders = [str(tmp_path / name) for name in ("whole", "killed", "alone")]
    whole = results(work_trainer_killed.work, folders[0], size=1)  # on the joint batches
    (error, seconds), killed = on_ranks(work_trainer_killed.work, folders[1], True, timeout=TIMEOUT)
    assert killed is None
    assert "by peer" in error  # torch's own: DistributedDataParallel sends buffers before the optimised model is called
    assert seconds < TIMEOUT + 20
    shutil.copytree(folders[1], folders[2])
    both = results(work_trainer_killed.work, folders[1], False, True)
    alone = results(work_trainer_killed.work, folders[2], False, True, size=1)
    weights, selected, losses = whole[0]
    assert 0 < len(selected) < len(weights)
    for again, others, since in (*both, *alone):
        assert others == selected
        assert sorted(step for step in since if step >= work_trainer_killed.DIES_AT) == [3, 4]
        for step, loss in since.items():
            assert loss == pytest.approx(losses[step], abs=1e-4)
        for name, weight in weights.items():
            torch.testing.assert_close(again[name], weight, rtol=0, atol=2e-5, msg=name)

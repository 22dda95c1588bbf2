"""What each rank does for `test_killed`: training that is saved after every step, and that goes on from there."""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from graphopt.distributed.ranks import Ranks
from graphopt.errors import RankError
from tests.distributed.work_ddp import BUDGET, joint_batch, model
from tests.distributed.work_mesh import loss_of, optimised

STEPS = 6
LATE = 2.0
"""Seconds that a group waits for a rank that does not come."""


def told(call: Callable[[], Any]) -> tuple[str, str, float]:
    """The error by which a rank learns that another is missing, that of torch's which led to it, and the seconds until then."""
    start = time.monotonic()
    try:
        call()
    except RankError as error:
        return str(error), str(error.__cause__), time.monotonic() - start
    return "", "", time.monotonic() - start


def alone(opt: Any, batch: Any) -> list[Any]:
    """What a rank is told that goes on without the others: in the graph, after `no_sync`, and by a collective of its own."""

    def step() -> None:
        loss_of(opt(*batch)).backward()

    def gathered() -> None:
        with opt.no_sync():
            step()
        step()

    return [told(call) for call in (step, gathered, lambda: opt.ranks.smallest(torch.ones(1)))]


def work(rank: int, folder: str, dies_at: int | None) -> Any:
    """Losses of this rank, or what it was told when another did not come, and when another was killed."""
    size, place = dist.get_world_size() if dist.is_initialized() else 1, Path(folder)
    mesh = init_device_mesh("cpu", (size,)) if size > 1 else None

    def batch(step: int) -> tuple[torch.Tensor, ...]:
        return tuple(t.chunk(size)[rank] for t in joint_batch(step))

    late = None
    if size > 1:
        hasty = Ranks(dist.new_group(timeout=datetime.timedelta(seconds=LATE)))
        late = told(lambda: hasty.smallest(torch.ones(1))) if rank == 0 else None
    opt = optimised(mesh, batch(1), BUDGET, of=model())
    optimizer = torch.optim.AdamW(opt.parameters(), lr=1e-2)
    saved = sorted(int(file.stem) for file in place.glob("*.pt"))
    if saved:
        opt.load_state_dict(torch.load(place / f"{saved[-1]}.pt"))
        opt.load_state(place / f"{saved[-1]}.state", optimizer)
    losses = {}
    for step in range(saved[-1] + 1 if saved else 1, STEPS + 1):
        if rank == 1 and step == dies_at:
            os.kill(os.getpid(), 9)
        if step == dies_at:
            return late, alone(opt, batch(step))
        loss = loss_of(opt(*batch(step)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses[step] = loss.item()
        if rank == 0:
            opt.save_state(place / f"{step}.state", optimizer)
            torch.save(opt.state_dict(), place / "part")
            (place / "part").rename(place / f"{step}.pt")
    return losses

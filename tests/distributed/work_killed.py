"""What each rank does for `test_killed`: training that is saved after every step, and that goes on from there."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.distributed.work_ddp import BUDGET, joint_batch, model
from tests.distributed.work_mesh import loss_of, optimised

STEPS = 6


def work(rank: int, folder: str, dies_at: int | None) -> Any:
    """Losses of this rank, or how and when another's death was noticed."""
    size, place = dist.get_world_size() if dist.is_initialized() else 1, Path(folder)
    mesh = init_device_mesh("cpu", (size,)) if size > 1 else None

    def batch(step: int) -> tuple[torch.Tensor, ...]:
        return tuple(t.chunk(size)[rank] for t in joint_batch(step))

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
        start = time.monotonic()
        try:
            loss = loss_of(opt(*batch(step)))
            loss.backward()
        except Exception as error:
            return str(error), time.monotonic() - start
        optimizer.step()
        optimizer.zero_grad()
        losses[step] = loss.item()
        if rank == 0:
            opt.save_state(place / f"{step}.state", optimizer)
            torch.save(opt.state_dict(), place / "part")
            (place / "part").rename(place / f"{step}.pt")
    return losses

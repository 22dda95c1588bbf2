"""What torch.distributed does not show: a group's store, and which DistributedDataParallel is at work."""

from __future__ import annotations

import contextlib
import datetime
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def store_of(group: dist.ProcessGroup) -> Any:
    """The key-value store through which the processes of a group found each other."""
    return dist.distributed_c10d._world.pg_map[group][1]


def timeout_of(group: dist.ProcessGroup) -> datetime.timedelta:
    """How long the collectives of a group wait."""
    device = next(iter(group._device_types), torch.device("cpu"))
    options = getattr(group._get_backend(device), "options", None)
    found: datetime.timedelta = getattr(options, "_timeout", None) or store_of(group).timeout
    return found


def active_ddp() -> DistributedDataParallel | None:
    """The DistributedDataParallel in whose forward this is called."""
    return DistributedDataParallel._get_active_ddp_module()


def whole_graphs() -> contextlib.AbstractContextManager[Any]:
    """Dynamo does not divide a graph at DistributedDataParallel's buckets, as it does by default inside its forward."""
    if torch._dynamo.config.optimize_ddp is not True:
        return contextlib.nullcontext()
    patched: contextlib.AbstractContextManager[Any] = torch._dynamo.config.patch(optimize_ddp=False)
    return patched

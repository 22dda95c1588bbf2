"""What torch.distributed does not show: functional collectives, a group's store, which DistributedDataParallel is at work."""

from __future__ import annotations

import contextlib
import datetime
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.nn.parallel import DistributedDataParallel

from graphopt.compat.schemas import arguments_of
from graphopt.errors import InputError

ALL_REDUCE: Any = torch.ops._c10d_functional.all_reduce.default if dist.is_available() else None
"""The collective as an operator of graphs."""

WAIT: Any = torch.ops._c10d_functional.wait_tensor.default if dist.is_available() else None
"""What waits for it."""


def collective_of(target: Any) -> str:
    """The collective that an operator is, such as "all_reduce", in place or not; "" if it is none."""
    if getattr(target, "namespace", "") not in ("_c10d_functional", "c10d"):
        return ""
    return "" if "wait" in target._opname else target._opname.removesuffix("_")


def group_in(node: fx.Node) -> str:
    """The name of the process group of a collective."""
    return str(arguments_of(node).get("group_name") or "")


def is_distributed(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor; their module is not loaded for models that do without it."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """What this rank has of a DTensor, sharing its memory and outside of autograd; any other tensor as it is."""
    return tensor.detach().to_local() if is_distributed(tensor) else tensor  # type: ignore[attr-defined]


def distributed_like(tensor: Tensor, like: Tensor) -> Tensor:
    """A tensor divided among ranks as another of its size is, outside of autograd; a plain one is taken for this rank's part.

    A gradient's parts may be summands, or lie otherwise than those of its parameter.
    """
    if not is_distributed(like):
        return tensor
    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    if is_distributed(tensor):
        return tensor.detach().redistribute(mesh, placements)  # type: ignore[attr-defined]
    kind: Any = type(like.detach())
    return kind.from_local(tensor, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())


def is_of_another_rank(error: BaseException) -> bool:
    """Whether an error that a compiled graph has raised is torch.distributed's, of another rank that ended or is late.

    gloo's are RuntimeErrors like any others: they are known by the operator that waits.
    """
    innermost = error.__traceback__
    while innermost is not None and innermost.tb_next is not None:
        innermost = innermost.tb_next
    waits = innermost is not None and innermost.tb_frame.f_locals.get("self") is WAIT
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and waits)


def group_named(name: str) -> dist.ProcessGroup:
    """The process group of this name."""
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


@contextlib.contextmanager
def pretended_ranks(number: int) -> Iterator[None]:
    """This process is the first of so many that do not exist: their collectives can be traced, and give nothing when they run.

    Raises:
        InputError: torch.distributed is initialised.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise InputError("torch.distributed is initialised, so that no other ranks can be pretended: run this in one process.")
    dist.init_process_group("fake", rank=0, world_size=number, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


backward_number: Callable[[], int] = torch._C._current_graph_task_id
"""Of the backward under way; -1: there is none."""


def store_of(group: dist.ProcessGroup) -> Any:
    """The key-value store through which the processes of a group found each other."""
    return dist.distributed_c10d._world.pg_map[group][1]


def timeout_of(group: dist.ProcessGroup) -> datetime.timedelta:
    """How long the collectives of a group wait."""
    device = next(iter(group._device_types), torch.device("cpu"))
    options = getattr(group._get_backend(device), "options", None)
    return getattr(options, "_timeout", None) or store_of(group).timeout


active_ddp: Callable[[], DistributedDataParallel | None] = DistributedDataParallel._get_active_ddp_module
"""The DistributedDataParallel in whose forward this is called."""


class Silenced:
    """Says of every forward of a DistributedDataParallel whether that leaves its gradients as they are, or averages them.

    Attributes:
        leaves: the gradients of the last forward with a backward, which are averaged elsewhere.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.leaves = False
        self._group = group

    def __reduce__(self) -> tuple[type[Silenced], tuple[None]]:
        return Silenced, (None,)  # a copy of a DistributedDataParallel has no process group either

    def begin(self, *_: Any) -> None:
        """A forward begins."""
        self.leaves = self.leaves and not torch.is_grad_enabled()

    def averaged(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """What becomes of a bucket of gradients."""
        from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        return noop_hook(None, bucket) if self.leaves else allreduce_hook(self._group, bucket)  # type: ignore[arg-type]


def unless_silenced(state: Silenced, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """The communication hook of a DistributedDataParallel that `silence` was called with."""
    return state.averaged(bucket)


unless_silenced.__annotations__ = {}  # torch compares them with types, and these are texts


def silence(ddp: DistributedDataParallel) -> Silenced | None:
    """What a DistributedDataParallel is told by which gradients it leaves; None where it has another communication hook."""
    if not ddp._comm_hooks:
        silenced = Silenced(ddp.process_group)
        ddp.register_comm_hook(silenced, unless_silenced)
        ddp.register_forward_pre_hook(silenced.begin)
    hook, state = ddp._comm_hooks[0]
    return state if hook is unless_silenced and isinstance(state, Silenced) else None


def whole_graphs() -> contextlib.AbstractContextManager[Any]:
    """Dynamo does not divide a graph at DistributedDataParallel's buckets, as it does by default inside its forward."""
    if torch._dynamo.config.optimize_ddp is not True:
        return contextlib.nullcontext()
    return torch._dynamo.config.patch(optimize_ddp=False)

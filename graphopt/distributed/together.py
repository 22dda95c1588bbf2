"""Which processes train a model together, and which of them on samples of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from graphopt.compat import fsdp
from graphopt.distributed.ranks import Ranks
from graphopt.distributed.tensor_parallel import is_parallel
from graphopt.errors import InputError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


def ranks_for(model: nn.Module, mesh: DeviceMesh | None, group: ProcessGroup | None) -> Ranks:
    """The processes that train a model together, and among which of them gradients are averaged.

    Args:
        mesh, group: see `optimize`.
    Raises:
        InputError: the mesh does not fit the model or the group.
    """
    if fsdp.is_sharded(model):
        return Ranks(ranks_of(model, mesh, group), samples=Ranks.alone())
    if is_parallel(model):
        return Ranks(group, samples=Ranks.alone() if mesh is None else Ranks(group_of(mesh, None)))
    return Ranks(group_of(mesh, group))


def group_of(mesh: DeviceMesh | None, group: ProcessGroup | None) -> ProcessGroup | None:
    """The processes that train together.

    Raises:
        InputError: the mesh has several dimensions, or the group is another.
    """
    if mesh is None:
        return group
    if mesh.ndim != 1:
        raise InputError(
            f"mesh has {mesh.ndim} dimensions, and gradients are averaged along one: pass that one, such as mesh['dp'] of a mesh "
            "with names."
        )
    found = mesh.get_group()
    if group is not None and group is not found:
        raise InputError("mesh= says which processes train together, and group= says others: leave group= out.")
    return found


def ranks_of(model: nn.Module, mesh: DeviceMesh | None, group: ProcessGroup | None) -> ProcessGroup | None:
    """The processes that train a sharded model together.

    Args:
        group: the caller's, if any.
    Raises:
        InputError: a mesh was given, too.
    """
    if mesh is not None:
        raise InputError(
            "fully_shard was applied to the model, which averages its gradients: leave mesh= out, or give optimize() a model "
            "that is not sharded."
        )
    return fsdp.group_of_ranks(model) if group is None else group

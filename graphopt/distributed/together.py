"""Which processes train a model together, and which of them on samples of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from graphopt.compat import fsdp
from graphopt.distributed.ranks import Ranks
from graphopt.distributed.sharded import ignored_by_fully_shard
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
        return _ranks_of_sharded(model, mesh, group)
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


def _ranks_of_sharded(model: nn.Module, mesh: DeviceMesh | None, group: ProcessGroup | None) -> Ranks:
    """`fully_shard` averages the gradients of what it holds; a mesh those of what it was told to ignore."""
    if mesh is not None and not ignored_by_fully_shard(model):
        raise InputError(
            "fully_shard was applied to the model, which averages its gradients: leave mesh= out, or give optimize() a model "
            "that is not sharded."
        )
    samples = Ranks.alone() if mesh is None else Ranks(group_of(mesh, None))
    ranks = Ranks(fsdp.group_of_ranks(model) if group is None else group, samples=samples)
    if mesh is not None and samples.size != ranks.size:
        raise InputError(
            f"mesh has {samples.size} ranks, and the sharded model is trained on {ranks.size}: pass a mesh of one dimension that "
            "has all of them, or optimize(group=...)."
        )
    return ranks

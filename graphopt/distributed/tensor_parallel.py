"""Models whose weights the user has divided among ranks by `parallelize_module`: what is different for them.

Each rank has a part of every such weight, a DTensor, and all ranks of the mesh train on the same samples. torch.compile traces
the collectives between them, so that they are captured, planned and rewritten with the model: FLOPs and bytes are those of one
rank, and a collective that only an untrained tensor needs is cut. How steep the loss is in a tensor is measured for all of it.
Where ranks train on other samples as well, `optimize(mesh=...)` averages each rank's parts with those of its peers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from graphopt.compat import fsdp
from graphopt.compat.distributed import distributed_like, is_distributed, local_part
from graphopt.distributed.ranks import Ranks
from graphopt.errors import InputError, NothingToPlan

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def is_parallel(model: nn.Module) -> bool:
    """Whether `parallelize_module` has divided weights of a model, or anything else that leaves it with DTensors to train."""
    return any(map(is_distributed, model.parameters())) and not fsdp.is_sharded(model)


def is_divided(model: nn.Module) -> bool:
    """Whether weights of a model are divided among ranks, by `parallelize_module` or `fully_shard`."""
    return fsdp.is_sharded(model) or is_parallel(model)


def require_plannable(model: nn.Module) -> None:
    """Raise `NothingToPlan` for a model that is tensor parallel in a way that is not planned."""
    divided = _divided(model)
    if not divided:
        return
    name = next(iter(divided))
    if fsdp.is_sharded(model):
        raise NothingToPlan(f"the model is tensor parallel ({name} is a DTensor), and fully_shard was applied to it, too.")
    mesh = divided[name].device_mesh
    if mesh.ndim != 1:
        raise NothingToPlan(f"the model is tensor parallel along {mesh.ndim} dimensions of a mesh ({name} is on it).")
    other = next((n for n, p in divided.items() if p.device_mesh != mesh), None)
    if other is not None:
        raise NothingToPlan(f"the model is tensor parallel on several meshes ({name} is on another than {other}).")


def require_ranks(model: nn.Module, ranks: Ranks) -> None:
    """Raise `NothingToPlan` where it is not known which ranks train on which samples."""
    divided = _divided(model)
    size = next(iter(divided.values())).device_mesh.size() if divided else 1
    if divided and not fsdp.is_sharded(model) and size * ranks.samples.size != ranks.size:
        raise NothingToPlan(
            f"the model is tensor parallel on {size} ranks, and {ranks.size} train it: optimize(mesh=...) says which of them "
            "train on other samples, and optimize(group=...) which have no part in it."
        )


def require_undivided(model: nn.Module) -> None:
    """Raise `InputError` for a tensor parallel model."""
    if is_parallel(model):
        raise InputError(
            "the weights of the model are divided among ranks already, which is what is to be decided: give the model as it was "
            "before parallelize_module()."
        )


def group_of_parts(model: nn.Module) -> ProcessGroup:
    """The ranks among which the weights of a tensor parallel model are divided."""
    found: ProcessGroup = next(iter(_divided(model).values())).device_mesh.get_group()
    return found


def _divided(model: nn.Module) -> dict[str, Any]:
    """The DTensors among the parameters, but for those that `fully_shard` alone has made."""
    alone = {id(form) for h in fsdp.held_parameters(model) if not h.tensor_parallel for form in (h.sharded, h.whole)}
    return {n: p for n, p in model.named_parameters() if is_distributed(p) and id(p) not in alone}


def mean_of_ranks(gradients: Mapping[str, Tensor | None], model: nn.Module, ranks: Ranks, what: str) -> list[Tensor | None]:
    """The mean over those ranks whose samples differ; a DTensor's is one, divided as its parameter is.

    Args:
        gradients: by name, of this rank's samples.
        what: see `Ranks`.
    """
    own = dict(model.named_parameters(remove_duplicate=False))
    done = fsdp.held_names(model)  # whose backward has averaged
    placed = {name: None if g is None else distributed_like(g, own[name]) for name, g in gradients.items() if name not in done}
    means = ranks.samples.mean([None if g is None else local_part(g) for g in placed.values()], what)
    found = {n: None if mean is None else distributed_like(mean, own[n]) for n, mean in zip(placed, means, strict=True)}
    return [{**gradients, **found}[name] for name in gradients]

"""Models whose weights are divided among ranks, by `fully_shard` (FSDP2) or `parallelize_module`: what is different for them.

A sharded model is planned as if its weights were whole, on fake ones. Each of its graphs then runs where torch.compile runs it,
between the hooks that gather weights and average gradients. A tensor that is not trained gets no gradient, so that nothing of it
is sent.

Of a tensor parallel model each rank has a part of every weight that is divided, a DTensor, and all ranks of the mesh train on the
same samples. torch.compile traces the collectives between them, so that they are captured, planned and rewritten with the model:
FLOPs and bytes are those of one rank, and a collective that only an untrained tensor needs is cut. How steep the loss is in a
tensor is measured for all of it. Where ranks train on other samples as well, `optimize(mesh=...)` averages each rank's parts with
those of its peers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from graphopt.budget import Budget
from graphopt.compat import fsdp
from graphopt.compat.distributed import distributed_like, is_distributed, local_part
from graphopt.distributed.ranks import Ranks
from graphopt.errors import ImportanceError, InputError, NothingToPlan
from graphopt.frontend.before import Before

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


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


def budget_for(model: nn.Module, budget: Budget) -> tuple[Budget, str]:
    """What of a budget a sharded model can be held to, and what to tell of the rest."""
    if budget.memory is None or not fsdp.is_sharded(model):
        return budget, ""
    return replace(budget, memory=None), "memory= limits nothing: under a plan, the memory of sharded weights is not predicted"


def ignored_by_fully_shard(model: nn.Module) -> list[str]:
    """Trained parameters of a sharded model that `fully_shard` was told to ignore, or not applied to."""
    held = fsdp.held_names(model)
    return [name for name, p in model.named_parameters() if held and p.requires_grad and name not in held]


def to_be_averaged(model: nn.Module) -> str:
    """What to tell where nobody averages their gradients; "" if there are none."""
    names = ignored_by_fully_shard(model)
    if not names:
        return ""
    return (
        f"fully_shard does not average the gradients of {len(names)} trained parameters, which it ignores or was not applied to "
        f"(the first is {names[0]}): pass optimize(mesh=...), or average them before each optimizer step"
    )


def mean_gradients(model: nn.Module, run: Callable[[], Tensor], names: Collection[str]) -> dict[str, Tensor | None]:
    """Gradients of a model with DTensors, averaged where `fully_shard` does that; None for one that the loss does not depend on.

    Everything is as before afterwards, `.grad`, buffers and attributes of modules, too, and no hook on a gradient is called.

    Args:
        run: runs the model, and returns the loss.
    Raises:
        ImportanceError: gradients gather on each rank now, in another dtype.
    """
    if fsdp.holds_back(model):
        raise ImportanceError("gradients have gathered since set_requires_gradient_sync(False): call optimize() before it.")
    fsdp.reshard(model)
    held = fsdp.held_parameters(model)
    leaves = {id(t): t for t in [*model.parameters(), *(t for h in held for t in (h.sharded, h.whole) if t is not None)]}
    before = {number: (leaf.grad, fsdp.take_hooks_off(leaf)) for number, leaf in leaves.items()}
    for leaf in leaves.values():
        leaf.grad = None
    with Before(draws=False).restored(model):
        try:
            with fsdp.reducing(model):
                run().backward()
            own = dict(model.named_parameters(remove_duplicate=False))
            return {name: own[name].grad for name in names}
        finally:
            fsdp.reshard(model)
            for leaf in model.parameters():  # those that were gathered here first are none of these
                leaf.grad = None
            for number, leaf in leaves.items():
                leaf.grad, hooks = before[number]
                fsdp.put_hooks_on(leaf, hooks)


def whole(tensor: Tensor) -> Tensor:
    """A DTensor's value, put together from all ranks; any other tensor as it is."""
    full: Callable[[], Tensor] | None = getattr(tensor, "full_tensor", None)
    return tensor if full is None else full()


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
        return Ranks(group, samples=Ranks.alone() if mesh is None else Ranks(_group_of(mesh, None)))
    return Ranks(_group_of(mesh, group))


def _group_of(mesh: DeviceMesh | None, group: ProcessGroup | None) -> ProcessGroup | None:
    """The processes that train together.

    Raises:
        InputError: it is no mesh, has several dimensions, or the group is another.
    """
    if mesh is None:
        return group
    from torch.distributed.device_mesh import DeviceMesh

    if not isinstance(mesh, DeviceMesh):
        raise InputError(f"mesh must be a DeviceMesh, not {mesh!r}: make it with torch.distributed.device_mesh.init_device_mesh.")
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
    samples = Ranks.alone() if mesh is None else Ranks(_group_of(mesh, None))
    ranks = Ranks(fsdp.group_of_ranks(model) if group is None else group, samples=samples)
    if mesh is not None and samples.size != ranks.size:
        raise InputError(
            f"mesh has {samples.size} ranks, and the sharded model is trained on {ranks.size}: pass a mesh of one dimension that "
            "has all of them, or optimize(group=...)."
        )
    return ranks

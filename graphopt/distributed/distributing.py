"""Carrying out what `graphopt.plan` has decided: a model's weights are divided among ranks, or are left as they are.

torch does the work, `fully_shard` and `parallelize_module`. Which layers are divided by columns and which by rows is the model's
to say: models of transformers have a `tp_plan`.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from graphopt.distributed.divided import is_divided
from graphopt.distributed.predicted import block_of
from graphopt.errors import InputError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from graphopt.planner.parallel import MemoryPlan


def distribute(model: nn.Module, plan: MemoryPlan, mesh: DeviceMesh) -> nn.Module:
    """Divide a model among ranks as a plan has it; on every rank, before `optimize` and before the optimizer is made.

    CDP: the model stays as it is, and `optimize(mesh=...)` or DistributedDataParallel averages gradients. ADP: `fully_shard` of
    every repeated block and of the rest. TP: `parallelize_module`, by the model's own `tp_plan`. DP+TP: both, ADP along the
    dimension "dp" of the mesh and TP along "tp".

    Args:
        model: with the same weights on all ranks; it is changed.
        plan: what `graphopt.plan` returned for this model.
        mesh: the ranks; of one dimension, for DP+TP of two with the names "dp" and "tp".
    Returns:
        The model.
    Raises:
        InputError: the plan has no strategy for ranks, the mesh does not fit it, or the model does not say how it is divided.
    """
    if is_divided(model):
        raise InputError("the weights of the model are divided among ranks already: give the model as it was before.")
    if not plan.batch_size:
        raise InputError(f"there is nothing to carry out: {plan.verdict}. Plan with more devices, or with more memory on each.")
    if plan.strategy in ("CDP", "ADP", "TP") and mesh.ndim != 1:
        raise InputError(
            f"mesh has {mesh.ndim} dimensions, and {plan.strategy} divides along one: pass that one, such as mesh['dp']."
        )
    match plan.strategy:
        case "CDP":
            pass
        case "ADP":
            _shard(model, mesh)
        case "TP":
            _parallelize(model, mesh)
        case "DP+TP":
            _require_two_dimensions(mesh, plan)
            _parallelize(model, mesh["tp"])
            _shard(model, mesh["dp"])
        case _:
            raise InputError(
                "the plan keeps gradients and optimizer states on the host, which graphopt does not do: plan with more devices, "
                "or use fully_shard(offload_policy=CPUOffloadPolicy())."
            )
    return model


def _require_two_dimensions(mesh: DeviceMesh, plan: MemoryPlan) -> None:
    rows = {row.strategy: row for row in plan.table if row.strategy.startswith("DP+TP")}
    best = max(rows.values(), key=lambda row: row.score)
    wanted = f"init_device_mesh(.., {best.strategy[6:].replace(' x', ',')}, mesh_dim_names=('dp', 'tp'))"
    if mesh.mesh_dim_names != ("dp", "tp"):
        raise InputError(f"DP+TP needs a mesh of two dimensions with names: pass {wanted}.")
    found = rows.get(f"DP+TP ({mesh['dp'].size()} x {mesh['tp'].size()})")
    if found is None or found.batch_size < plan.batch_size:
        raise InputError(
            f"mesh is {mesh['dp'].size()} x {mesh['tp'].size()}, on which a batch of {plan.batch_size} does not fit by the plan: "
            f"pass {wanted}."
        )


def _shard(model: nn.Module, mesh: DeviceMesh) -> None:
    """As `graphopt.distributed.predicted` has it."""
    from torch.distributed.fsdp import fully_shard

    for block in dict.fromkeys(block_of(name) for name, _ in model.named_parameters()):
        if block:
            fully_shard(model.get_submodule(block), mesh=mesh)
    fully_shard(model, mesh=mesh)


def _parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
    from torch.distributed.tensor.parallel import parallelize_module

    patterns: Mapping[str, Any] = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None) or {}
    if not patterns:
        raise InputError(
            f"{type(model).__name__} does not say how its layers are divided: it has no tp_plan. Set model.tp_plan to a dict "
            'from names such as "layers.*.up" to "colwise" or "rowwise", or call parallelize_module() with styles of your own.'
        )
    _require_whole_heads(model, mesh.size())
    named = {name: module for name, module in model.named_modules() if not any(True for _ in module.children())}
    styles: dict[str, Any] = {}
    for pattern, style in patterns.items():
        found = {name: module for name, module in named.items() if fnmatch.fnmatch(name, pattern)}
        styles |= dict.fromkeys(found, _style(pattern, style))
    if not styles:
        raise InputError(
            f"the names in {type(model).__name__}'s tp_plan ({', '.join(patterns)}) are those of no layer, as where another "
            "module wraps the model: distribute the model itself before, or set tp_plan to names that it has."
        )
    parallelize_module(model, mesh, {name: style for name, style in styles.items() if not _is_tied(model, named[name])})


def _style(pattern: str, style: Any) -> Any:
    """torch's style of a name in transformers' plans."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
    from torch.distributed.tensor.parallel.style import ParallelStyle

    if isinstance(style, ParallelStyle):
        return style
    match style:
        case "colwise":
            return ColwiseParallel()
        case "rowwise":
            return RowwiseParallel()
        case "colwise_gather_output" | "colwise_rep":
            return ColwiseParallel(output_layouts=Replicate())
        case "embedding_rowwise" | "rowwise_split_input" | "rowwise_rep":
            return RowwiseParallel(input_layouts=Replicate())
    raise InputError(
        f"the model's tp_plan divides {pattern} by {style!r}, for which torch.distributed.tensor.parallel has no style: call "
        "parallelize_module() with styles of your own."
    )


def _require_whole_heads(model: nn.Module, size: int) -> None:
    config = getattr(model, "config", None)
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)
        if isinstance(heads, int) and heads % size:
            raise InputError(f"{size} ranks cannot divide {heads} heads ({name} of the model's config): use a number that can.")


def _is_tied(model: nn.Module, module: nn.Module) -> bool:
    """Whether a parameter of a layer is another's, too: divided here, it would be one no longer."""
    own = {id(p) for p in module.parameters(recurse=False)}
    return any(id(p) in own for other in model.modules() if other is not module for p in other.parameters(recurse=False))

"""What `fully_shard` (FSDP2) keeps of a model: sharded and gathered parameters, its hooks, the ranks of its mesh."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

_FSDP = "torch.distributed.fsdp"
"""The package; it is not loaded for models that do without it."""

_HOOKS = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks", "_forward_hooks_with_kwargs")


@dataclass(frozen=True)
class Held:
    """A parameter that is sharded.

    Attributes:
        names: all that it has in the model.
        sharded: what optimizers hold, a DTensor.
        whole: what forward and backward work with, once it was gathered; None before.
        tensor_parallel: it is also divided among ranks that train on the same samples.
    """

    names: tuple[str, ...]
    sharded: nn.Parameter
    whole: nn.Parameter | None
    tensor_parallel: bool


@dataclass(frozen=True)
class Part:
    """What is gathered together.

    Attributes:
        number: by which `post_forward_order` has it.
        parameters: of it.
        ranks: among which it is divided.
        replicas: of these; their gradients are averaged once they are scattered.
        reshards: it is given up after the forward, and gathered again for the backward.
        reduces: the backward averages gradients.
        gathered_bytes: that each rank hands in.
        scattered_bytes: likewise of each gradient, by the parameter's names.
    """

    number: int
    parameters: tuple[Held, ...]
    ranks: int
    replicas: int
    reshards: bool
    reduces: bool
    gathered_bytes: int
    scattered_bytes: dict[tuple[str, ...], int]


def is_sharded(model: nn.Module) -> bool:
    """Whether `fully_shard` was applied to a model, or to a part of it."""
    return bool(_sharded_modules(model))


def _sharded_modules(model: nn.Module) -> list[Any]:
    """Those that `fully_shard` was called with."""
    if _FSDP not in sys.modules:
        return []
    kind = sys.modules[_FSDP].FSDPModule
    return [module for module in model.modules() if isinstance(module, kind)]


def held_parameters(model: nn.Module) -> list[Held]:
    """The parameters that are sharded."""
    return [held for part in parts_of(model) for held in part.parameters]


def held_names(model: nn.Module) -> frozenset[str]:
    """All names of those."""
    forms = {id(form) for held in held_parameters(model) for form in (held.sharded, held.whole)}
    return frozenset(name for name, p in model.named_parameters(remove_duplicate=False) if id(p) in forms)


def parts_of(model: nn.Module) -> list[Part]:
    """All of a model that is sharded; nothing of any other."""
    if not is_sharded(model):  # which is quick
        return []
    places: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        places.setdefault(id(module), []).append(f"{name}." if name else "")
    return [_part(group, places) for group in _groups(model)]


def _part(group: Any, places: dict[int, list[str]]) -> Part:
    found, gathered, scattered = [], 0, {}
    ranks: int = getattr(group.mesh_info, "shard_mesh_size", 1)
    replicas: int = getattr(group.mesh_info, "replicate_mesh_size", 1)
    for param in group.fsdp_params:
        info = param._module_info
        spots = [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True)]
        names = tuple(prefix + own for module, own in spots for prefix in places.get(id(module), ()))
        found.append(Held(names, param.sharded_param, getattr(param, "_unsharded_param", None), param.is_dtensor))
        numel, used = param._sharded_param_data.numel(), param.mp_policy.param_dtype or param.sharded_param.dtype
        gathered += numel * used.itemsize
        scattered[names] = numel * ranks * (param.mp_policy.reduce_dtype or used).itemsize
    return Part(id(group), tuple(found), ranks, replicas, group._reshard_after_forward, group.reduce_grads, gathered, scattered)


def post_forward_order(model: nn.Module) -> list[int]:
    """The numbers of the parts that have run forward since the last backward, in their order."""
    shared = {id(held): held for group in _groups(model) if (held := getattr(group, "comm_ctx", None)) is not None}
    return [id(group) for held in shared.values() for group in getattr(held, "post_forward_order", ())]


def _groups(model: nn.Module) -> list[Any]:
    """Parameters that are gathered together, in the order of their modules."""
    found: list[Any] = []
    for state in _states(model):
        several = getattr(state, "_fsdp_param_groups", None)
        found += [state._fsdp_param_group] if several is None else several  # torch 2.11 has one at most
    return [group for group in found if group is not None]


def _states(model: nn.Module) -> list[Any]:
    states = [module._get_fsdp_state() for module in _sharded_modules(model)]
    return list({id(state): state for state in states}.values())


def group_of_ranks(model: nn.Module) -> dist.ProcessGroup | None:
    """The ranks that train a sharded model together, if a mesh of one dimension has them; None: all are taken to do so."""
    groups_of_ranks = {id(g): g for held in _groups(model) if (mesh := held.mesh_info.mesh).ndim == 1 and (g := mesh.get_group())}
    return next(iter(groups_of_ranks.values())) if len(groups_of_ranks) == 1 else None


def reshard(model: nn.Module) -> None:
    """Give up what is gathered: weights that are loaded or stepped count in the next forward."""
    for module in _sharded_modules(model):
        module.reshard()


@contextlib.contextmanager
def reducing(model: nn.Module) -> Iterator[None]:
    """Inside, a backward averages gradients, whatever `set_requires_gradient_sync` has said."""
    before = [(group, group.reduce_grads, group.all_reduce_grads) for group in _groups(model)]
    for group, _, _ in before:
        group.reduce_grads = group.all_reduce_grads = True
    try:
        yield
    finally:
        for group, reduces, all_reduces in before:
            group.reduce_grads, group.all_reduce_grads = reduces, all_reduces


def holds_back(model: nn.Module) -> bool:
    """Whether gradients that are not averaged yet have gathered elsewhere than in `.grad`."""
    params = [param for group in _groups(model) for param in group.fsdp_params]
    return any(param.unsharded_accumulated_grad is not None for param in params)


def reduces(model: nn.Module) -> bool:
    """Whether the next backward averages gradients, as it does unless `set_requires_gradient_sync(False)` was called."""
    return all(group.reduce_grads for group in _groups(model))


def passes_gradients_on(node: Any) -> bool:
    """Whether a node of autograd is there for its hook alone: gradients pass through it as they are."""
    home = sys.modules.get(f"{_FSDP}._fully_shard._fsdp_param_group")
    return home is not None and getattr(type(node), "_forward_cls", None) is home.RegisterPostBackwardFunction


def without_hooks(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A copy of a sharded model that is an ordinary one.

    Args:
        memo: by `id`, what stands for each of its tensors; see `copy.deepcopy`.
    """
    from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY

    own = _hooks_of_torch(model)
    sharded = _sharded_modules(model)
    for module in sharded:
        kinds = type(module).__mro__
        kind: Any = kinds[kinds.index(sys.modules[_FSDP].FSDPModule) + 1]
        memo[id(module)] = kind.__new__(kind)
    for module in sharded:
        held = {name: value for name, value in vars(module).items() if name not in (STATE_KEY, REGISTRY_KEY)}
        for name in _HOOKS:
            held[name] = type(held[name])((number, hook) for number, hook in held[name].items() if number not in own)
        memo[id(module)].__dict__.update(copy.deepcopy(held, memo))
    return copy.deepcopy(model, memo)


def _hooks_of_torch(model: nn.Module) -> set[int]:
    """Numbers of the forward hooks that gather and reshard."""
    found: set[int] = set()
    for state in _states(model):
        for handle in (state._pre_forward_hook_handle, state._post_forward_hook_handle):
            found |= {single.id for single in getattr(handle, "handles", (handle,))}
    return found


CALL = "_compiled_call_impl"
"""The attribute of a module that is called in its place, hooks included; `nn.Module.compile` sets it."""


def own_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a module, hooks included, whatever stands in its place."""
    return module._call_impl(*args, **kwargs)


def take_hooks_off(parameter: Tensor) -> Any:
    """Take off what is called with a parameter's gradient; returns it, for `put_hooks_on`."""
    found = parameter._post_accumulate_grad_hooks
    parameter._post_accumulate_grad_hooks = None  # type: ignore[assignment]
    return found


def put_hooks_on(parameter: Tensor, hooks: Any) -> None:
    """See `take_hooks_off`."""
    parameter._post_accumulate_grad_hooks = hooks

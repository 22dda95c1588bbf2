"""Which models are accepted, and how they are looked at."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

from graphopt import compat
from graphopt.calls import flatten_call
from graphopt.errors import GraphoptError, InputError
from graphopt.runtime.shared_module import SharedModule

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@contextlib.contextmanager
def training_mode(model: nn.Module) -> Iterator[None]:
    """A model that arrives in eval mode, as `from_pretrained` leaves it, is looked at as it will be trained."""
    require_module(model)
    if model.training:
        yield
        return
    flags = {module: module.training for module in model.modules()}
    try:
        model.train()
        yield
    finally:
        model.train(False)  # an override may have changed weights, as adapters that are merged for inference do
        for module, flag in flags.items():
            module.training = flag


def require_module(model: Any, optimizer: Any = None, loss: Any = None) -> None:
    """Raise `InputError` where it is none, the optimizer that is to train it is none, or its loss no function."""
    if not isinstance(model, nn.Module):
        raise InputError(f"model must be a torch.nn.Module, not {type(model).__name__}: load it first.")
    require_optimizer(optimizer)
    if loss is not None and not callable(loss):
        raise InputError(f"loss= must be a function from the model's output to a tensor of one number, not {loss!r}.")


def require_optimizer(optimizer: Any) -> None:
    """Raise `InputError` where it is neither an optimizer nor None."""
    if optimizer is not None and not hasattr(optimizer, "param_groups"):
        raise InputError(f"optimizer must be the torch.optim.Optimizer that trains the model, not {optimizer!r}: make it first.")


def require_not_optimised(model: nn.Module, what: str) -> None:
    """Raise `InputError` where `optimize` returned a model or a part of it; `what` is to be done with it, as a participle."""
    for name, module in model.named_modules():
        if issubclass(type(module), SharedModule):
            part = f"its part {name}" if name else "it"
            raise InputError(
                f"the model cannot be {what}: {part} is optimised already, under a plan of its own. Pass the model that "
                "optimize() was given there, or the whole with that model in its place."
            )


def require_bare(model: nn.Module) -> None:
    """Raise `InputError` where a model is a wrapper that spreads batches over devices, or where `optimize` returned a part."""
    require_not_optimised(model, "optimised")
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise InputError(
            f"a {type(model).__name__} spreads batches over devices, which a captured step would not. Pass the model that it "
            "wraps, model.module; DistributedDataParallel then goes around what optimize() returns."
        )


def require_no_mesh(mesh: DeviceMesh | None, why: str) -> None:
    """Raise `GraphoptError` where gradients were to be averaged in a graph, and there is none."""
    if mesh is not None and mesh.size() > 1:
        raise GraphoptError(
            f"with a mesh the optimised step averages gradients, and there is none: {why}. Leave mesh= out, and wrap what "
            "optimize() returns in DistributedDataParallel."
        )


def require_storage(model: nn.Module, limited: bool) -> None:
    """Raise `InputError` where weights are meta or fake tensors, or have no size yet although a budget has to count them.

    Buffers have to have one always: what a step changes in them is kept.
    """
    named = [*(model.named_parameters() if limited else ()), *model.named_buffers()]
    lazy = next((name for name, tensor in named if nn.parameter.is_lazy(tensor)), "")
    if lazy:
        raise InputError(f"{lazy} has no size before the model has run: call the model on a batch once, then optimize it.")
    tensors = [t for t in (*model.parameters(), *model.buffers()) if not nn.parameter.is_lazy(t)]
    if compat.fake_mode_of(tensors) is not None or any(t.is_meta for t in tensors):
        raise InputError(
            "the model's weights exist nowhere (meta or fake tensors): load them before optimize(), or use analyze()."
        )


def with_values(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a call of a model; raise `InputError` where a tensor among them is a meta or fake one."""
    inputs = flatten_call(args, kwargs)
    for name, tensor in zip(inputs.names, inputs.tensors, strict=True):
        if tensor.is_meta or compat.fake_mode_of([tensor]) is not None:
            raise InputError(
                f"the example input {name!r} has no values (a meta or fake tensor), and the model is to be trained: pass a batch "
                "as the model is called with, or use analyze()."
            )
    return args, kwargs

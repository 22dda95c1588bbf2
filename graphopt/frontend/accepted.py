"""Which models are accepted, and how they are looked at."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

from graphopt import compat
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


def require_module(model: Any, optimizer: Any = None) -> None:
    """Raise `InputError` where it is none, or the optimizer that is to train it is none."""
    if not isinstance(model, nn.Module):
        raise InputError(f"model must be a torch.nn.Module, not {type(model).__name__}: load it first.")
    if optimizer is not None and not hasattr(optimizer, "param_groups"):
        raise InputError(f"optimizer must be the torch.optim.Optimizer that trains the model, not {optimizer!r}: make it first.")


def require_bare(model: nn.Module) -> None:
    """Raise `InputError` where a model is a wrapper that spreads batches over devices, or where `optimize` returned a part."""
    for name, module in model.named_modules():
        if issubclass(type(module), SharedModule):
            what = f"its part {name}" if name else "it"
            raise InputError(
                f"the model cannot be optimised: {what} is optimised already, under a plan of its own. Pass the model that "
                "optimize() was given there, or the whole with that model in its place; or train the whole as it is."
            )
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

"""Models that the user has sharded by `fully_shard` (FSDP2): what is different for them.

They are planned as if their weights were whole, on fake ones. Each of their graphs then runs where torch.compile runs it, between
the hooks that gather weights and average gradients. A tensor that is not trained gets no gradient, so that nothing of it is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

import torch
from torch import Tensor, nn

from graphopt.budget import Budget
from graphopt.compat import fsdp
from graphopt.errors import ImportanceError
from graphopt.frontend.attributes import attributes_of, put_back


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
    attributes = attributes_of(model)
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    for leaf in leaves.values():
        leaf.grad = None
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
        put_back(attributes)
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)


def whole(tensor: Tensor) -> Tensor:
    """A DTensor's value, put together from all ranks; any other tensor as it is."""
    full: Callable[[], Tensor] | None = getattr(tensor, "full_tensor", None)
    return tensor if full is None else full()

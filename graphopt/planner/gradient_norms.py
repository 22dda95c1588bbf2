"""How steep the loss of one batch is in each tensor: the L2 norm of its gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from graphopt.calls import flatten_call
from graphopt.capture import no_generation_cache, twin, unchanged_draws
from graphopt.compat import pytree
from graphopt.distributed.ranks import Ranks
from graphopt.distributed.sharded import mean_gradients, whole
from graphopt.distributed.tensor_parallel import is_divided, mean_of_ranks
from graphopt.errors import ImportanceError, NoLoss, first_line
from graphopt.loss import LossFunction, own_loss

MEASURING = "measuring gradients"


def gradient_norms(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    names: Collection[str],
    loss: LossFunction | None = None,
    shared: bool = False,
    ranks: Ranks | None = None,
) -> dict[str, float]:
    """The L2 norm of the gradient of each of the parameters `names`, for one batch: that of all `ranks` together.

    Forward and backward run on a copy with the same weights: parameters, `.grad`, buffers, attributes and random streams stay as
    they are, and no hook on a parameter is called. A gradient is dropped as soon as its norm is known, unless ranks average it.

    Args:
        args, kwargs: the batch, as the model is called with it, labels included.
        loss: scalar from the model's output; by default the output's own.
        shared: the copy shares the weights' memory, which forward is known not to write to.
        ranks: that train the model together, each of which calls this with its batch.
    Returns:
        By name; 0 for parameters that the loss does not depend on.
    Raises:
        ImportanceError: the model cannot be copied, or a gradient is not finite or accumulated in parts.
        NoLoss: the model has no loss.
    """
    ranks = ranks or Ranks.alone()
    names = ranks.same(list(names), MEASURING)

    def measure() -> dict[str, Tensor | None]:
        if is_divided(model):
            return _of_divided(model, args, kwargs, names, loss)
        return _gradients(model, args, kwargs, names, loss, shared, (lambda g: g) if ranks.several else _norm)

    found = ranks.together(measure, MEASURING)
    means = mean_of_ranks(found, model, ranks, MEASURING)
    norms = {name: 0.0 if mean is None else float(_norm(mean)) for name, mean in zip(found, means, strict=True)}
    bad = next((name for name, norm in norms.items() if not math.isfinite(norm)), None)
    if bad is not None:
        raise ImportanceError(f"the gradient of {bad} is NaN or infinite.")
    return norms


def _gradients(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    names: Collection[str],
    loss: LossFunction | None,
    shared: bool,
    kept: Callable[[Tensor], Tensor],
) -> dict[str, Tensor | None]:
    """What `kept` returns for each gradient, which is dropped then; None for parameters that the loss does not depend on."""
    try:
        own = twin(model, shared)
    except Exception as error:
        raise ImportanceError(f"the model cannot be copied ({first_line(error)}).") from error
    args, kwargs = pytree.tree_map(lambda value: value.clone() if isinstance(value, Tensor) else value, (args, dict(kwargs)))
    wanted = set(names)
    parameters = {n: p for n, p in own.named_parameters() if n in wanted}
    found: dict[str, Tensor | None] = dict.fromkeys(parameters)

    def keep(name: str) -> Callable[[Tensor], None]:
        def of(parameter: Tensor) -> None:
            assert parameter.grad is not None
            if found[name] is not None:  # a backward inside the backward
                raise ImportanceError(f"the gradient of {name} is accumulated in parts.")
            found[name], parameter.grad = kept(parameter.grad), None

        return of

    for name, parameter in parameters.items():
        parameter.register_post_accumulate_grad_hook(keep(name))
    tensors = [*model.parameters(), *flatten_call(args, kwargs).tensors]
    with unchanged_draws(tensors), no_generation_cache(own), torch.enable_grad():
        value = _loss(own(*args, **kwargs), loss)
        value.backward(inputs=list(parameters.values()))
    return found


def _of_divided(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], names: Collection[str], loss: LossFunction | None
) -> dict[str, Tensor | None]:
    """As DTensors, of the model itself; the backward is a full one."""
    args, kwargs = pytree.tree_map(lambda value: value.clone() if isinstance(value, Tensor) else value, (args, dict(kwargs)))
    inputs = flatten_call(args, kwargs).tensors
    with unchanged_draws([*model.parameters(), *inputs]), no_generation_cache(model), torch.enable_grad():
        return mean_gradients(model, lambda: _loss(model(*args, **kwargs), loss), names)


def _loss(output: Any, loss: LossFunction | None) -> Tensor:
    value = own_loss(output, loss)
    if value is None:
        raise NoLoss("the model returns no loss: pass loss= to have its gradient count.")
    return value


def _norm(gradient: Tensor) -> Tensor:
    """The L2 norm, as a tensor of no dimensions; of such a norm, itself."""
    dense = gradient.detach().to_dense() if gradient.layout != torch.strided else gradient.detach()
    return whole(torch.linalg.vector_norm(dense, dtype=torch.promote_types(dense.dtype, torch.float32)))

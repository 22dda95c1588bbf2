"""The gradients of one batch, without a trace; and how steep its loss is in each tensor: the L2 norms of them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from graphopt.calls import flatten_call
from graphopt.capture import no_generation_cache, twin, unchanged_draws
from graphopt.compat import backward_dtypes, pytree
from graphopt.distributed.divided import is_divided, mean_gradients, mean_of_ranks, whole
from graphopt.distributed.ranks import Ranks
from graphopt.errors import ImportanceError, NoLoss, first_line
from graphopt.frontend.outside import unchanged_outside
from graphopt.loss import FLOAT16_SCALE, LossFunction, own_loss


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

    A gradient is dropped as soon as its norm is known, unless ranks average it.

    Args:
        args, kwargs, shared, ranks: see `batch_gradients`.
        loss: scalar from the model's output; by default the output's own.
    Returns:
        By name; 0 for parameters that the loss does not depend on.
    Raises:
        ImportanceError: see `batch_gradients`; or a gradient is not finite.
        NoLoss: the model has no loss.
    """

    def scalar(output: Any) -> Tensor:
        value = own_loss(output, loss)
        if value is None:
            raise NoLoss("the model returns no loss: pass loss= to have its gradient count.")
        return value

    found = batch_gradients(model, args, kwargs, names, scalar, shared, ranks, "measuring gradients", _norm)
    norms = {name: 0.0 if gradient is None else float(_norm(gradient)) for name, gradient in found.items()}
    bad = next((name for name, norm in norms.items() if not math.isfinite(norm)), None)
    if bad is not None:
        raise ImportanceError(f"the gradient of {bad} is NaN or infinite.")
    return norms


def batch_gradients(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    names: Collection[str],
    scalar: Callable[[Any], Tensor],
    shared: bool,
    ranks: Ranks | None,
    what: str,
    kept: Callable[[Tensor], Tensor] = lambda gradient: gradient,
) -> dict[str, Tensor | None]:
    """The gradient of each of the parameters `names`, for one batch: the mean of all `ranks`; None where there is none.

    Forward and backward run on a copy with the same weights: parameters, `.grad`, buffers, attributes and random streams stay as
    they are, and no hook on a parameter is called. A model whose weights are divided among ranks runs itself, with the same care.

    Args:
        args, kwargs: the batch, as the model is called with it, labels included.
        scalar: of the model's output, to be differentiated. Where float16 is in its backward, it is scaled, so that small
            gradients are not 0, but for a model whose weights are divided.
        shared: the copy shares the weights' memory, which forward is known not to write to.
        ranks: that train the model together, each of which calls this with its batch.
        what: see `Ranks`.
        kept: what is kept of a gradient that no ranks average.
    Raises:
        ImportanceError: the model cannot be copied, or a gradient is accumulated in parts.
    """
    ranks = ranks or Ranks.alone()
    names, divided = ranks.same(list(names), what), is_divided(model)

    def measure() -> dict[str, Tensor | None]:
        try:
            own = model if divided else twin(model, shared)
        except Exception as error:
            why = f'the model cannot be copied ({first_line(error)}). Use GreenTrainer(rule="capacity").'
            raise ImportanceError(why) from error
        of, named = pytree.tree_map(lambda value: value.clone() if isinstance(value, Tensor) else value, (args, dict(kwargs)))
        tensors = [*model.parameters(), *flatten_call(of, named).tensors]
        with unchanged_draws(tensors), unchanged_outside(model), no_generation_cache(own), torch.enable_grad():
            if divided:  # as DTensors; the backward is a full one
                return mean_gradients(model, lambda: scalar(model(*of, **named)), names)
            return _of_copy(own, names, lambda: scalar(own(*of, **named)), (lambda g: g) if ranks.several else kept)

    found = ranks.together(measure, what)
    return dict(zip(found, mean_of_ranks(found, model, ranks, what), strict=True))


def _of_copy(
    own: nn.Module, names: Collection[str], run: Callable[[], Tensor], kept: Callable[[Tensor], Tensor]
) -> dict[str, Tensor | None]:
    """What `kept` returns for each gradient, which is dropped then; None for parameters that the loss does not depend on."""
    found: dict[str, Tensor | None] = dict.fromkeys(names)
    parameters = {n: p for n, p in own.named_parameters() if n in found}
    value = run()
    scale = FLOAT16_SCALE if torch.float16 in backward_dtypes(value) else None
    for parameter in parameters.values():
        parameter.grad = None  # that of a subclass of nn.Parameter is copied with it

    def keep(name: str, parameter: Tensor) -> None:
        assert parameter.grad is not None
        if found[name] is not None:  # a backward inside the backward
            raise ImportanceError(f"the gradient of {name} is accumulated in parts.")
        found[name] = kept(parameter.grad if scale is None else parameter.grad.float() / scale)
        parameter.grad = None

    for name, parameter in parameters.items():
        parameter.register_post_accumulate_grad_hook(functools.partial(keep, name))
    (value if scale is None else value.float() * scale).backward(inputs=list(parameters.values()))
    return found


def _norm(gradient: Tensor) -> Tensor:
    """The L2 norm, as a tensor of no dimensions; of such a norm, itself."""
    dense = gradient.detach().to_dense() if gradient.layout != torch.strided else gradient.detach()
    return whole(torch.linalg.vector_norm(dense, dtype=torch.promote_types(dense.dtype, torch.float32)))

"""Importance of each tensor: how much one optimizer step on it alone would lower the loss (GreenTrainer, section 3.2).

I_k = -<dw_k, dL/dw_k> (Eq. 6), with dw_k what the caller's optimizer would do next. Everything is computed on copies: after
the call, parameters, `.grad`, optimizer state, buffers and RNG are bit-identical.
"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from graphopt.capture import unchanged_rng
from graphopt.distributed.ranks import Ranks
from graphopt.distributed.sharded import mean_gradients, whole
from graphopt.distributed.tensor_parallel import is_divided, mean_of_ranks
from graphopt.errors import ImportanceError
from graphopt.loss import PROBED, LossFunction, scalar_loss

Metric = Literal["loss", "update", "gradient"]
"""What the importance of a tensor is (GreenTrainer, Table 4): "loss", -<dw, g> (Eq. 6); "update", |dw|_1; "gradient", |g|_1."""


@dataclass(frozen=True)
class Importance:
    """What training a tensor is worth, by parameter name, scaled to a maximum of 1.

    Attributes:
        values: may be negative (the step would raise the loss); 0 for tensors that were not rated.
        source: what it was computed from, for the report.
        norms: of the gradients that were measured for it, by parameter name.
        probed: there was no loss, and random gradients of the outputs stood in.
        missed: the matrix in which the loss is by far the steepest, if the budget does not reach it; else "".
    """

    values: dict[str, float]
    source: str
    norms: dict[str, float] = field(default_factory=dict)
    probed: bool = False
    missed: str = ""

    def of(self, names: Iterable[str]) -> float:
        """Of these together; to the last bit the same in whatever order they come, as sets have none."""
        return math.fsum(self.values.get(name, 0.0) for name in names)


def measure_importance(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    names: Collection[str],
    optimizer: torch.optim.Optimizer | None = None,
    loss: LossFunction | None = None,
    metric: Metric = "loss",
    ranks: Ranks | None = None,
) -> Importance:
    """Importance of the parameters `names`, from one batch.

    The backward stops at the deepest of `names` (Eq. 8): leave out tensors that the budget cannot reach.

    Args:
        args, kwargs: the batch, as the model is called with it, labels included.
        optimizer: whose next step is dw, computed in float32 one tensor at a time on copies; tensors that it does not hold
            get 0. None: plain SGD, so I_k is proportional to |dL/dw_k|^2.
        loss: scalar from the model's output; by default the output's own loss, or the output where it is a scalar. A model
            that has none is probed with random output gradients instead, and `source` says so.
        metric: see `Metric`.
        ranks: that train the model together, each of which calls this with its batch: their gradients are averaged first.
    Raises:
        ImportanceError: not finite, all zero, or the optimizer cannot be stepped on copies.
    """
    optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
    ranks, what = ranks or Ranks.alone(), "measuring importance"
    names = ranks.same(list(names), what)
    parameters = {n: p for n, p in model.named_parameters() if n in set(names)}

    def measure() -> tuple[Sequence[Tensor | None], str]:
        if is_divided(model):
            return _of_divided(model, args, kwargs, list(parameters), loss)
        buffers = {name: b.detach().clone() for name, b in model.named_buffers()}
        with unchanged_rng(list(parameters.values())), torch.enable_grad():
            value, source = scalar_loss(torch.func.functional_call(model, buffers, args, dict(kwargs)), loss)
            return torch.autograd.grad(value, list(parameters.values()), allow_unused=True), source

    local, source = ranks.together(measure, what)
    gradients = mean_of_ranks(dict(zip(parameters, local, strict=True)), model, ranks, what)
    probed = source == PROBED
    if optimizer is None:
        source += ", plain SGD"
    else:
        source += f", {type(optimizer).__name__}'s next step"
    if metric != "loss":
        source += f", metric {metric!r}"
    raw: dict[str, float] = {}
    for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True):
        if gradient is None:
            raw[name] = 0.0
        else:
            update = -gradient.detach() if optimizer is None else next_update(optimizer, parameter, gradient)
            raw[name] = 0.0 if update is None else _rated(metric, update.double(), gradient.detach().double())
    largest = max((abs(v) for v in raw.values()), default=0.0)
    if not all(map(math.isfinite, raw.values())):
        bad = next(name for name, v in raw.items() if not math.isfinite(v))
        raise ImportanceError(f"importance is not finite (first at {bad}): the loss or its gradient is NaN or infinite.")
    if largest == 0.0:
        raise ImportanceError("importance is zero everywhere: the loss does not depend on any trainable tensor.")
    return Importance({n: raw.get(n, 0.0) / largest for n in names}, source, probed=probed)


def _rated(metric: Metric, update: Tensor, gradient: Tensor) -> float:
    if metric == "loss":
        return -float(whole((update * gradient).sum()))
    return float(whole((update if metric == "update" else gradient).abs().sum()))


def _of_divided(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], names: Sequence[str], loss: LossFunction | None
) -> tuple[Sequence[Tensor | None], str]:
    """As DTensors, of the model itself, and what was differentiated; the backward is a full one."""
    source = ""

    def run() -> Tensor:
        nonlocal source
        value, source = scalar_loss(model(*args, **kwargs), loss)
        return value

    with unchanged_rng(list(model.parameters())), torch.enable_grad():
        return list(mean_gradients(model, run, names).values()), source


def holds(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> bool:
    """Whether an optimizer steps a parameter."""
    return any(p is parameter for group in optimizer.param_groups for p in group["params"])


def next_update(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, gradient: Tensor) -> Tensor | None:
    """What `optimizer.step()` would add to `parameter`, in float32; None if it does not hold the parameter.

    Half-precision weights often round a step to zero, so weight, gradient and state are copied to float32 first.

    Raises:
        ImportanceError: the optimizer fails on a copy, e.g. because it needs a closure.
    """
    group = next((g for g in optimizer.param_groups if any(p is parameter for p in g["params"])), None)
    if group is None:
        return None
    weight = nn.Parameter(_wide(parameter.detach()))
    weight.grad = _wide(gradient.detach())
    state = {k: _wide(v) if isinstance(v, Tensor) else copy.deepcopy(v) for k, v in optimizer.state.get(parameter, {}).items()}
    shadow = object.__new__(type(optimizer))
    shadow.__dict__.update({k: v for k, v in vars(optimizer).items() if not callable(v)})
    shadow.__dict__["state"] = defaultdict(dict, {weight: state} if state else {})
    options = {k: copy.deepcopy(v) for k, v in group.items() if k != "params"}
    if all(float(g.get("lr", 1.0)) == 0.0 for g in optimizer.param_groups):
        # A warm-up starts at 0, where no tensor would move: rate them by the rate that it rises to.
        options["lr"] = group.get("initial_lr") or 1.0
    shadow.__dict__["param_groups"] = [{**options, "params": [weight]}]
    for hooks in [k for k in vars(shadow) if k.endswith("_hooks")]:
        shadow.__dict__[hooks] = OrderedDict()
    before = weight.detach().clone()
    try:
        type(optimizer).step(shadow)
    except Exception as error:
        raise ImportanceError(
            f"{type(optimizer).__name__} cannot be stepped on a copy of one tensor ({error}). Pass optimizer=None to rate "
            "tensors by their squared gradient instead."
        ) from error
    return weight.detach() - before


def _wide(tensor: Tensor) -> Tensor:
    if tensor.is_floating_point() and tensor.dtype in (torch.float16, torch.bfloat16):
        return tensor.float()
    return tensor.clone()

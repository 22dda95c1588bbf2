"""Importance of each tensor: how much one optimizer step on it alone would lower the loss (GreenTrainer, section 3.2).

I_k = -<dw_k, dL/dw_k> (Eq. 6), with dw_k what the caller's optimizer would do next. Everything is computed on copies: after
the call, parameters, `.grad`, optimizer state, buffers and RNG are bit-identical.
"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from graphopt.analysis.optimizers import unwrapped
from graphopt.distributed.divided import whole
from graphopt.distributed.ranks import Ranks
from graphopt.errors import ImportanceError
from graphopt.loss import PROBED, LossFunction, scalar_loss
from graphopt.planner.gradient_norms import batch_gradients

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
    shared: bool = False,
    ranks: Ranks | None = None,
) -> Importance:
    """Importance of the parameters `names`, from one batch.

    The backward stops at the deepest of `names` (Eq. 8): leave out tensors that the budget cannot reach.

    Args:
        args, kwargs, shared, ranks: see `batch_gradients`.
        optimizer: whose next step is dw, computed in float32 one tensor at a time on copies; tensors that it does not hold
            get 0. None: plain SGD, so I_k is proportional to |dL/dw_k|^2.
        loss: scalar from the model's output; by default the output's own loss, or the output where it is a scalar. A model
            that has none is probed with random output gradients instead, and `source` says so.
        metric: see `Metric`.
    Raises:
        ImportanceError: not finite, all zero, or the optimizer cannot be stepped on copies.
    """
    optimizer, source = unwrapped(optimizer), ""

    def scalar(output: Any) -> Tensor:
        nonlocal source
        value, source = scalar_loss(output, loss)
        return value

    gradients = batch_gradients(model, args, kwargs, names, scalar, shared, ranks, "measuring importance")
    probed = source == PROBED
    source += ", plain SGD" if optimizer is None else f", {type(optimizer).__name__}'s next step"
    if metric != "loss":
        source += f", metric {metric!r}"
    raw, parameters = dict.fromkeys(gradients, 0.0), dict(model.named_parameters())
    groups = {} if optimizer is None else {id(p): group for group in optimizer.param_groups for p in group["params"]}
    for name, gradient in gradients.items():
        if gradient is None:
            continue
        parameter = parameters[name]
        if optimizer is None:
            update = -gradient.detach()
        elif (group := groups.get(id(parameter))) is not None:
            update = next_update(optimizer, group, parameter, gradient)
        else:
            continue
        raw[name] = _rated(metric, update.double(), gradient.detach().double())
    largest = max((abs(v) for v in raw.values()), default=0.0)
    if not all(map(math.isfinite, raw.values())):
        bad = next(name for name, v in raw.items() if not math.isfinite(v))
        raise ImportanceError(f"importance is not finite (first at {bad}): the loss or its gradient is NaN or infinite.")
    if largest == 0.0:
        raise ImportanceError("importance is zero everywhere: the loss does not depend on any trainable tensor.")
    return Importance({n: value / largest for n, value in raw.items()}, source, probed=probed)


def _rated(metric: Metric, update: Tensor, gradient: Tensor) -> float:
    if metric == "loss":
        return -float(whole((update * gradient).sum()))
    return float(whole((update if metric == "update" else gradient).abs().sum()))


def next_update(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameter: nn.Parameter, gradient: Tensor) -> Tensor:
    """What `optimizer.step()` would add to a parameter, which it holds in `group`, in float32.

    Half-precision weights often round a step to zero, so weight, gradient and state are copied to float32 first.

    Raises:
        ImportanceError: the optimizer fails on a copy, e.g. because it needs a closure.
    """
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

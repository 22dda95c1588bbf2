"""Rating tensors by the rule that the plan's selection uses."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from graphopt.analysis.flops import FlopProfile
from graphopt.errors import ImportanceError
from graphopt.graph import TrainingGraph
from graphopt.loss import LossFunction
from graphopt.passes import GreenTrainer, Pass
from graphopt.planner.capacity import capacity
from graphopt.planner.importance import Importance, holds, measure_importance


def rate_tensors(
    passes: Sequence[Pass],
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    graph: TrainingGraph,
    profile: FlopProfile,
    reachable: Collection[str],
    optimizer: torch.optim.Optimizer | None = None,
    loss: LossFunction | None = None,
) -> Importance:
    """What training each parameter is worth, by the rule of the pass that selects; by its default without one.

    Args:
        reachable: those that the budget can reach. Where rating takes gradients, only these are rated.
        graph, profile: of a training step on that batch.
        args, kwargs, optimizer, loss: see `measure_importance`. Tensors that an optimizer does not hold are worth 0.
    Raises:
        ImportanceError: see `measure_importance`; or the optimizer holds none of the tensors.
    """
    if measures_gradients(passes):
        metric = next(p.metric for p in passes if isinstance(p, GreenTrainer))
        return measure_importance(model, args, kwargs, reachable, optimizer, loss, metric)
    rated = capacity(graph, profile)
    if optimizer is None:
        return rated
    parameters = dict(model.named_parameters())
    values = {name: value if holds(optimizer, parameters[name]) else 0.0 for name, value in rated.values.items()}
    if not any(values[name] for name in reachable):
        raise ImportanceError("the optimizer holds none of the tensors that the budget can reach: pass the one that trains them.")
    return replace(rated, values=values)


def measures_gradients(passes: Sequence[Pass]) -> bool:
    """Whether rating takes the forward and backward of a batch."""
    return any(isinstance(p, GreenTrainer) and p.rule == "greentrainer" for p in passes)

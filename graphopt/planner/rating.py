"""Rating tensors by the rule that the plan's selection uses."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from graphopt.analysis.flops import FlopProfile
from graphopt.distributed.ranks import Ranks
from graphopt.errors import ImportanceError, NoLoss, first_line
from graphopt.graph import TrainingGraph
from graphopt.loss import LossFunction
from graphopt.passes import Pass
from graphopt.passes.technique import Selecting, technique
from graphopt.planner.capacity import capacity
from graphopt.planner.gradient_norms import gradient_norms
from graphopt.planner.importance import Importance, measure_importance
from graphopt.planner.peaks import Peaks
from graphopt.planner.plan import Plan
from graphopt.runtime.stages import stage

logger = logging.getLogger(__name__)

MEETING = "rating tensors within a limit on memory"

_NO_LOSS = (
    "The model returns no loss for the example batch: put its labels into the batch, or give loss= to graphopt.optimize (before "
    "a Trainer is made) to have the loss count."
)


@dataclass(frozen=True)
class Rater:
    """What training each parameter is worth, by the rule of the pass that selects; by place and size without one.

    Attributes:
        model, args, kwargs, optimizer, loss: see `measure_importance`. Tensors that an optimizer does not hold are worth 0.
        graph: of a training step on that batch, as captured.
        ranks: that train the model together; see `batch_gradients`.
    """

    passes: Sequence[Pass]
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    graph: TrainingGraph
    optimizer: torch.optim.Optimizer | None = None
    loss: LossFunction | None = None
    ranks: Ranks | None = None

    def rate(self, profile: FlopProfile, reachable: Collection[str], earlier: Importance | None = None) -> Importance:
        """Rate the parameters.

        Args:
            profile: of the graph as it is where tensors are selected, see `FlopsLimit.profile`.
            reachable: those that the budget can reach. The rule "greentrainer" rates only these; the default one measures all,
                as what the first layers' gradients say of the inputs counts for all others.
            earlier: rating of the same model, whose gradients the default rule uses again.
        Raises:
            ImportanceError: see `measure_importance`; or the optimizer holds none of the tensors.
        """
        model, args, kwargs, optimizer, loss = self.model, self.args, self.kwargs, self.optimizer, self.loss
        selecting, rule = selecting_of(self.passes), rule_of(self.passes)
        written = {desc.target.kind for desc in self.graph.outputs if desc.kind == "mutation"}
        shared = self.graph.out_spec is not None and "parameter" not in written  # of a model of several graphs it is not known
        if selecting is not None and rule == "greentrainer":
            with stage("importance"):
                metric = selecting.metric
                measured = measure_importance(model, args, kwargs, reachable, optimizer, loss, metric, shared, self.ranks)
            if measured.probed:
                logger.warning("%s Tensors are rated by random gradients of its outputs.", _NO_LOSS)
            return measured
        rated, untold = capacity(self.graph, profile), ""
        if rule == "steepness":
            norms = earlier.norms if earlier is not None else {}
            try:
                if earlier is None:
                    with stage("importance"):
                        norms = gradient_norms(model, args, kwargs, profile.order, loss, shared, self.ranks)
            except (ImportanceError, RuntimeError) as error:  # too little memory, too: what follows needs no gradients
                untold = f"; gradients do not count: {first_line(error)}"
                if isinstance(error, NoLoss):
                    logger.warning("%s Tensors are rated by place and size alone.", _NO_LOSS)
            rated = capacity(self.graph, profile, norms, reachable)
        rated = replace(rated, source=rated.source + untold)
        if optimizer is None:
            return rated
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        parameters = dict(model.named_parameters())
        values = {name: value if id(parameters[name]) in held else 0.0 for name, value in rated.values.items()}
        if not any(values[name] for name in reachable):
            raise ImportanceError(
                "the optimizer holds none of the tensors that the budget can reach: pass the one that trains them."
            )
        return replace(rated, values=values)


def rated_by_all(
    plan: Plan, graph: TrainingGraph, rate: Callable[[], Importance], ranks: Ranks | None
) -> Callable[[], Importance]:
    """`rate`, for ranks of which each asks for it only where its own step exceeds a limit on memory.

    Where it takes the gradients of all, all measure now, if any of them is above the limit.
    """
    selecting = selecting_of(plan.passes)
    if ranks is None or not ranks.several or plan.memory is None or selecting is None or selecting.train is not None:
        return rate
    if rule_of(plan.passes) != "greentrainer" or ranks.all(plan.importance is not None, MEETING):
        return rate
    peaks = Peaks(graph, plan.memory)
    if ranks.all(ranks.together(lambda: peaks.within(plan), MEETING), MEETING):
        return rate
    rated = rate()
    return lambda: rated


def selecting_of(passes: Sequence[Pass]) -> Selecting | None:
    """How these passes select tensors; None where none of them leaves any untrained."""
    return next((found for p in passes if (found := technique(p).selecting) is not None), None)


def rule_of(passes: Sequence[Pass]) -> str:
    """The rule by which these passes select; that which needs nothing but a graph where none of them does."""
    selecting = selecting_of(passes)
    return "capacity" if selecting is None else selecting.rule


def without_gradients(passes: Sequence[Pass]) -> tuple[Pass, ...]:
    """The passes, of which the default rule measures no gradients."""
    return tuple(p if technique(p).selecting is None else technique(p).without_gradients() for p in passes)

"""Whether a batch has no more rows with a label than a step has places for."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from graphopt.passes.dead_rows.labels import STEPS, Labelled, counted, places_for
from graphopt.passes.dead_rows.ops import TooManyLabels
from graphopt.passes.state import State
from torch import Tensor, nn

from graphopt.calls import flatten_call
from graphopt.frontend.batch import batch_size
from graphopt.graph import TrainingGraph

if TYPE_CHECKING:
    from graphopt.frontend.step import RegionStep
    from graphopt.planner.plan import Plan
    from graphopt.runtime.module import OptimizedModule


class BatchLabels(State):
    """Counts the labels of every batch, and has one with too many computed in full."""

    saved = False

    def __init__(self, opt: OptimizedModule) -> None:
        self._opt = opt
        self._in_full: tuple[Plan, Plan] | None = None
        self._known = True
        self._draws: Tensor | None = None
        self._written: list[tuple[Tensor, Tensor]] = []

    def before_forward(self, plan: Plan, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
        """See `State`."""
        decision = plan.decisions.get("dead_rows")
        if not isinstance(decision, Labelled) or decision.part is None:
            return plan
        if self._known and self._fits(decision, model, args, kwargs):
            self._draws = torch.get_rng_state()
            self._written = self._copies()
            return plan
        return self._all_rows(plan, decision)

    def instead(self, plan: Plan, error: Exception) -> Plan | None:
        """See `State`. Until rows are found, a step draws numbers, and writes buffers where it is compiled: both are put back."""
        decision = plan.decisions.get("dead_rows")
        if not isinstance(error, TooManyLabels) or not isinstance(decision, Labelled) or self._draws is None:
            return None
        self._known = False
        self._opt.note(
            "rows with ignored labels are left out no more: the model makes labels of its inputs in another way than it did in "
            "the example, so that they cannot be counted before a step"
        )
        torch.set_rng_state(self._draws)
        with torch.no_grad():
            for tensor, before in self._written:
                tensor.copy_(before)
        return self._all_rows(plan, decision)

    def after_forward(self, step: RegionStep | None, output: Any) -> None:
        """See `State`."""
        self._written = []

    def _copies(self) -> list[tuple[Tensor, Tensor]]:
        """What a step of the model writes, such as running statistics, with copies of what it holds now."""
        graph: TrainingGraph | None = self._opt._graph
        names = {d.target.target for d in graph.outputs if d.kind == "mutation"} if graph is not None else set()
        return [(t, t.detach().clone()) for name, t in self._opt.tensors().items() if name in names] if names else []

    def _all_rows(self, plan: Plan, decision: Labelled) -> Plan:
        if self._in_full is None or self._in_full[0] is not plan:  # the same plan for all such batches
            self._in_full = plan, plan.decided("dead_rows", Labelled(STEPS, decision.names))
        return self._in_full[1]

    def _fits(self, decision: Labelled, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        assert decision.part is not None
        graph: TrainingGraph | None = self._opt._graph
        if graph is None:  # of a model that was unpickled, before its first step
            return False
        call = flatten_call(args, kwargs)
        parameters = _parameters(model)
        tensors = {_named(name, parameters): tensor for name, tensor in zip(call.names, call.tensors, strict=True)}
        names = (_named(name, parameters) for name in decision.names)
        inputs = {i: tensors[name] for i, name in enumerate(names) if name in tensors}
        found = counted(graph, inputs, batch_size(args, kwargs, self._opt.captures.batch_dim))
        return found is not None and all(most <= places_for(length, decision.part) for most, length in found)


def _parameters(model: nn.Module) -> list[str]:
    """Of a model's forward: those that are given by their place or by name."""
    found = inspect.signature(model.forward).parameters.values()
    return [p.name for p in found if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]


def _named(name: str, parameters: Sequence[str]) -> str:
    """The name of an argument that was given by its place, too: the example may have been given otherwise."""
    place, dot, rest = name.partition(".")
    return parameters[int(place)] + dot + rest if place.isdigit() and int(place) < len(parameters) else name

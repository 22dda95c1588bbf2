"""`torch.compile(model, backend="graphopt", options={"budget": 0.5})`.

Dynamo passes one graph after the other; each is planned by itself, when it comes, and then compiled as `graphopt.optimize`
has its graphs compiled. So every graph keeps to the budget, where `optimize` plans them together.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import fx, nn
from torch.utils.weak import WeakIdKeyDictionary

from graphopt.budget import Budget
from graphopt.compat.aot import joint_graph
from graphopt.compat.dynamo import differentiates, example_of, is_part
from graphopt.compat.graph_modules import copied, graph_module
from graphopt.distributed.ranks import Ranks
from graphopt.errors import BudgetError, InputError, PassError
from graphopt.frontend.backend import PlanBackend
from graphopt.frontend.compiled_region import Host
from graphopt.frontend.region import Region, region_of, training_graph
from graphopt.frontend.values import Values
from graphopt.graph import TrainingGraph
from graphopt.lower import check_backend
from graphopt.passes import Pass, Preserves
from graphopt.passes.technique import technique
from graphopt.planner.make_plan import make_plan
from graphopt.planner.memory_limit import MemoryLimit
from graphopt.planner.memory_plan import within_memory
from graphopt.planner.plan import Plan, resolve_passes
from graphopt.planner.rating import rule_of, without_gradients
from graphopt.runtime.disabled import switched_off

logger = logging.getLogger(__name__)

_TRAINED = WeakIdKeyDictionary()
"""Per parameter: the budget under which it was considered, the one that was granted, and whether it is trained."""


def graphopt_backend(
    module: fx.GraphModule, example_inputs: list[Any], *, options: Mapping[str, Any] | None = None, **_: Any
) -> Callable[..., Any]:
    """The backend function of `torch.compile`.

    Args:
        options: `budget`, `passes` and `backend`, as for `graphopt.optimize`.
    Raises:
        InputError: an unknown option; and whatever `graphopt.optimize` raises for these.
    """
    settings = {"budget": None, "passes": "auto", "backend": "inductor", **(options or {})}
    unknown = sorted(set(settings) - {"budget", "passes", "backend"})
    if unknown:
        raise InputError(f"unknown option {', '.join(unknown)}: use budget, passes and backend.")
    budget = Budget.of(settings["budget"])
    if switched_off():
        return module
    passes = _usable(resolve_passes(settings["passes"], budget), settings["passes"] == "auto")
    if budget.stated() and Ranks().several:
        raise PassError(
            "every rank would select tensors by itself, graph by graph, and gradients of different tensors would be averaged. "
            "Use graphopt.optimize(), where ranks agree, or leave the budget out."
        )
    check_backend(settings["backend"])
    placeholders = module.graph.find_nodes(op="placeholder")
    tensors = [example_of(node) for node in placeholders]
    region = region_of(placeholders, tensors, {})
    plan = Plan(budget, passes)
    if passes and region.trainable and differentiates(module):
        trained = {name: tensor for name, tensor in zip(region.names, tensors, strict=True) if name in region.trainable}
        plan = _planned(plan, region, module, example_inputs, trained, settings["backend"])
    host = _Host(region)
    return PlanBackend(plan, lambda: host, settings["backend"])(module, example_inputs)


def _usable(passes: tuple[Pass, ...], auto: bool) -> tuple[Pass, ...]:
    """The passes that need nothing but a graph; tensors are selected by place and size alone.

    Raises:
        PassError: the caller has named another.
    """
    if rule_of(passes) == "greentrainer":
        raise PassError("greentrainer's own rule takes a batch's gradients, which torch.compile does not show: use optimize().")
    inexact = [p for p in passes if p.preserves is not Preserves.EXACT]
    if inexact and not auto:
        needs = "an optimizer that steps compressed gradients" if inexact[0].preserves is Preserves.PROJECTED else "a controller"
        raise PassError(
            f"{inexact[0].name} needs {needs}, which torch.compile cannot hand out: use graphopt.optimize()"
            + (" and opt.make_optimizer()." if inexact[0].preserves is Preserves.PROJECTED else ".")
        )
    return without_gradients([p for p in passes if p not in inexact])


def _planned(
    plan: Plan, region: Region, module: fx.GraphModule, examples: Sequence[Any], trained: Mapping[str, Any], backend: Any
) -> Plan:
    """The plan for a graph. Tensors that were considered before, for other shapes or another graph, are trained or not as then.

    Raises:
        GraphoptError: see `graphopt.optimize`; for a budget only if this is the model's only graph.
    """
    joint, num_forward = joint_graph(graph_module(module, copied(module.graph)), examples)
    graph = training_graph(region, joint, num_forward)
    budget = plan.budget
    known = {name: entry for name, tensor in trained.items() if (entry := _TRAINED.get(tensor)) and entry[0] == budget}
    granted = next((entry[1] for entry in known.values()), budget)
    if len(known) < len(trained):
        plan = _planned_alone(plan, graph, module, trained, backend)
        granted = plan.budget
    if known:
        chosen = frozenset(trained) if plan.train is None else plan.train
        as_before = chosen - known.keys() | {name for name, entry in known.items() if entry[2]}
        plan = Plan(granted, plan.passes, as_before, memory=MemoryLimit.of(granted, backend))
        for rewrite in plan.passes:
            plan = technique(rewrite).measured(plan, graph, dict(trained))
        plan = within_memory(plan, graph)
    for name, tensor in trained.items():
        _TRAINED[tensor] = (budget, plan.budget, plan.train is None or name in plan.train)
    return plan


def _planned_alone(plan: Plan, graph: TrainingGraph, module: fx.GraphModule, trained: Mapping[str, Any], backend: Any) -> Plan:
    """The plan for a graph as if there were no other; one of several for which no plan keeps to the budget is trained in full."""
    try:
        return make_plan(_Parameters(trained), (), {}, graph, plan.budget, plan.passes, None, None, backend, lambda _: "")
    except BudgetError as error:
        if not is_part(module):
            raise
        logger.warning(
            "one of the graphs into which torch.compile breaks the model trains all of its %d tensors: %s "
            "graphopt.optimize() plans a model's graphs together.",
            len(trained),
            error,
        )
        return Plan(Budget(), plan.passes)


class _Parameters(nn.Module):
    """The parameters of a graph, by name."""

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        super().__init__()
        self.__dict__["held"] = dict(parameters)

    def named_parameters(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Iterator[Any]:
        return iter(self.__dict__["held"].items())


class _Host(Host):
    """Of a graph that is planned by itself."""

    def __init__(self, region: Region) -> None:
        self.planned = region.trainable
        self.values = Values()

    def drop_unselected(self) -> None:
        """The graph is compiled as torch.compile has it, and trains everything."""
        logger.warning("a graph that could not be rewritten trains everything that is in it")

    def note(self, text: str) -> None:
        logger.warning("%s", text)

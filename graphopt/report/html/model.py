"""The page of a model that is not optimised yet: what a step costs, and what each budget would train."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from torch import nn

from graphopt.analysis.flops import FlopProfile, flop_profile
from graphopt.budget import Budget
from graphopt.calls import as_call
from graphopt.frontend.planning_graph import analysed
from graphopt.graph import TrainingGraph
from graphopt.planner.capacity import capacity
from graphopt.planner.make_plan import make_plan
from graphopt.planner.memory_limit import MemoryLimit
from graphopt.planner.pareto import Point, trade_offs
from graphopt.planner.plan import Plan, resolve_passes
from graphopt.report.html.details import Source, page
from graphopt.report.tensors import tensor_rows
from graphopt.runtime.stages import stage


def model_page(
    model: nn.Module,
    inputs: Any,
    *,
    title: str,
    backend: str,
    optimizer: Any = "adamw",
    device_memory: int | str | None = None,
    front: bool = False,
) -> str:
    """The page; nothing is run, and weights may be fake.

    Args:
        model, inputs: see `graphopt.analyze`; a model in training mode.
        title, backend, optimizer, device_memory: see `Source`.
        front: look for the best plans over FLOPs and memory, too, which takes minutes.
    Raises:
        InputError, CaptureError, TorchVersionError: with cause and remedy.
    """
    args, kwargs = as_call(inputs)
    graph = analysed(model, args, kwargs, 0)
    flops = flop_profile(graph)
    passes = resolve_passes("auto", Budget())
    plan = make_plan(model, args, kwargs, graph, Budget(), passes, None, None, backend, lambda _: "", True)
    plan = replace(plan, importance=capacity(graph, flops))
    points: Sequence[Point] = ()
    if front:
        assert plan.importance is not None
        with stage("plan"):
            points = trade_offs(graph, plan.importance, MemoryLimit(0, backend, optimizer))
    source = Source(graph, plan, flops, backend, optimizer, device_memory, points, title)
    return page(source, _report(graph, flops, plan, backend))


def _report(graph: TrainingGraph, flops: FlopProfile, plan: Plan, backend: str) -> dict[str, Any]:
    """What `Report.to_dict` says of an optimised model, as far as it is known of one that is not."""
    reports = plan.rewrite(graph)[1]
    step = reports[-1].step_flops_after if reports else flops.step
    ratio = step / flops.step if flops.step else 1.0
    names = list(flops.order)
    return {
        "schema": 1,
        "verdict": "",
        "budget": {},
        "passes": [p.name for p in plan.passes],
        "approximations": [],
        "trained": len(names),
        "trainable": len(names),
        "selected": names,
        "cut": [],
        "forward_flops": flops.forward,
        "backward_flops": flops.backward,
        "full_step_flops": flops.step,
        "step_flops": step,
        "flops_ratio": ratio,
        "batch_size": flops.batch_size,
        "importance": plan.importance.source if plan.importance else "",
        "batch": "symbolic (any size)" if graph.symbolic else f"as in the example: {graph.static_reason}",
        "device": str(graph.example.device),
        "backend": backend,
        "notes": [],
        "tensors": [asdict(row) for row in tensor_rows(plan, graph, flops, flops, ratio)],
    }

"""The page of a model that is not optimised yet: what a step costs, and what each budget would train."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from graphopt.analysis.flops import flop_profile
from graphopt.budget import Budget, parse_bytes
from graphopt.calls import as_call
from graphopt.frontend.planning_graph import analysed
from graphopt.planner.capacity import capacity
from graphopt.planner.make_plan import make_plan
from graphopt.planner.pareto import Point, trade_offs
from graphopt.planner.plan import resolve_passes
from graphopt.report.html.details import page
from graphopt.report.source import Source
from graphopt.report.summary import make_report
from graphopt.runtime.captures import Captures
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
        backend: whose memory is predicted: "inductor" or "aot_eager".
        title, optimizer, device_memory: see `page`.
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
        with stage("plan"):
            points = trade_offs(graph, backend, optimizer)
    report = make_report(graph, flops, plan, Captures(model, 0, backend), None, 0.0, {})
    values = {**report.to_dict(), "verdict": ""}
    device = None if device_memory is None else parse_bytes(device_memory)
    return page(Source(graph, plan, flops, backend), values, optimizer, device, points, title)

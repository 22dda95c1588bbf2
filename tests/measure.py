"""What a step needs as predicted, and allocates by torch.profiler; and the FLOPs of what Inductor is given to compile."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import sympy
from torch import nn
from torch.profiler import ProfilerActivity, profile

from graphopt.analysis.flops import node_flops
from graphopt.analysis.step_memory import step_memory
from graphopt.calls import as_call
from graphopt.capture import capture
from graphopt.graph import BATCH, TrainingGraph
from graphopt.specialise import symbolic
from graphopt.transforms.partition import split
from graphopt.transforms.symbolic_zeros import as_differentiated


def planned_peak(model: nn.Module, inputs: Any, optimizer: Any = "adamw") -> int:
    """Bytes of a step without a budget, of the graph that `graphopt.optimize` plans on, which is traced once for both."""
    graph = as_differentiated(capture(model, *as_call(inputs), symbolic=False))
    return step_memory(graph, "aot_eager", optimizer).peak_bytes


def partitioned_flops(graph: TrainingGraph) -> int:
    """FLOPs of the forward and the backward that Inductor's partitioner makes of a graph, for its captured batch."""
    halves = split(symbolic(graph, decompose=True), inductor=True)
    nodes = [*halves.forward.graph.nodes, *halves.backward.graph.nodes]
    return int(sympy.Add(*(graph.formula(node_flops(n)) for n in nodes)).subs(BATCH, graph.batch_size))


def peak_and_rest(call: Callable[[], object]) -> tuple[int, int]:
    """Largest running sum of bytes allocated by `call` on the CPU, and what is still there when it returns."""
    gc.disable()  # what earlier tests left in cycles must not be freed meanwhile; collecting it first takes most of a second
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            call()
    finally:
        gc.enable()
    current = peak = 0
    for event in profiler.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            current += event.nbytes()
            peak = max(peak, current)
    return peak, current

"""What a plan does with a region's joint graph while AOTAutograd compiles it."""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from graphopt.compat import InputDesc, output_list
from graphopt.compat.aot import ABSENT, Hooks
from graphopt.compat.dynamo import outside_tracing
from graphopt.compat.graph_modules import copied, graph_module
from graphopt.errors import first_line
from graphopt.frontend.compiled_region import CompiledRegion, Host
from graphopt.frontend.outputs import unasked
from graphopt.frontend.region import (
    Region,
    drop_gradients,
    fix_sizes,
    put_tangents_back,
    take_tangents_out,
    training_graph,
    write_mutations,
)
from graphopt.graph import TrainingGraph, remove_dead_nodes
from graphopt.passes import Preserves
from graphopt.passes.technique import technique
from graphopt.planner.plan import Plan
from graphopt.transforms.symbolic_zeros import for_loss_alone


def hooks_for(plan: Plan, found: CompiledRegion, weak: Callable[[], Host], values: Sequence[Any]) -> Hooks:
    """What carries out a plan on a region's joint graph, and fills in `found`.

    Args:
        weak: gives whom the region is compiled for; torch keeps these functions for as long as the compiled graph, which nothing
            collects in cycles.
        values: of the placeholders in the call under way.
    """
    host = weak()
    dims: Sequence[int | None] = host.batch_dims(values) if plan.samples else ()
    trial: dict[str, Tensor] = {}
    if plan.samples:  # not held for longer: they are the caller's
        trial = {str(i): value for i, value in enumerate(values) if isinstance(value, Tensor)}

    def see(joint: fx.GraphModule, num_forward: int) -> fx.GraphModule:
        remove_dead_nodes(joint)  # a draw that nobody reads is more than torch's simpler partitioner can split
        found.graph = training_graph(found.region, graph_module(joint, copied(joint.graph)), num_forward, weak().batch_size())
        placeholders = joint.graph.find_nodes(op="placeholder")
        for position, _ in take_tangents_out(found.graph, found.unasked):
            placeholders[position].meta[ABSENT] = True
        return joint

    def rewrite(joint: fx.GraphModule, num_forward: int) -> fx.GraphModule:
        start = time.perf_counter()
        num_outputs = len(output_list(joint))
        graph = training_graph(found.region, joint, num_forward, weak().batch_size(), dims)
        taken = take_tangents_out(graph, found.unasked)
        if found.needless:
            drop_gradients(graph, [InputDesc("input", i) for i in found.needless])
        graph = _rewritten(plan, graph, found, weak(), trial)
        trial.clear()
        found.graph = graph.clone()
        found.gated = any(node.target is torch.ops.graphopt.gate.default for node in graph.graph.nodes)
        weak().values.connect(graph, num_outputs)
        write_mutations(graph, num_outputs)
        if any(dim is not None for dim in dims):
            fix_sizes(graph)
        put_tangents_back(graph.module, taken)
        found.rewrite_seconds = time.perf_counter() - start
        return graph.module

    def halves(forward: fx.GraphModule, backward: fx.GraphModule) -> None:
        found.halves = (graph_module(forward, copied(forward.graph)), graph_module(backward, copied(backward.graph)))

    def failed(error: Exception) -> None:
        weak().note(f"a backward could not be compiled ({first_line(error)}); it runs uncompiled")

    # Of a pass of the user's own no key can tell: it may take its code from any file.
    untold = any(technique(p).measures_machine or not type(p).__module__.startswith("graphopt.") for p in plan.passes)
    changes, untold = rewrite if plan.passes else see, untold or plan.samples
    return Hooks(changes, halves, failed, _key(plan, found, host), not plan.passes, untold, (unasked,))


def _rewritten(plan: Plan, graph: TrainingGraph, found: CompiledRegion, host: Host, trial: Mapping[str, Tensor]) -> TrainingGraph:
    """A region under the plan; without approximations, or with nothing but the cuts, where that fails."""
    if len(for_loss_alone(graph).inputs) < len(graph.inputs):
        if plan.samples:
            beside = "the step has gradients of outputs beside the loss (outputs='loss' leaves these out)"
            host.note(f"the backward is not sampled: {beside}")
        for rewrite in plan.passes:
            plan = technique(rewrite).for_all_outputs(plan)
    if plan.samples and not plan.not_separable:
        try:
            reason = _inseparable(plan, graph, found.region, host.planned, trial)
        except Exception as error:
            reason = first_line(error)
        if reason:
            host.note(f"rows of the backward are not sampled: {reason}")
            plan = replace(plan, not_separable=reason)
    candidates = [plan]
    if any(p.preserves is not Preserves.EXACT for p in plan.passes):
        candidates.append(plan.without_approximations())
    for candidate in candidates:
        try:
            rewritten, reports = candidate.rewrite_region(graph, host.planned)
        except Exception as error:
            instead = "without approximations" if candidate is not candidates[-1] else "as torch.compile has it"
            host.note(f"a part of the model could not be rewritten ({first_line(error)}); it runs {instead}")
            continue
        found.reports, found.reduced = tuple(reports), candidate is not plan
        found.sampled_part = plan.sampled_part(graph, graph.batch_size, reports)
        return rewritten
    drop_gradients(graph, [InputDesc("parameter", p.name) for p in graph.parameters if not plan.trains(p.name, host.planned)])
    found.reports, found.reduced = (), True
    return graph


def _key(plan: Plan, found: CompiledRegion, host: Host) -> str:
    """All that a rewritten region depends on but its graph, as text that is the same in every process."""
    passes = [(p.name, repr(p)) for p in plan.passes]
    batch = (plan.not_separable, host.batch_size()) if plan.samples else ()
    decided = (plan.key, passes, host.values.numbers, batch, plan.memory and plan.memory.key)
    parts = (_own_code(), found.region.names, found.needless, sorted(host.planned), decided)
    return "graphopt " + hashlib.sha256(repr(parts).encode()).hexdigest()


@functools.cache
def _own_code() -> str:
    """Text that changes with graphopt's files: what other code rewrote must not be taken from torch's cache on disk."""
    from graphopt import passes

    folders = (Path(__file__).parents[1], Path(passes.__file__).parent)
    files = sorted({(str(f), f.stat().st_size, f.stat().st_mtime_ns) for folder in folders for f in folder.rglob("*.py")})
    return hashlib.sha256(repr(files).encode()).hexdigest()


def _inseparable(plan: Plan, graph: TrainingGraph, region: Region, planned: Collection[str], trial: Mapping[str, Tensor]) -> str:
    """Why rows of a region's backward must not be left out; "" if they may.

    Args:
        trial: values of the placeholders, by position.
    """
    tensors = {name: trial[str(i)] for i, name in enumerate(region.names) if name is not None}
    inputs = [torch.empty(0) if name is not None else trial.get(str(i), torch.empty(0)) for i, name in enumerate(region.names)]
    with outside_tracing():
        return plan.inseparable(plan.before_sampling().rewrite_region(graph, planned)[0], tensors, inputs)

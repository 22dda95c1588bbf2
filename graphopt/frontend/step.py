"""A training step, as the parts of the model that ran in it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from graphopt.compat import draws, pytree
from graphopt.frontend.compiled_region import CompiledRegion
from graphopt.graph import TrainingGraph
from graphopt.passes import PassReport
from graphopt.planner.plan import Plan

CLEARLY = 0.02
"""Part of the FLOPs that a batch of another size may take more than the one that the plan was made for, without a warning."""


@dataclass(frozen=True)
class RegionStep:
    """A training step, as the regions that ran in it.

    Attributes:
        plan: that they were compiled under.
        regions: in the order in which they ran.
        seconds: of forward and backward, in some of its runs; see `note_seconds`.
        broken: parts of the model run in eager mode, or in other graphs.
    """

    plan: Plan
    regions: tuple[CompiledRegion, ...]
    seconds: deque[float]
    broken: bool = False

    @property
    def sampled_part(self) -> float:
        """FLOPs as a part of those with every row kept."""
        return min((region.sampled_part for region in self.regions), default=1.0)

    @property
    def graph(self) -> TrainingGraph:
        """The joint graph with the most operators, which is the only one where there is no graph break."""
        return max(self.graphs, key=lambda graph: len(graph.graph.nodes))

    @property
    def graphs(self) -> list[TrainingGraph]:
        """The joint graphs of the regions that have one."""
        return [graph for region in self.regions if (graph := region.graph_of_last_run()) is not None]

    @property
    def reports(self) -> tuple[PassReport, ...]:
        """What each pass did, in all regions together."""
        merged: dict[str, PassReport] = {}
        for region in self.regions:
            for report in region.reports:
                merged[report.name] = _together(merged[report.name], report) if report.name in merged else report
        return tuple(merged.values())

    def tell_of_flops(self, note: Callable[[str], None]) -> None:
        """Note it if the step takes clearly more FLOPs than its plan's budget; parts by themselves say nothing of that."""
        limit, reports = self.plan.budget.flops, () if self.broken or self.plan.measures else self.reports
        whole = reports[0].step_flops_before if reports else 0
        if limit is None or not whole or reports[-1].step_flops_after <= (limit + CLEARLY) * whole:
            return
        gradients = [d.target.kind for graph in self.graphs for d in graph.outputs if d.kind == "gradient"]
        if not gradients:
            return
        why = (
            "gradients of inputs are computed as well. Give optimize() a batch that requires them, as training has"
            if "input" in gradients
            else "the plan was made for another batch or loss, or before hooks or parameters were added. Give optimize() a batch "
            "with as many labels, and as long, as training has, and loss= where more than the model's first output is "
            "differentiated; after hooks or parameters were added or replaced, optimize again"
        )
        note(f"a step takes {reports[-1].step_flops_after / whole:.2f} of the FLOPs, over flops={limit:.4g}: {why}")

    @cached_property
    def draws(self) -> bool:
        """Whether it draws random numbers."""
        return any(draws(node) for r in self.regions if r.graph is not None for node in r.graph.graph.nodes)

    def note_seconds(self, output: Any, start: float) -> None:
        """Note the seconds from `start` to the end of the first backward from what the model has returned, of some steps."""
        if len(self.seconds) == self.seconds.maxlen:
            return
        leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.grad_fn is not None]
        if not leaves:
            return
        seconds = self.seconds  # what waits for a backward must not keep the step alive

        def begun(_: Tensor) -> None:
            handle.remove()
            torch.autograd.Variable._execution_engine.queue_callback(lambda: seconds.append(time.perf_counter() - start))

        handle = leaves[0].register_hook(begun)

    @property
    def halves(self) -> tuple[tuple[fx.GraphModule, fx.GraphModule], ...]:
        """Forward and backward of every region that has a backward."""
        for region in self.regions:
            if region.halves is None and region.again is not None:
                region.again()
        return tuple(region.halves for region in self.regions if region.halves is not None)


def _together(a: PassReport, b: PassReport) -> PassReport:
    changes = replace(
        a.changes,
        changed=(*a.changes.changed, *b.changes.changed),
        left_alone={**a.changes.left_alone, **b.changes.left_alone},
    )
    return replace(
        a,
        changes=changes,
        step_flops_before=a.step_flops_before + b.step_flops_before,
        step_flops_after=a.step_flops_after + b.step_flops_after,
        saved_bytes_before=a.saved_bytes_before + b.saved_bytes_before,
        saved_bytes_after=a.saved_bytes_after + b.saved_bytes_after,
        choices=(*a.choices, *b.choices),
    )

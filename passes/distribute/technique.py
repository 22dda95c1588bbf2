"""Data parallel training with the collectives in the joint graph.

On each of n ranks, with its own batch, a graph that returns gradients g_i returns (g_1 + ... + g_n) / n: of exactly those that
it still computes, whatever was cut, and in compressed form where they are compressed, because an image P'GQ is linear in G.

Preserves: EXACT. Every gradient is the mean of the ranks' gradients, to rounding; with two ranks, bit by bit that of
DistributedDataParallel around the same model.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from graphopt.passes.base import Changes, PassReport, Preserves, Site
from graphopt.passes.distribute.rewrite import BYTES, in_buckets, insert_means
from graphopt.passes.state import State
from graphopt.passes.technique import Planning, Section, Technique

from graphopt.graph import TrainingGraph

if TYPE_CHECKING:
    from graphopt.planner.plan import Plan
    from graphopt.runtime.module import OptimizedModule


@dataclass(frozen=True)
class Reduced:
    """In which order gradients are averaged.

    Attributes:
        order: names of parameters as their gradients become ready on rank 0; the same on all ranks.
        local: a step communicates nothing: see `OptimizedModule.no_sync`.
    """

    order: tuple[str, ...]
    local: bool = False

    @property
    def key(self) -> Hashable:
        """See `Decision`."""
        return self.order, self.local

    def wanted(self, trained: Collection[str] | None, frozen: Collection[str]) -> tuple[str, ...]:
        """Names of the gradients that a step averages.

        Args:
            trained: see `Plan.train`.
            frozen: parameters that require no gradient now.
        """
        return tuple(n for n in self.order if (trained is None or n in trained) and n not in frozen)


@dataclass(frozen=True)
class Distribute(Technique):
    """The means; `optimize(mesh=...)` adds it.

    Attributes:
        group: the name of the process group.
        size: its number of ranks.
        bucket_bytes: see `in_buckets`.
        elsewhere: names of parameters whose gradients `fully_shard` averages. The others' are then averaged after the backward.
    """

    group: str
    size: int
    bucket_bytes: int = BYTES
    elsewhere: frozenset[str] = frozenset()
    name = "distribute"
    preserves = Preserves.EXACT
    serves = ()
    by_part = True
    communicates = True

    def applicable(self, graph: TrainingGraph) -> list[Site]:
        """Every parameter whose gradient the graph computes."""
        return [Site(name) for name in graph.gradients()]

    def before_selection(self, plan: Plan, planning: Planning) -> Plan:
        """The plan with the order in which gradients become ready; buckets count in the memory that is planned."""
        return plan.decided(self.name, self._reduced(planning.graph))

    def reselected(self, plan: Plan, graph: TrainingGraph, not_separable: Any) -> Plan:
        """The same of a graph in which other parameters may be frozen."""
        return plan.decided(self.name, self._reduced(graph))

    def _reduced(self, graph: TrainingGraph) -> Reduced:
        return Reduced(tuple(name for name in ready_order(graph) if name not in self.elsewhere))

    def decide(
        self, plan: Plan, captured: TrainingGraph, graph: TrainingGraph
    ) -> tuple[tuple[tuple[str, ...], ...], tuple[Any, ...]]:
        """The buckets; none in a graph that has not all of the gradients, or sparse ones, or whose step measures.

        `reduction` then averages them after the backward, in the same buckets.
        """
        mine: Reduced | None = plan.decisions.get(self.name)
        if mine is None or mine.local or plan.measures or self.elsewhere:
            return (), ()
        wanted = mine.wanted(plan.train, {p.name for p in captured.parameters if not p.trainable})
        values = {name: node.meta["val"] for name, node in graph.gradients().items()}
        if not all(name in values and values[name].layout == torch.strided for name in wanted):
            return (), ()
        sized = [(n, (v.dtype, v.device), v.numel() * v.element_size()) for n in wanted for v in [values[n]]]
        return in_buckets(sized, self.bucket_bytes), ()

    def apply(self, graph: TrainingGraph, decisions: Sequence[Sequence[str]]) -> Changes:
        """Average the gradients of every bucket in `decisions`."""
        if decisions:
            insert_means(graph, decisions, self.group, self.size)
        return Changes(tuple(name for bucket in decisions for name in bucket))

    def section(
        self, plan: Plan, graph: TrainingGraph, reports: Sequence[PassReport], ran: Sequence[PassReport], state: State | None
    ) -> Section:
        """Whether the gradients are averaged in the graph."""
        from graphopt.passes.distribute.reduction import Reduction

        after = state.why_after if isinstance(state, Reduction) else ""
        where = f"after the backward: {after}" if after else "in the graph"
        text = f"gradients are averaged over {self.size} ranks, {where}"
        return Section({"ranks": self.size, "in_graph": not after}, (f"ranks            {text}",))

    def start(self, opt: OptimizedModule) -> State | None:
        """What averages gradients that no graph has averaged."""
        from graphopt.passes.distribute.reduction import Reduction

        return Reduction(self, opt)


def ready_order(graph: TrainingGraph) -> tuple[str, ...]:
    """Names of parameters, in the order in which a graph computes their gradients."""
    order, gradients = {node: i for i, node in enumerate(graph.graph.nodes)}, graph.gradients()
    return tuple(sorted(gradients, key=lambda name: order[gradients[name]]))

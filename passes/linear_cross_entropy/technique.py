"""Logits in chunks of tokens, as a technique: how many chunks.

Preserves: EXACT.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from graphopt.passes.base import Changes, PassReport, Preserves, Site
from graphopt.passes.linear_cross_entropy.heads import Head, NotSeparable, as_matrices, find_heads
from graphopt.passes.linear_cross_entropy.rewrite import in_chunks
from graphopt.passes.state import State
from graphopt.passes.technique import Planning, Section, Technique, left_alone

from graphopt.analysis.flops import flop_profile
from graphopt.errors import PassError
from graphopt.graph import TrainingGraph
from graphopt.planner.step_time import machine_times
from graphopt.transforms.symbolic_zeros import for_loss_alone

if TYPE_CHECKING:
    from graphopt.planner.plan import Plan

LEAST_BYTES = 2**26
"""Of logits and their gradients, that must be saved for "auto" to work in chunks."""

FEWEST_TOKENS = 512
"""Of a chunk: products of fewer rows are slow."""

SLOWER = 0.02
"""Part of a step's time that adding up the weight's gradient may take."""


@dataclass(frozen=True)
class LinearCrossEntropy(Technique):
    """Computing logits, loss and gradients of a head for some tokens at a time.

    Attributes:
        chunks: into how many parts the tokens of a batch are divided. None: as many as take no more than 2 % of a step's time by
            the roofline, where that saves 64 MiB or more.
    Raises:
        PassError: fewer than one chunk.
    """

    chunks: int | None = None
    name = "linear_cross_entropy"
    preserves = Preserves.EXACT
    serves = ()
    by_part = True
    loss_alone = True
    unneeded = "no logits are large enough"

    def __post_init__(self) -> None:
        if self.chunks is not None and self.chunks < 1:
            raise PassError(f"linear_cross_entropy: chunks={self.chunks} must be at least 1.")

    def applicable(self, graph: TrainingGraph) -> list[Site]:
        """Every head, by the name of its weight."""
        return [Site(head.name) for head in find_heads(prepared(graph))[0]]

    def before_selection(self, plan: Plan, planning: Planning) -> Plan:
        """Leave a plan where nothing is worth it."""
        if not planning.auto or self._chosen(planning.graph):
            return plan
        return plan.without(self, self.unneeded)

    def decide(self, plan: Plan, captured: TrainingGraph, graph: TrainingGraph) -> tuple[tuple[tuple[str, int], ...], tuple[()]]:
        """By head, how many chunks."""
        return tuple(self._chosen(graph).items()), ()

    def _chosen(self, graph: TrainingGraph) -> dict[str, int]:
        heads, _ = find_heads(prepared(graph))
        return {head.name: count for head in heads if (count := self._chunks_of(head, graph)) > 1}

    def _chunks_of(self, head: Head, graph: TrainingGraph) -> int:
        if self.chunks is not None:
            return min(self.chunks, head.tokens)
        most = min(head.tokens // FEWEST_TOKENS, _affordable(head, graph))
        return most if most > 1 and head.saved_bytes * (1 - 1 / most) >= LEAST_BYTES else 1

    def apply(self, graph: TrainingGraph, decisions: Collection[Any] | Mapping[str, int]) -> Changes:
        """Compute the heads in `decisions` in as many chunks as it says; where only names are given, in `chunks`, or two.

        Raises:
            PassError: an unknown head.
        """
        pairs = decisions.items() if isinstance(decisions, Mapping) else decisions
        counts: dict[str, int] = dict(pair if isinstance(pair, tuple) else (pair, self.chunks or 2) for pair in pairs)
        alone = prepared(graph)
        heads, left = find_heads(alone)
        unknown = sorted(set(counts).difference(head.name for head in heads))
        if unknown:
            why = f"it cannot be divided: {left[unknown[0]]}" if unknown[0] in left else "there is no such head"
            raise PassError(f"linear_cross_entropy: {unknown[0]}: {why}.")
        before, changed = len(graph.graph.nodes), []
        if counts:
            graph.module, graph.inputs, graph.refused = alone.module, alone.inputs, alone.refused
        for head in heads:
            if head.name in counts:
                try:
                    in_chunks(graph, head, -(-head.tokens // counts[head.name]))
                    changed.append(head.name)
                except NotSeparable as reason:
                    left[head.name] = str(reason)
            else:
                left[head.name] = "its logits are small, or its gradient is"
        return Changes(tuple(changed), left, before - len(graph.graph.nodes))

    def section(
        self, plan: Plan, graph: TrainingGraph, reports: Sequence[PassReport], ran: Sequence[PassReport], state: State | None
    ) -> Section:
        """By head, in how many chunks it is computed."""
        changed = {name for report in ran if report.name == self.name for name in report.changes.changed}
        facts = {name: count for name, count in self._chosen(graph).items() if name in changed}
        heads, _ = find_heads(prepared(graph)) if facts else ([], {})
        kept = [f"the logits of {h.name} are an output, and kept" for h in heads if h.name in facts and h.in_full]
        return Section(
            {"chunks": facts} if facts else {},
            tuple(f"cross entropy    {name} in {count} chunks of tokens" for name, count in facts.items()),
            tuple(kept),
            left_alone(self.name, reports, changed),
        )


def prepared(graph: TrainingGraph) -> TrainingGraph:
    """A copy of a graph in the form in which heads are looked for."""
    alone = for_loss_alone(graph).clone()
    as_matrices(alone)
    return alone


def _affordable(head: Head, graph: TrainingGraph) -> int:
    """Chunks for which adding up what is summed over tokens takes no more than `SLOWER` of the step's time."""
    value = head.loss.args[0].meta["val"]  # type: ignore[union-attr]
    times = machine_times(value.device, value.dtype)
    once = 2 * head.weights_bytes / times.bandwidth  # it is read, and written
    return math.floor(SLOWER * flop_profile(graph).step / times.peak / once) if once else head.tokens

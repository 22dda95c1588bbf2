"""Logits in chunks of tokens, as a technique: how many chunks.

Preserves: EXACT.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from graphopt.passes.base import Changes, PassReport, Preserves, Site
from graphopt.passes.fields import require_whole
from graphopt.passes.linear_cross_entropy.heads import Head, find_heads
from graphopt.passes.linear_cross_entropy.matrices import NotSeparable, as_matrices
from graphopt.passes.linear_cross_entropy.rewrite import Chunking
from graphopt.passes.state import State
from graphopt.passes.technique import Planning, Section, Technique, left_alone

from graphopt.analysis.flops import flop_profile
from graphopt.analysis.kept import kept
from graphopt.analysis.row_rules import NLL
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


LEAST_TOKENS = 32
"""Of a chunk, however little memory there is."""


@dataclass(frozen=True)
class Chunk:
    """How many tokens are worked on at a time.

    Attributes:
        tokens: as `Budget(memory=...)` needs it; 0: heads stay whole, whatever the batch; None: as each head is worth it.
        least: by head, as few as are worth their time. It is measured once: other batches and processes divide in the same way.
        worth_it: the heads that were so for the example, which are divided in graphs for any batch, whichever these met first.
    """

    tokens: int | None
    least: Mapping[str, int] = field(default_factory=dict)
    worth_it: tuple[str, ...] = ()

    @property
    def key(self) -> Hashable:
        """See `Decision`."""
        return str(self.tokens) if self.tokens is not None else f"by themselves: {dict(self.least)}, {self.worth_it}"


@dataclass(frozen=True)
class LinearCrossEntropy(Technique):
    """Computing logits, loss and gradients of a head for some tokens at a time.

    Attributes:
        chunks: into how many parts the tokens of a batch are divided. None: as many as take no more than 2 % of a step's time by
            the roofline, where that saves 64 MiB or more; and as many more as `Budget(memory=...)` needs.
    Raises:
        PassError: no number of chunks.
    """

    chunks: int | None = None
    name = "linear_cross_entropy"
    preserves = Preserves.EXACT
    serves = ()
    by_part = True
    decides = Chunk
    unneeded = "no logits are large enough"

    def __post_init__(self) -> None:
        if self.chunks is not None:
            require_whole(self, "chunks")

    def applicable(self, graph: TrainingGraph) -> list[Site]:
        """Every head, by the name of its weight."""
        return [Site(head.name) for head in find_heads(prepared(graph))[0]]

    def before_selection(self, plan: Plan, planning: Planning) -> Plan:
        """Leave a plan where nothing is worth it; or stay for the memory's sake alone."""
        if self.chunks is not None:
            return plan
        heads = known_heads(planning.graph)
        measured = None if _samples(plan) else _measured(heads, planning.graph)
        if measured is None or not measured.worth_it:
            if plan.memory is not None and heads:
                return plan.decided(self.name, Chunk(0))
            if planning.auto:
                return plan.without(self, "rows of logits are left out instead" if _samples(plan) else self.unneeded)
        return plan.decided(self.name, measured) if measured is not None else plan

    def for_all_outputs(self, plan: Plan) -> Plan:
        """Without itself."""
        return plan.with_passes([p for p in plan.passes if p.name != self.name])

    def finer(self, plan: Plan, graph: TrainingGraph) -> Plan | None:
        """Half as many tokens at a time."""
        heads = known_heads(graph)
        if self.chunks is not None or not heads:
            return None
        chosen = self._chosen(plan, graph)
        tokens = max(chosen.get(head.name, head.tokens) for head in heads) // 2
        return plan.decided(self.name, Chunk(tokens)) if tokens >= LEAST_TOKENS else None

    def extra_seconds(self, plan: Plan, graph: TrainingGraph) -> float:
        """Of adding up, chunk after chunk, what is summed over tokens."""
        chosen = self._chosen(plan, graph)
        heads = [head for head in known_heads(graph) if head.name in chosen]
        return sum(-(-head.tokens // chosen[head.name]) * _seconds_per_chunk(head) for head in heads)

    def decide(self, plan: Plan, captured: TrainingGraph, graph: TrainingGraph) -> tuple[tuple[tuple[str, int], ...], tuple[()]]:
        """By head, how many tokens at a time."""
        return tuple(self._chosen(plan, graph).items()), ()

    def _chosen(self, plan: Plan, graph: TrainingGraph) -> dict[str, int]:
        decided = plan.decisions.get(self.name)
        if self.chunks == 1 or (self.chunks is None and decided is None and _samples(plan)):
            return {}
        heads = known_heads(graph)
        if self.chunks is not None:
            return {head.name: -(-head.tokens // self.chunks) for head in heads}
        decided = decided or _measured(heads, graph)
        found = {head.name: _tokens_of(head, decided) for head in heads}
        return {name: tokens for name, tokens in found.items() if tokens}

    def apply(self, graph: TrainingGraph, decisions: Collection[Any] | Mapping[str, int]) -> Changes:
        """Compute the heads in `decisions` for as many tokens at a time as these say; of those that are names alone in `chunks`.

        Raises:
            PassError: an unknown head.
        """
        pairs = decisions.items() if isinstance(decisions, Mapping) else decisions
        tokens: dict[str, int | None] = dict(pair if isinstance(pair, tuple) else (pair, None) for pair in pairs)
        alone = prepared(graph)
        heads, left = find_heads(alone)
        unknown = sorted(set(tokens).difference(head.name for head in heads))
        if unknown:
            why = f"it cannot be divided: {left[unknown[0]]}" if unknown[0] in left else "there is no such head"
            raise PassError(f"linear_cross_entropy: {unknown[0]}: {why}.")
        changed = []
        if tokens:
            graph.module, graph.inputs, graph.refused = alone.module, alone.inputs, alone.refused
        for head in heads:
            if head.name in tokens:
                try:
                    Chunking(graph, head).apply(tokens[head.name] or -(-head.tokens // (self.chunks or 2)))
                    changed.append(head.name)
                except NotSeparable as reason:
                    left[head.name] = str(reason)
            else:
                left[head.name] = "its logits are small, or its gradient is"
        return Changes(tuple(changed), left)

    def section(
        self, plan: Plan, graph: TrainingGraph, reports: Sequence[PassReport], ran: Sequence[PassReport], state: State | None
    ) -> Section:
        """By head, in how many chunks it is computed."""
        changed = {name for report in ran if report.name == self.name for name in report.changes.changed}
        chosen = {name: tokens for name, tokens in self._chosen(plan, graph).items() if name in changed}
        heads = [head for head in known_heads(graph) if head.name in chosen]
        facts = {head.name: -(-head.tokens // chosen[head.name]) for head in heads}
        kept = [f"the logits of {h.name} are an output, and kept: outputs='loss' saves them" for h in heads if h.in_full]
        return Section(
            {"chunks": facts} if facts else {},
            tuple(f"cross entropy    {name} in {count} chunks of tokens" for name, count in facts.items()),
            tuple(kept),
            left_alone(self.name, reports, changed),
        )


def _samples(plan: Plan) -> bool:
    """Whether rows of the backward are to be left out. A head in chunks has its gradients before: all its rows are computed."""
    return any(rewrite.preserves is Preserves.UNBIASED for rewrite in plan.passes)


def known_heads(graph: TrainingGraph) -> Sequence[Head]:
    """The heads of a graph, which are looked for once."""
    if not graph.graph.find_nodes(op="call_function", target=NLL):
        return ()
    return kept(graph, "heads", None, lambda: find_heads(prepared(graph))[0])


def prepared(graph: TrainingGraph) -> TrainingGraph:
    """A copy of a graph in the form in which heads are looked for."""
    alone = for_loss_alone(graph).clone()
    as_matrices(alone)
    return alone


def _measured(heads: Sequence[Head], graph: TrainingGraph) -> Chunk:
    """What is done where nothing is said, by what this machine can do."""
    least = {head.name: max(FEWEST_TOKENS, _affordable(head, graph)) for head in heads}
    return Chunk(None, least, tuple(head.name for head in heads if _where_worth_it(head, least[head.name])))


def _tokens_of(head: Head, decided: Chunk) -> int | None:
    """How many tokens of a head are worked on at a time; None or 0: it is left whole."""
    least = decided.least.get(head.name)
    if decided.tokens is not None or least is None:
        return decided.tokens
    # the graph serves the batch for which it was worth it, too
    return _where_worth_it(head, least) or (least if head.symbolic and head.name in decided.worth_it else None)


def _where_worth_it(head: Head, least: int) -> int | None:
    """How many tokens of a head are worked on at a time, no fewer than `least`; None: that saves too little."""
    most = head.tokens // least
    if most > 1 and head.saved_bytes * (1 - 1 / most) - _in_single_precision(head) >= LEAST_BYTES:
        return -(-head.tokens // most)
    return None


def _in_single_precision(head: Head) -> int:
    """Bytes of sums over tokens that exist beside the gradients themselves, since those of half precision are added up in it."""
    sizes = [node.meta["val"].element_size() for node in head.sums]
    half = any(size < torch.float32.itemsize for size in sizes)
    return head.weights_bytes * torch.float32.itemsize // min(sizes) if half else 0


def _affordable(head: Head, graph: TrainingGraph) -> int:
    """Tokens of a chunk for which adding up what is summed over tokens takes no more than `SLOWER` of the step's time.

    They are a power of two, so that measurements that differ a little divide alike.
    """
    value = head.loss.args[0].meta["val"]  # type: ignore[union-attr]
    whole = flop_profile(graph).step / machine_times(value.device, value.dtype).peak
    return 2 ** math.ceil(math.log2(max(head.tokens * _seconds_per_chunk(head) / (SLOWER * whole), 1)))


def _seconds_per_chunk(head: Head) -> float:
    """Of adding a chunk's part to what is summed over tokens. Parts of half precision are written and read before that."""
    value = head.loss.args[0].meta["val"]  # type: ignore[union-attr]
    sizes = [node.meta["val"].element_size() for node in head.sums]
    numbers = head.weights_bytes // min(sizes, default=1)
    half = min(sizes, default=4) < torch.float32.itemsize
    moved = 2 * numbers * (torch.float32.itemsize + min(sizes)) if half else 2 * head.weights_bytes
    return moved / machine_times(value.device, value.dtype).bandwidth

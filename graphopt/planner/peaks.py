"""Peaks of a graph's plans: predicted with the backend's program, or estimated in a tenth of the time."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from graphopt.analysis.step_memory import step_memory
from graphopt.graph import TrainingGraph
from graphopt.planner.memory_limit import MemoryLimit
from graphopt.planner.plan import Plan

UNSURE = 0.1
"""Part of a limit by which an estimate must exceed it for a plan to be believed to do so; the same of two peaks."""


@dataclass
class Peaks:
    """What plans of one graph need, in bytes.

    A prediction runs Inductor's whole pipeline short of its compiler. An estimate takes the peak of the same graphs without
    fusion: of what is not there for the whole step, fusion leaves the same part as in the plan that was predicted last.

    Attributes:
        graph: as captured.
        limit: whose backend and optimizer count, and which says what was predicted before.
        left: by fusion, in the plan that `correct` was last given, but for plans out of line.
    """

    graph: TrainingGraph
    limit: MemoryLimit
    left: float | None = None
    _unfused: dict[Hashable, tuple[int, int]] = field(default_factory=dict)
    _predicted: dict[Hashable, int] = field(default_factory=dict)

    @property
    def estimates(self) -> bool:
        """Whether estimates differ from predictions; they do not where the backend fuses nothing."""
        return self.limit.backend == "inductor"

    def predicted(self, plan: Plan) -> int:
        """As the backend's own program has it."""
        peak = self.limit.peak_once(self.graph, plan.key, lambda: plan.rewrite(self.graph)[0], self.graph.batch_size)
        self._predicted[plan.key] = peak
        return peak

    def estimated(self, plan: Plan) -> int:
        """Near to that, or that where it is known."""
        if not self.estimates or plan.key in self._predicted:
            return self.predicted(plan)
        always, passing = self._without_fusion(plan)
        return always + int((1.0 if self.left is None else self.left) * passing)

    def within(self, plan: Plan, unsure: float = UNSURE) -> bool:
        """Whether a plan is predicted to keep to the limit; far above it an estimate says that it does not.

        Args:
            unsure: part of the limit by which the estimate must exceed it for that.
        """
        if self.left is not None and self.estimated(plan) > (1 + unsure) * self.limit.peak_bytes:
            return False
        if self.predicted(plan) <= self.limit.peak_bytes:
            return True
        self.correct(plan)
        return False

    def correct(self, plan: Plan) -> None:
        """Let later estimates be as far from predictions as that of this plan is, unless it is out of line."""
        if self.estimates and not self.out_of_line(plan):
            always, passing = self._without_fusion(plan)
            self.left = max(0, self.predicted(plan) - always) / max(passing, 1)

    def out_of_line(self, plan: Plan) -> bool:
        """Whether another plan, which needs as much or more without fusion, is predicted to need clearly less with it.

        What fusion leaves of this plan then tells nothing of others.
        """
        unfused, peak = sum(self._without_fusion(plan)), self.predicted(plan)
        known = self._predicted.keys() & self._unfused.keys()
        return any(sum(self._unfused[key]) >= unfused and (1 + UNSURE) * self._predicted[key] < peak for key in known)

    def _without_fusion(self, plan: Plan) -> tuple[int, int]:
        """Bytes that are there for the whole step, and the most beside them."""
        if plan.key not in self._unfused:
            rewritten, _ = plan.rewrite(self.graph)
            memory = step_memory(rewritten, "aot_eager", self.limit.optimizer)
            self._unfused[plan.key] = memory.static_bytes, memory.peak_bytes - memory.static_bytes
        return self._unfused[plan.key]

"""Peaks of a graph's plans: predicted with the backend's program, or estimated in a tenth of the time."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from graphopt.analysis.step_memory import step_memory
from graphopt.graph import TrainingGraph
from graphopt.planner.memory_limit import MemoryLimit
from graphopt.planner.plan import Plan

UNSURE = 0.5
"""Part of a limit by which an estimate may exceed it before a plan is believed to do so, where none was corrected."""

CORRECTED = 0.1
"""The same once a prediction has corrected estimates."""


@dataclass
class Peaks:
    """What plans of one graph need, in bytes.

    A prediction runs Inductor's whole pipeline short of its compiler. An estimate is the peak of the same graphs without fusion,
    times what a plan near the limit was predicted to need of its own.

    Attributes:
        graph: as captured.
        limit: whose backend and optimizer count, and which says what was predicted before.
        fused: predicted over unfused, of the plan that `correct` was last given.
    """

    graph: TrainingGraph
    limit: MemoryLimit
    fused: float | None = None
    _unfused: dict[Hashable, int] = field(default_factory=dict)

    @property
    def estimates(self) -> bool:
        """Whether estimates differ from predictions; they do not where the backend fuses nothing."""
        return self.limit.backend == "inductor"

    def predicted(self, plan: Plan) -> int:
        """As the backend's own program has it."""
        return self.limit.peak_once(self.graph, plan.key, lambda: plan.rewrite(self.graph)[0], self.graph.batch_size)

    def estimated(self, plan: Plan) -> int:
        """Near to that."""
        if not self.estimates:
            return self.predicted(plan)
        return int((self.fused or 1.0) * self._without_fusion(plan))

    def within(self, plan: Plan) -> bool:
        """Whether a plan is predicted to keep to the limit; far above it an estimate says that it does not."""
        unsure = UNSURE if self.fused is None else CORRECTED
        return self.estimated(plan) <= (1 + unsure) * self.limit.peak_bytes and self.predicted(plan) <= self.limit.peak_bytes

    def correct(self, plan: Plan) -> None:
        """Let later estimates be as far from predictions as that of this plan is."""
        if self.estimates:
            self.fused = self.predicted(plan) / self._without_fusion(plan)

    def _without_fusion(self, plan: Plan) -> int:
        if plan.key not in self._unfused:
            rewritten, _ = plan.rewrite(self.graph)
            self._unfused[plan.key] = step_memory(rewritten, "aot_eager", self.limit.optimizer).peak_bytes
        return self._unfused[plan.key]

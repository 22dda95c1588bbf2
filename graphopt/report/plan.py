"""What a plan did, pass by pass, what was not needed, and what remains of the budget; predicted beside measured."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from graphopt.frontend.step import RegionStep
from graphopt.passes import PassReport
from graphopt.passes.technique import technique
from graphopt.planner.plan import Plan
from graphopt.planner.step_time import step_seconds
from graphopt.report.units import in_bytes, in_percent, in_seconds


@dataclass
class StepClock:
    """Wall-clock of training steps: from one forward of a compiled step to its next, optimizer and data loading included.

    Attributes:
        seconds: of the last steps.
    """

    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=32))
    _last: tuple[Any, float] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Without the step, which holds graphs and compiled code."""
        return {**self.__dict__, "_last": None}

    def tick(self, step: Any) -> None:
        """A forward of `step` begins; where another ran before, or was compiled meanwhile, nothing is measured."""
        now = time.perf_counter()
        if self._last is not None and self._last[0] is step:
            self.seconds.append(now - self._last[1])
        self._last = (step, now)


def median(seconds: Collection[float]) -> float | None:
    """Of the last steps; None before there are three."""
    return statistics.median(seconds) if len(seconds) >= 3 else None


@dataclass(frozen=True)
class PlanSummary:
    """See the module.

    Attributes:
        contributions: per installed pass, FLOPs of the step and bytes kept for the backward before and after it.
        not_needed: why, by pass.
        remaining: of each dimension that the budget limits: the limit, what the plan uses by its own forecast, and the rest.
        predicted: "seconds" of the forward and backward that ran last, in all graphs (see `step_seconds`), once measured thrice;
            "peak_bytes" where memory is limited. None otherwise.
        measured: "seconds" of a training step, optimizer and data loading included; "forward_backward" of the step that ran last,
            where that is not an accelerator's; "peak_bytes" of the allocator of the model's device, where it has one, since the
            program began. None otherwise.
    """

    contributions: list[dict[str, Any]]
    not_needed: dict[str, str]
    remaining: dict[str, dict[str, float]]
    predicted: dict[str, float | None]
    measured: dict[str, float | None]


def summarise(
    plan: Plan,
    reports: Sequence[PassReport],
    used: Mapping[str, float],
    clock: StepClock,
    step: RegionStep | None = None,
    fuses: bool = False,
    device: torch.device | None = None,
) -> PlanSummary:
    """Gather a summary.

    Args:
        reports: of the passes that made the step.
        used: by field of the budget, what the plan uses of it: of the "flops" the step's over full training's; of the "memory"
            the predicted peak, where it is limited.
        step: that ran last.
        fuses: see `step_seconds`.
        device: that the model is on.
    """
    limits = {name: limit for name, limit in plan.budget.stated().items() if name in used}
    remaining = {name: {"limit": limit, "used": used[name], "left": limit - used[name]} for name, limit in limits.items()}
    ran = None if step is None else median(step.seconds)
    predicted = None if step is None or ran is None else sum(step_seconds(graph, fuses) for graph in step.graphs)
    inputs = () if step is None else (node.meta.get("val") for graph in step.graphs for node in graph.placeholders)
    if any(isinstance(value, torch.Tensor) and value.device.type != "cpu" for value in inputs):
        ran = None
    idle = {p.name: technique(p).unneeded for p in plan.passes}
    unchanged = {r.name: idle[r.name] for r in reports if not r.changes.changed and idle[r.name]}
    return PlanSummary(
        contributions=[
            {
                "pass": r.name,
                "sites": len(r.changes.changed),
                "flops": (r.step_flops_before, r.step_flops_after),
                "saved_bytes": (r.saved_bytes_before, r.saved_bytes_after),
            }
            for r in reports
            if r.changes.changed
        ],
        not_needed={**unchanged, **plan.not_needed},
        remaining=remaining,
        predicted={"seconds": predicted, "peak_bytes": used.get("memory")},
        measured={"seconds": median(clock.seconds), "forward_backward": ran, "peak_bytes": _allocated_peak(device)},
    )


def plan_lines(summary: PlanSummary) -> list[str]:
    """The summary for people."""
    lines = []
    for c in summary.contributions:
        (flops, flops_after), (saved, saved_after) = c["flops"], c["saved_bytes"]
        change = flops_after / flops - 1 if flops else 0.0
        kept = saved_after - saved
        bytes_kept = f"{'+' if kept > 0 else '-' if kept else ''}{in_bytes(abs(kept))}"
        lines.append(
            f"  {c['pass']:14} {c['sites']} sites, {100 * change:+.1f} % of the step's FLOPs, {bytes_kept} kept for the backward"
        )
    lines = ["plan", *lines] if lines else []
    lines.extend(f"not needed       {name}: {why}" for name, why in summary.not_needed.items())
    for name, of in summary.remaining.items():
        amount = in_bytes if name == "memory" else in_percent
        lines.append(f"budget used      {name}: {amount(of['used'])} of {amount(of['limit'])}")
    if (predicted := summary.predicted["seconds"]) is not None:
        ran = summary.measured["forward_backward"]
        beside = f", measured {in_seconds(ran)}" if ran is not None else ""
        lines.append(f"predicted        forward and backward {in_seconds(predicted)}" + beside)
    seconds, peak = summary.measured["seconds"], summary.measured["peak_bytes"]
    if seconds is not None:
        lines.append(
            f"measured         {in_seconds(seconds)} per step with the optimizer's and loading"
            + (f", peak {in_bytes(peak)}" if peak is not None else "")
        )
    return lines


def _allocated_peak(device: torch.device | None) -> float | None:
    """The most that a device's allocator has given out since the program began, or its statistics were reset."""
    peak = None if device is None else getattr(getattr(torch, device.type, None), "max_memory_allocated", None)
    return None if peak is None else float(peak(device)) or None  # 0: nothing has run there

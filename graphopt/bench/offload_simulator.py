"""What a step takes when gradients are updated on the host: a simulation of the device, both directions of copying, and the host.

Each resource does one thing at a time. The device computes, layer by layer, the forward from the input and the backward from the
output; every layer's compressed gradient is copied out, updated, copied back, and applied before that layer's next forward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from graphopt.passes.lsp.offload import Durations, transition_layer

Schedule = Literal["zero", "layerwise"]

RESOURCES = ("device", "copies out", "host", "copies in")
_COLOURS = {"forward": "#8ab", "backward": "#456", "apply": "#c63", "update": "#a7b", "copy out": "#8a8", "copy in": "#cb6"}

STEPS = 4
"""Training steps simulated; the last is what is reported, when the first has long been over."""


@dataclass(frozen=True)
class Layer:
    """Seconds that one layer takes.

    Attributes:
        forward, backward: on the device.
        out, update, back: of its compressed gradient: copy to the host, update there, copy to the device.
        apply: adding the update to the weight, on the device.
    """

    forward: float
    backward: float
    out: float
    update: float
    back: float
    apply: float = 0.0


@dataclass(frozen=True)
class Span:
    """One task: what ran when, for which layer."""

    resource: str
    task: str
    layer: int
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """One step of training in a steady state.

    Attributes:
        seconds: from the start of a forward to the start of the next.
        transition: layers below are served newest first.
        spans: of that step, from time 0; tasks that reach into the next step end after `seconds`.
    """

    seconds: float
    transition: int
    spans: tuple[Span, ...]


def planned_transition(layers: Sequence[Layer]) -> int:
    """The transition layer for the mean durations of `layers`."""
    count = len(layers)
    out, update, back = (sum(getattr(layer, name) for layer in layers) / count for name in ("out", "update", "back"))
    return transition_layer(count, Durations(out, update, back, sum(layer.backward for layer in layers)))


def simulate(layers: Sequence[Layer], schedule: Schedule = "layerwise", transition: int | None = None) -> Simulation:
    """Simulate a step.

    Args:
        layers: from the input to the output.
        schedule: "zero": updates start when the backward is over, and the next forward when all have come
            back; "layerwise": a layer's forward waits for its own update alone.
        transition: layers below are served newest first; by default as planned. 0 serves all first come, first served.
    """
    below = 0 if schedule == "zero" else planned_transition(layers) if transition is None else transition
    run = _Run(layers, schedule, below)
    starts = [run.step() for _ in range(STEPS)]
    first, last = starts[-2], starts[-1]
    spans = tuple(replace(s, start=s.start - first, end=s.end - first) for s in run.spans if s.start >= first and s.start < last)
    return Simulation(last - first, below, spans)


@dataclass
class _Waiting:
    """A task in a resource's queue."""

    since: float
    layer: int


class _Run:
    """Several steps, one after the other."""

    def __init__(self, layers: Sequence[Layer], schedule: Schedule, below: int) -> None:
        self.layers = layers
        self.schedule = schedule
        self.below = below
        self.now = 0.0
        self.free = dict.fromkeys(RESOURCES, 0.0)
        self.ready = [0.0] * len(layers)
        self.spans: list[Span] = []

    def step(self) -> float:
        """One forward and backward, and the updates that follow; returns when the forward began."""
        count = len(self.layers)
        began = self.now = max(self.now, max(self.ready)) if self.schedule == "zero" else max(self.now, self.ready[0])
        for i in range(count):
            self.now = max(self.now, self.ready[i])
            self._device("apply", i, self.layers[i].apply)
            self._device("forward", i, self.layers[i].forward)
        produced = []
        for i in reversed(range(count)):
            self._device("backward", i, self.layers[i].backward)
            produced.append(_Waiting(self.now, i))
        copied = self._serve("copies out", "copy out", produced, [layer.out for layer in self.layers])
        if self.schedule == "zero":
            over = max(self.now, max(w.since for w in copied))
            copied = [_Waiting(over, w.layer) for w in copied]
        updated = self._serve("host", "update", copied, [layer.update for layer in self.layers])
        for waiting in self._serve("copies in", "copy in", updated, [layer.back for layer in self.layers]):
            self.ready[waiting.layer] = waiting.since
        return began

    def _device(self, task: str, layer: int, seconds: float) -> None:
        if seconds:
            self.spans.append(Span("device", task, layer, self.now, self.now + seconds))
        self.now += seconds

    def _serve(self, resource: str, task: str, arrivals: list[_Waiting], seconds: Sequence[float]) -> list[_Waiting]:
        """Serve tasks as they arrive; returns when each was done, in that order."""
        arrivals = sorted(arrivals, key=lambda w: w.since)
        queue: list[_Waiting] = []
        done = []
        free = self.free[resource]
        while arrivals or queue:
            if not queue:
                free = max(free, arrivals[0].since)
            while arrivals and arrivals[0].since <= free:
                queue.append(arrivals.pop(0))
            newest = any(w.layer < self.below for w in queue)
            chosen = queue.pop(-1 if newest else 0)
            end = free + seconds[chosen.layer]
            self.spans.append(Span(resource, task, chosen.layer, free, end))
            done.append(_Waiting(end, chosen.layer))
            free = end
        self.free[resource] = free
        return done


def gantt(simulations: Mapping[str, Simulation], path: str | Path) -> Path:
    """Draw what each resource does when; steps below each other, on one scale of time.

    Args:
        simulations: by title.
        path: of the PNG.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 1.9 * len(simulations)))
    axes = figure.subplots(len(simulations), 1, sharex=True, squeeze=False)[:, 0]
    for axis, (title, simulation) in zip(axes, simulations.items(), strict=True):
        for span in simulation.spans:
            row = RESOURCES.index(span.resource)
            axis.barh(row, span.end - span.start, left=span.start, color=_COLOURS[span.task], edgecolor="white", linewidth=0.3)
        axis.axvline(simulation.seconds, color="#333", linewidth=0.8, linestyle=":")
        axis.set_yticks(range(len(RESOURCES)), RESOURCES)
        axis.invert_yaxis()
        axis.set_title(f"{title}: {simulation.seconds * 1e3:.1f} ms a step", fontsize=9, loc="left")
    axes[-1].set_xlabel("seconds")
    used = sorted({span.task for s in simulations.values() for span in s.spans})
    handles = [axes[0].barh(0, 0, color=_COLOURS[task]) for task in used]
    figure.legend(handles, used, ncols=len(used), loc="upper right", fontsize=8)
    figure.tight_layout()
    path = Path(path)
    figure.savefig(path, dpi=110)
    return path

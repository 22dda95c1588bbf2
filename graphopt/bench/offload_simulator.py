"""What a step takes when gradients are updated on the host: a simulation of the device, both directions of copying, and the host.

Each resource does one thing at a time. The device computes, layer by layer, the forward from the input and the backward from the
output; every layer's compressed gradient is copied out, updated, copied back, and applied before that layer's next forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from graphopt.passes.lsp.transition import Durations, transition_layer

Schedule = Literal["native", "zero", "layerwise"]

RESOURCES = ("device", "copies out", "host", "copies in")
STEPS = 4
"""Training steps simulated; the last is what is reported, when the first has long been over."""


@dataclass(frozen=True)
class Layer:
    """Seconds that one layer takes.

    Attributes:
        forward, backward: on the device.
        out, update, back: of its compressed gradient: copy to the host, update there, copy to the device.
        apply: adding the update to the weight, on the device.
        native_update: the optimizer's step on the device, where nothing is offloaded.
    """

    forward: float
    backward: float
    out: float
    update: float
    back: float
    apply: float = 0.0
    native_update: float = 0.0


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


def zero_bound(layers: Sequence[Layer]) -> float:
    """T_FWD + max(T_BWD, T_out) + max(T_UPD, T_back), the time of ZeRO-Offload's schedule (Eq. 1)."""
    forward, backward, out, update, back, _ = _totals(layers)
    return forward + max(backward, out) + max(update, back)


def layerwise_bound(layers: Sequence[Layer]) -> float:
    """max(T_FWD + T_BWD + one layer's copies and update, T_out, T_back, T_UPD): what no layer-wise schedule can beat."""
    forward, backward, out, update, back, apply = _totals(layers)
    tail = min(layer.out + layer.update + layer.back for layer in layers)
    return max(forward + backward + apply + tail, out, back, update)


def _totals(layers: Sequence[Layer]) -> tuple[float, float, float, float, float, float]:
    names = ("forward", "backward", "out", "update", "back", "apply")
    return tuple(sum(getattr(layer, name) for layer in layers) for name in names)


def planned_transition(layers: Sequence[Layer]) -> int:
    """The transition layer for the mean durations of `layers`."""
    _, backward, out, update, back, _ = _totals(layers)
    count = len(layers)
    return transition_layer(count, Durations(out / count, update / count, back / count, backward))


def simulate(layers: Sequence[Layer], schedule: Schedule = "layerwise", transition: int | None = None) -> Simulation:
    """Simulate a step.

    Args:
        layers: from the input to the output.
        schedule: "native": no offload; "zero": updates start when the backward is over, and the next forward when all have come
            back; "layerwise": a layer's forward waits for its own update alone.
        transition: layers below are served newest first; by default as planned. 0 serves all first come, first served.
    """
    if schedule == "native":
        return _native(layers)
    below = 0 if schedule == "zero" else planned_transition(layers) if transition is None else transition
    run = _Run(layers, schedule, below)
    starts = [run.step() for _ in range(STEPS)]
    first, last = starts[-2], starts[-1]
    spans = tuple(replace(s, start=s.start - first, end=s.end - first) for s in run.spans if s.start >= first and s.start < last)
    return Simulation(last - first, below, spans)


def _native(layers: Sequence[Layer]) -> Simulation:
    spans, now = [], 0.0
    tasks = [("forward", i, layer.forward) for i, layer in enumerate(layers)]
    tasks += [("backward", i, layers[i].backward) for i in reversed(range(len(layers)))]
    tasks += [("update", i, layer.native_update) for i, layer in enumerate(layers)]
    for name, i, seconds in tasks:
        spans.append(Span("device", name, i, now, now + seconds))
        now += seconds
    return Simulation(now, 0, tuple(spans))


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

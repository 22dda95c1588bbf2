"""The layer-wise schedule: copies, host updates and their application, beside what the device computes (LSP-Offload, Alg. 3).

A compressed gradient leaves the device as soon as the backward has computed it, and its update is computed on the host while the
backward goes on. The update is used if the optimizer's step finds the very gradient that it was made from; one that was clipped,
unscaled or accumulated since is computed anew. It is added to its weight just before the next forward reads that.
"""

from __future__ import annotations

import math
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphopt.errors import GraphoptError
from graphopt.runtime.transfer import Transfer
from graphopt.runtime.workers import Worker

Update = Callable[[str, Tensor], Any]
"""From a weight's name and its compressed gradient on the host to what the step needs."""

REST = 50
"""Steps without updates during the backward after one in which they were in vain."""


@dataclass(frozen=True)
class _Started:
    """An update that began in the backward, and the gradient that it is made from."""

    gradient: Tensor
    copied: Future[Any]
    update: Future[Any] | None


@dataclass(frozen=True)
class Durations:
    """Seconds per task, means over the last steps."""

    to_host: float
    update: float
    to_device: float
    backward: float


def transition_layer(layers: int, durations: Durations) -> int:
    """Layers below this one are served newest first: clamp(ceil(L - (T_BWD - (a + b + c)) / max(a, b, c)), 0, L).

    Source: LSP-Offload, section 3.2, clamped.
    """
    a, b, c = durations.to_host, durations.update, durations.to_device
    longest = max(a, b, c)
    if longest <= 0:
        return 0
    return min(layers, max(0, math.ceil(layers - (durations.backward - (a + b + c)) / longest)))


class Offload:
    """The three resources beside the device, and what waits for them."""

    def __init__(
        self,
        names: Sequence[str],
        device: torch.device,
        update: Update,
        apply: Callable[[str, Any, Tensor], None],
        updates_in_backward: bool = True,
    ) -> None:
        """Set up the threads; they start with the first task.

        Args:
            names: weights from the input to the output.
            update: runs on the host's thread.
            apply: adds an update to a weight (name, what came to the device, the weight); runs on the device's.
            updates_in_backward: otherwise only copies start there (ZeRO-Offload's schedule).
        """
        self.names = list(names)
        self.transfer = Transfer(device)
        self.update = update
        self.apply = apply
        self.updates_in_backward = updates_in_backward
        self.newest_first: set[str] = set()
        self.out = Worker("copies to the host", self.newest_first)
        self.host = Worker("host", self.newest_first)
        self.back = Worker("copies to the device", self.newest_first)
        for worker in (self.out, self.host, self.back):
            weakref.finalize(self, worker.close)
        self.started: dict[str, _Started] = {}
        self.pending: dict[str, tuple[Any, Future[Callable[[], Tensor]]]] = {}
        self.times: dict[str, list[float]] = defaultdict(list)
        self._first: float | None = None
        self._last = 0.0
        self._rest = 0

    def produced(self, name: str, gradient: Tensor) -> None:
        """A compressed gradient has just been computed: start to copy it and to compute its update."""
        self._last = time.perf_counter()
        self._first = self._last if self._first is None else self._first
        if not self._rest:
            self.started[name] = self._start(name, gradient, self.updates_in_backward)

    def _start(self, name: str, gradient: Tensor, and_update: bool) -> _Started:
        staged, written = self.transfer.stage(gradient)
        copied = self.out.submit(name, lambda: self._timed("to_host", self.transfer.to_host, name, staged, written))
        return _Started(staged, copied, self._updated(name, copied) if and_update else None)

    def _updated(self, name: str, copied: Future[Any]) -> Future[Any]:
        return self.host.then(copied, name, lambda value: self._timed("update", self.update, name, value))

    def _timed(self, what: str, call: Callable[..., Any], *args: Any) -> Any:
        start = time.perf_counter()
        result = call(*args)
        self.times[what].append(time.perf_counter() - start)
        return result

    def results(self, gradients: dict[str, Tensor]) -> dict[str, Any]:
        """The update of every gradient; waits for all.

        Raises:
            GraphoptError: one of them failed.
        """
        futures: dict[str, Future[Any]] = {}
        vain = False
        for name, gradient in gradients.items():
            started = self.started.get(name)
            if started is None or not _equal(started.gradient, gradient):
                vain |= started is not None
                if started is not None:
                    wait([started.update or started.copied])  # its buffers are used again
                started = self._start(name, gradient, True)
            futures[name] = started.update or self._updated(name, started.copied)
        wait([f for s in self.started.values() for f in (s.copied, s.update) if f is not None])
        wait(futures.values())
        self.started.clear()
        self._rest = REST if vain else max(0, self._rest - 1)
        results = {}
        for name, future in futures.items():
            error = future.exception()
            if error is not None:
                raise GraphoptError(f"the update of {name} on the host failed, and no weight was changed: {error}") from error
            results[name] = future.result()
        self._plan_order()
        return results

    def commit(self, name: str, update: Any, direction: Tensor) -> None:
        """Send an update to the device; it is applied where the weight is needed next."""
        sent = self.back.submit(name, lambda: self._timed("to_device", self.transfer.to_device, name, direction))
        self.pending[name] = (update, sent)

    def needed(self, name: str, weight: Tensor) -> None:
        """Finish what is still to be done to a weight."""
        waiting = self.pending.get(name)
        if waiting is not None:
            update, sent = waiting
            self.apply(name, (update, sent.result()()), weight)
            del self.pending[name]

    def durations(self) -> Durations:
        """What was measured in the last steps."""
        means = {what: sum(t[-64:]) / max(1, len(t[-64:])) for what, t in self.times.items()}
        backward = self._last - self._first if self._first is not None else 0.0
        return Durations(means.get("to_host", 0.0), means.get("update", 0.0), means.get("to_device", 0.0), backward)

    def _plan_order(self) -> None:
        """Decide from the last step's durations whose tasks are served newest first."""
        below = transition_layer(len(self.names), self.durations())
        self.newest_first.clear()
        self.newest_first.update(self.names[:below])
        self._first = None
        for times in self.times.values():
            del times[:-64]


def _equal(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors are the same to the bit, NaN included: neither was clipped, unscaled or added to."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return bool(((left == right) | ((left != left) & (right != right))).all())

"""The layer-wise schedule: copies, host updates and their application, beside what the device computes (LSP-Offload, Alg. 3).

A compressed gradient leaves the device as soon as the backward has computed it, and its update is computed on the host while the
backward goes on. The update is used if the optimizer's step finds the very gradient that it was made from; one that was clipped,
unscaled or accumulated since is computed anew. It is added to its weight just before the next forward reads that.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import torch
from graphopt.passes.lsp.transfer import Span, Transfer
from torch import Tensor, nn

from graphopt.errors import GraphoptError

Update = Callable[[str, Tensor], Any]
"""From a weight's name and its compressed gradient on the host to what the step needs."""

Apply = Callable[[Tensor, Tensor], None]
"""Adds what has come to the device to a weight, in place."""

REST = 50
"""Steps without updates during the backward after one in which they were in vain."""


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


@dataclass(frozen=True)
class _Started:
    """An update that began in the backward, and the gradient that it is made from; it is submitted once that is copied."""

    gradient: Tensor
    copied: Future[Future[Any]]


@dataclass(frozen=True)
class _Pending:
    """An update that its weight still lacks: what it is on the host, on its way to the device, and how it is added."""

    direction: Tensor
    sent: Future[Callable[[], Tensor]]
    apply: Apply


class Worker:
    """A resource beside the device: runs tasks one at a time, in a thread that starts with the first and ends with the worker.

    Tasks run first come, first served, until one of `newest_first` waits; then the newest is next (LSP-Offload, section 3.2:
    below the transition layer, what the next forward needs first has come last). The end of the process waits for all of them, as
    no thread may be inside an operator then.
    """

    def __init__(self, name: str, newest_first: Container[Any] = ()) -> None:
        self.name = name
        self.newest_first = newest_first
        self._waiting: list[tuple[Any, Callable[[], Any], Future[Any]]] = []
        self._process = -1

    def submit(self, site: Any, call: Callable[[], Any]) -> Future[Any]:
        """Run `call` when its turn comes.

        Args:
            site: whom it is for, which decides its turn.
        """
        if self._process != os.getpid():  # a forked process has no threads of its parent's
            self._process, self._thread = os.getpid(), ThreadPoolExecutor(1, f"graphopt {self.name}")
        future: Future[Any] = Future()
        self._waiting.append((site, call, future))
        self._thread.submit(self._run_next)
        return future

    def _run_next(self) -> None:
        newest = any(site in self.newest_first for site, _, _ in list(self._waiting))
        _, call, future = self._waiting.pop(-1 if newest else 0)
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)


class Offload:
    """The three resources beside the device, and what waits for them."""

    def __init__(self, weights: Mapping[str, Tensor], update: Update) -> None:
        """Set up the threads; they start with the first task.

        Args:
            weights: by name, from the input to the output.
            update: runs on the host's thread.
        """
        self.weights = dict(weights)
        self.transfer = Transfer()
        self.update = update
        self.newest_first: set[str] = set()
        self.out = Worker("copies to the host", self.newest_first)
        self.host = Worker("host", self.newest_first)
        self.back = Worker("copies to the device", self.newest_first)
        self.started: dict[str, _Started] = {}
        self.pending: dict[str, _Pending] = {}
        self.times: dict[str, list[float]] = {"to_host": [], "update": [], "to_device": []}
        self._span = Span()
        self._rest = 0

    def produced(self, name: str, gradient: Tensor) -> None:
        """A compressed gradient has just been computed: start to copy it and to compute its update."""
        self._span.mark(gradient)
        if not self._rest:
            self.started[name] = self._start(name, gradient)

    def _start(self, name: str, gradient: Tensor) -> _Started:
        staged, written = self.transfer.stage(gradient)

        def copy() -> Future[Any]:
            self.transfer.wait(written)
            copied = self._timed("to_host", self.transfer.to_host, staged)
            return self.host.submit(name, lambda: self._timed("update", self.update, name, copied))

        return _Started(staged, self.out.submit(name, copy))

    def _timed(self, what: str, call: Callable[..., Any], *args: Any) -> Any:
        start = time.perf_counter()
        result = call(*args)
        self.times[what].append(time.perf_counter() - start)
        return result

    def forget_started(self) -> None:
        """Wait for the updates that began in the backward, and drop them."""
        _wait(self.started.values())
        self.started.clear()

    def results(self, gradients: dict[str, Tensor]) -> dict[str, Any]:
        """The update of every gradient; waits for all.

        Raises:
            GraphoptError: one of them failed.
        """
        candidates = {name: s for name, s in self.started.items() if name in gradients}
        same = _equal([(s.gradient, gradients[name]) for name, s in candidates.items()])
        good = {name: s for (name, s), equal in zip(candidates.items(), same, strict=True) if equal}
        started = {name: good.get(name) or self._start(name, gradient) for name, gradient in gradients.items()}
        self.forget_started()
        _wait(started.values())
        self._rest = REST if len(good) < len(candidates) else max(0, self._rest - 1)
        results = {}
        for name, update in started.items():
            try:
                results[name] = update.copied.result().result()
            except Exception as error:
                raise GraphoptError(f"the update of {name} on the host failed, and no weight was changed: {error}") from error
        self._plan_order()
        return results

    def commit(self, name: str, direction: Tensor, apply: Apply) -> None:
        """Send an update to the device; it is applied where the weight is needed next."""
        device = self.weights[name].device
        sent = self.back.submit(name, lambda: self._timed("to_device", self.transfer.to_device, direction, device))
        self.pending[name] = _Pending(direction, sent, apply)

    def needed(self, name: str, weight: Tensor) -> None:
        """Finish what is still to be done to a weight."""
        waiting = self.pending.get(name)
        if waiting is not None:
            self._apply(name, weight, self._received(waiting, weight.device))

    def synchronize(self) -> None:
        """Finish all that is still to be done, once everything has come."""
        arrived = {name: self._received(waiting, self.weights[name].device) for name, waiting in self.pending.items()}
        for name, change in arrived.items():
            self._apply(name, self.weights[name], change)

    def _received(self, waiting: _Pending, device: torch.device) -> Tensor:
        """What has come to the device; a copy that failed is made again, here."""
        try:
            return waiting.sent.result()()
        except (RuntimeError, MemoryError):  # no memory for it then; what is wrong in our own code is not hidden
            return waiting.direction.to(device)

    def _apply(self, name: str, weight: Tensor, change: Tensor) -> None:
        waiting = self.pending[name]
        with torch.no_grad():
            waiting.apply(change, weight)
        self.pending.pop(name, None)

    def durations(self) -> Durations:
        """What was measured in the last steps."""
        means = {what: sum(t[-64:]) / max(1, len(t[-64:])) for what, t in self.times.items()}
        return Durations(means["to_host"], means["update"], means["to_device"], self._span.seconds())

    def _plan_order(self) -> None:
        """Decide from the last step's durations whose tasks are served newest first."""
        names = list(self.weights)
        below = transition_layer(len(names), self.durations())
        self.newest_first.clear()
        self.newest_first.update(names[:below])
        self._span = Span()
        for times in self.times.values():
            del times[:-64]


def _wait(started: Iterable[_Started]) -> None:
    """Wait for updates, whether or not they succeed."""
    copied, _ = wait([s.copied for s in started])
    wait([c.result() for c in copied if c.exception() is None])


def _equal(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[bool]:
    """Whether both of each pair are the same to the bit, NaN included: not clipped, unscaled or added to. Waits only once."""
    if not pairs:
        return []
    flags = []
    for left, right in pairs:
        alike = left.shape == right.shape and left.dtype == right.dtype and left.device == right.device
        same = ((left == right) | ((left != left) & (right != right))).all() if alike else left.new_zeros((), dtype=torch.bool)
        flags.append(same)
    device = flags[0].device
    return [bool(f) for f in torch.stack([f.to(device) for f in flags]).tolist()]


class Synchronizer:
    """A hook that finishes an `Offload`'s updates before a module is read or written; not part of copies and pickles of it."""

    def __init__(self, offload: Offload | None = None) -> None:
        self.offload = offload

    def __call__(self, *_: Any) -> None:
        """Finish them; not while a model is traced, where nothing is read."""
        if self.offload is not None and not torch.compiler.is_compiling() and self.offload.pending:
            self.offload.synchronize()

    def __reduce__(self) -> tuple[Any, ...]:
        return Synchronizer, ()


def synchronize_before_reading(model: nn.Module, offload: Offload) -> list[Any]:
    """Have every module that holds one of the weights finish updates before its forward, `state_dict` and `load_state_dict`.

    Returns:
        Handles; see `torch.nn.Module.register_forward_pre_hook`.
    """
    own = {id(w) for w in offload.weights.values()}
    hook = Synchronizer(offload)
    handles = []
    for module in model.modules():
        if any(id(p) in own for p in module.parameters(recurse=False)):
            handles.append(module.register_forward_pre_hook(hook))
            handles.append(module.register_state_dict_pre_hook(hook))
            handles.append(module.register_load_state_dict_pre_hook(hook))
    return handles

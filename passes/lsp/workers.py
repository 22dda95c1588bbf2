"""Worker threads: one for each resource that works beside the device (copies out, the host, copies in)."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable, Container
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

_LAST_WAIT = 10.0
"""Seconds that the end of the process waits for a task under way."""

_workers: weakref.WeakSet[Worker] = weakref.WeakSet()


@dataclass
class _Task:
    site: Any
    call: Callable[[], Any]
    future: Future[Any]


class Worker:
    """Runs tasks one at a time, in a thread of its own that starts with the first.

    Tasks run first come, first served, until one of `newest_first` waits; then the newest is next (LSP-Offload, section 3.2:
    below the transition layer, what the next forward needs first has come last).
    """

    def __init__(self, name: str, newest_first: Container[Any] = ()) -> None:
        self.name = name
        self.newest_first = newest_first
        self._waiting: list[_Task] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False
        _workers.add(self)

    def close(self, drop: bool = False) -> None:
        """Let the thread end once nothing waits; with `drop`, what waits is cancelled."""
        with self._changed:
            self._closed = True
            if drop:
                for task in self._waiting:
                    task.future.cancel()
                self._waiting.clear()
            self._changed.notify()

    def join(self, timeout: float | None = None) -> None:
        """Wait for the thread to end."""
        if self._thread is not None:
            self._thread.join(timeout)

    def submit(self, site: Any, call: Callable[[], Any]) -> Future[Any]:
        """Run `call` when its turn comes.

        Args:
            site: whom it is for, which decides its turn.
        """
        future: Future[Any] = Future()
        with self._changed:
            if self._thread is None or not self._thread.is_alive():  # a forked process has no threads of its parent's
                self._closed = False
                thread = threading.Thread(target=self._run, name=f"graphopt {self.name}", daemon=True)
                thread.start()
                self._thread = thread
            self._waiting.append(_Task(site, call, future))
            self._changed.notify()
        return future

    def then(self, before: Future[Any], site: Any, call: Callable[[Any], Any]) -> Future[Any]:
        """Run `call` on the result of `before` once that is there; what `before` raised, the result raises."""
        after: Future[Any] = Future()

        def pass_on(done: Future[Any]) -> None:
            error = _error(done)
            if error is not None:
                after.set_exception(error)
            else:
                after.set_result(done.result())

        def go_on(done: Future[Any]) -> None:
            error = _error(done)
            try:
                if error is None:
                    self.submit(site, lambda: call(done.result())).add_done_callback(pass_on)
            except BaseException as failed:
                error = failed
            if error is not None:
                after.set_exception(error)

        before.add_done_callback(go_on)
        return after

    def _next(self) -> _Task:
        newest = any(task.site in self.newest_first for task in self._waiting)
        return self._waiting.pop(-1 if newest else 0)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    if self._closed:
                        return
                    self._changed.wait()
                task = self._next()
            try:
                result = task.call()
            except BaseException as error:
                task.future.set_exception(error)
            else:
                task.future.set_result(result)
            del task


def _error(done: Future[Any]) -> BaseException | None:
    if done.cancelled():
        return RuntimeError("the task was cancelled")
    return done.exception()


@atexit.register
def _end_all() -> None:
    """No thread may be inside an operator when the interpreter ends."""
    for worker in list(_workers):
        worker.close(drop=True)
    for worker in list(_workers):
        worker.join(_LAST_WAIT)

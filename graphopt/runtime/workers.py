"""Worker threads: one for each resource that works beside the device (copies out, the host, copies in)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Container
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any


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

    def close(self) -> None:
        """Let the thread end once nothing waits."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def submit(self, site: Any, call: Callable[[], Any]) -> Future[Any]:
        """Run `call` when its turn comes.

        Args:
            site: whom it is for, which decides its turn.
        """
        future: Future[Any] = Future()
        with self._changed:
            self._waiting.append(_Task(site, call, future))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"graphopt {self.name}", daemon=True)
                self._thread.start()
            self._changed.notify()
        return future

    def then(self, before: Future[Any], site: Any, call: Callable[[Any], Any]) -> Future[Any]:
        """Run `call` on the result of `before` once that is there; what `before` raised, the result raises."""
        after: Future[Any] = Future()

        def pass_on(done: Future[Any]) -> None:
            error = done.exception()
            if error is not None:
                after.set_exception(error)
            else:
                after.set_result(done.result())

        def go_on(done: Future[Any]) -> None:
            error = done.exception()
            if error is not None:
                after.set_exception(error)
            else:
                self.submit(site, lambda: call(done.result())).add_done_callback(pass_on)

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

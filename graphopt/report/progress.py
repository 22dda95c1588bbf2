"""What is told while a user waits: the stage that is under way, and the seconds that each one took."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator

from rich.console import Console
from rich.status import Status

from graphopt.runtime.stages import logger


def watched() -> bool:
    """Whether somebody sees what is written to stderr now."""
    return sys.stderr is not None and sys.stderr.isatty()


class _Told(logging.Handler):
    """Shows the stage that is under way, and writes a line for every one that is over."""

    def __init__(self, console: Console, status: Status) -> None:
        super().__init__(logging.INFO)
        self.console, self.status = console, status

    def emit(self, record: logging.LogRecord) -> None:
        name, seconds = getattr(record, "stage", record.getMessage()), getattr(record, "seconds", None)
        if seconds is None:
            self.status.update(name)
        else:
            self.console.print(f"{name:<12}{seconds:6.1f} s", highlight=False)


@contextlib.contextmanager
def stages_told(quiet: bool) -> Iterator[None]:
    """Say on stderr which stage is under way and how long each one took; see `graphopt.runtime.stages`.

    Where this is at work already, what was said there holds: nothing is told twice, or in spite of `quiet`.

    Args:
        quiet: say nothing.
    """
    if any(isinstance(handler, _Told | logging.NullHandler) for handler in logger.handlers):
        yield
        return
    level = logger.level
    with contextlib.ExitStack() as stack:
        handler: logging.Handler = logging.NullHandler()
        if not quiet:
            console = Console(stderr=True)
            handler = _Told(console, stack.enter_context(console.status("starting")))
            logger.setLevel(logging.INFO)
        logger.addHandler(handler)
        try:
            yield
        finally:
            logger.removeHandler(handler)
            logger.setLevel(level)

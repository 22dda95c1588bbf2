"""What is told while a user waits: the stage that is under way, and the seconds that each one took."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator

from rich.console import Console

from graphopt.runtime.stages import logger


def watched() -> bool:
    """Whether somebody sees what is written to stderr now."""
    return sys.stderr is not None and sys.stderr.isatty()


class _Told(logging.Handler):
    """Shows the stage that is under way, and writes a line for every one that is over."""

    def __init__(self, console: Console, status: object) -> None:
        super().__init__(logging.INFO)
        self.console, self.status = console, status

    def emit(self, record: logging.LogRecord) -> None:
        name, seconds = getattr(record, "stage", record.getMessage()), getattr(record, "seconds", None)
        if seconds is None:
            self.status.update(name)  # type: ignore[attr-defined]
        else:
            self.console.print(f"{name:<12}{seconds:6.1f} s", highlight=False)


class _Untold(logging.NullHandler):
    """Nothing is to be said."""


@contextlib.contextmanager
def stages_told(quiet: bool) -> Iterator[None]:
    """Say on stderr which stage is under way and how long each one took; see `graphopt.runtime.stages`.

    Where this is at work already, what was said there holds: nothing is told twice, or in spite of `quiet`.

    Args:
        quiet: say nothing.
    """
    if any(isinstance(handler, _Told | _Untold) for handler in logger.handlers):
        yield
        return
    if quiet:
        with _handled_by(_Untold()):
            yield
        return
    console = Console(stderr=True)
    with console.status("starting") as status, _handled_by(_Told(console, status)):
        yield


@contextlib.contextmanager
def _handled_by(handler: logging.Handler) -> Iterator[None]:
    level = logger.level
    logger.addHandler(handler)
    if isinstance(handler, _Told):
        logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)

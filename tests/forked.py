"""Processes of their own for tests, forked from a server that has imported what they need: importing it takes seconds."""

from __future__ import annotations

import multiprocessing
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any

FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(["tests.preload"])


def ended(work: Callable[..., Any], *args: Any, seconds: float = 300) -> int | None:
    """The exit code of a process that calls a function of a module: minus a signal that killed it; None if it takes too long.

    What it raised is printed.
    """
    ours, theirs = FORKED.Pipe(duplex=False)
    process: ForkServerProcess = FORKED.Process(target=_run, args=(theirs, work, args))
    process.start()
    theirs.close()
    process.join(seconds)
    if process.exitcode is None:
        process.kill()
        return None
    if process.exitcode == 1 and ours.poll():
        print(ours.recv())
    return process.exitcode


def _run(theirs: Connection, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        work(*args)
    except Exception:
        theirs.send(traceback.format_exc()[-2000:])  # more would wait to be read
        sys.exit(1)

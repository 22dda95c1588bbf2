"""Processes of their own for tests, forked from a server that has imported what they need: importing it takes seconds."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from typing import Any

FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(["tests.preload"])


def ended(work: Callable[..., Any], *args: Any, seconds: float = 300) -> int | None:
    """The exit code of a process that calls a function of a module: minus a signal that killed it; None if it takes too long."""
    process: ForkServerProcess = FORKED.Process(target=work, args=args)
    process.start()
    process.join(seconds)
    if process.exitcode is None:
        process.kill()
        return None
    return process.exitcode

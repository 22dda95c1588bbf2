"""Notes that torch takes of a trace, kept from threads that trace nothing."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

from torch.fx import traceback


def annotated_by_this_thread() -> contextlib.AbstractContextManager[Any]:
    """While this is entered, calls of other threads leave no notes in what this one traces.

    torch keeps notes in one place for all threads. Compiled code that runs in another thread would take its own away twice, which
    ends its step with a KeyError.
    """
    known, tracing = traceback.annotate, threading.get_ident()

    @contextlib.contextmanager
    def annotate(notes: dict[str, Any]) -> Iterator[None]:
        with known(notes) if threading.get_ident() == tracing else contextlib.nullcontext():
            yield

    return mock.patch.object(traceback, "annotate", annotate)

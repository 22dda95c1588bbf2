"""What graphopt is doing, and how long it takes: logged at INFO, as these are the seconds in which a user waits."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator

logger = logging.getLogger("graphopt.stages")


@contextlib.contextmanager
def stage(name: str) -> Iterator[None]:
    """Log that `name` begins and, unless it fails, when it is over; records have the attributes `stage` and `seconds`.

    Args:
        name: "capture", "importance", "plan", "memory", "compile" or "calibrate".
    """
    logger.info("%s ...", name, extra={"stage": name, "seconds": None})
    start = time.perf_counter()
    yield
    seconds = time.perf_counter() - start
    logger.info("%s: %.1f s", name, seconds, extra={"stage": name, "seconds": seconds})

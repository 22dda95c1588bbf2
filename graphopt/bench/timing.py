"""How benchmarks measure seconds: all variants of a thing in turn, so that a drift of the machine's speed hits them alike."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

import torch

WARMUP = 2
"""Rounds that do not count."""

Key = TypeVar("Key")
Measured = TypeVar("Measured")


def this_device() -> tuple[str, str]:
    """ "cuda" where there is one, else "cpu"; and what to call it in a table."""
    if torch.cuda.is_available():
        return "cuda", torch.cuda.get_device_name()
    return "cpu", f"{torch.get_num_threads()} CPU threads"


def now(device: str) -> float:
    """Seconds, when everything that was begun is done."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def timed(call: Callable[[], object], device: str) -> float:
    """Seconds of a call."""
    start = now(device)
    call()
    return now(device) - start


def in_turn(
    calls: Mapping[Key, Callable[[], Measured]], repeats: int, progress: Callable[[], object] = lambda: None
) -> dict[Key, list[Measured]]:
    """What each call gives: one call of each per round, every other round backwards, without garbage collection.

    Args:
        repeats: rounds that count; there are `WARMUP` before them.
        progress: called after each round.
    """
    found: dict[Key, list[Measured]] = {key: [] for key in calls}
    gc.collect()
    gc.disable()
    try:
        for number in range(WARMUP + repeats):
            for key, call in list(calls.items())[:: 1 if number % 2 else -1]:
                measured = call()
                if number >= WARMUP:
                    found[key].append(measured)
            progress()
    finally:
        gc.enable()
    return found


def medians(
    calls: Mapping[Key, Callable[[], object]], repeats: int, device: str, progress: Callable[[], object] = lambda: None
) -> dict[Key, float]:
    """Median seconds of each call; see `in_turn`."""
    found = in_turn({key: partial(timed, call, device) for key, call in calls.items()}, repeats, progress)
    return {key: statistics.median(seconds) for key, seconds in found.items()}

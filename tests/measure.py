"""The allocator's own events during a call, as torch.profiler reports them."""

from __future__ import annotations

import gc
from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def peak_and_rest(call: Callable[[], object]) -> tuple[int, int]:
    """Largest running sum of bytes allocated by `call` on the CPU, and what is still there when it returns."""
    gc.disable()  # what earlier tests left in cycles must not be freed meanwhile; collecting it first takes most of a second
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            call()
    finally:
        gc.enable()
    current = peak = 0
    for event in profiler.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            current += event.nbytes()
            peak = max(peak, current)
    return peak, current

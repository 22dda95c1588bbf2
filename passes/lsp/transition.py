"""From which layer on offloaded updates are served newest first (LSP-Offload, section 3.2)."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Durations:
    """Seconds per task, means over the last steps."""

    to_host: float
    update: float
    to_device: float
    backward: float


def transition_layer(layers: int, durations: Durations) -> int:
    """Layers below this one are served newest first: clamp(ceil(L - (T_BWD - (a + b + c)) / max(a, b, c)), 0, L).

    Source: LSP-Offload, section 3.2, clamped.
    """
    a, b, c = durations.to_host, durations.update, durations.to_device
    longest = max(a, b, c)
    if longest <= 0:
        return 0
    return min(layers, max(0, math.ceil(layers - (durations.backward - (a + b + c)) / longest)))

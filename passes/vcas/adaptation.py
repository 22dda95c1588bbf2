"""What a controller of a sampler has done so far, and what a checkpoint keeps of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from graphopt.passes.vcas.ratios import SampleRatios


@dataclass(frozen=True)
class Adaptation:
    """What one adaptation measured and did.

    Attributes:
        step: of training.
        preserved: s.
        rows_variance, tokens_variance: V_act and V_w as parts of the mini-batch variance V_s, measured with the ratios
            that it settled on before they were put in force. NaN where the batches' gradients were equal or not finite, so
            that there was nothing to compare with: the ratios stay as they were.
        rows, tokens: ratios in force from now on, by block and by weight.
        flops_ratio: FLOPs of a step with them, as a part of the exact step's.
        seconds: of the calibration.
        changed: they differ from those until now.
    """

    step: int
    preserved: float
    rows_variance: float
    tokens_variance: float
    rows: Mapping[str, float]
    tokens: Mapping[str, float]
    flops_ratio: float
    seconds: float
    changed: bool

    @property
    def compared(self) -> bool:
        """Whether there was something to compare with."""
        return math.isfinite(self.rows_variance) and math.isfinite(self.tokens_variance)


@dataclass
class Counts:
    """FLOPs so far, in steps of exact training."""

    spent: float = 0.0
    calibrating: float = 0.0
    steps: int = 0
    seconds: float = 0.0
    history: list[Adaptation] = field(default_factory=list)


@dataclass(frozen=True)
class ControllerState:
    """What a checkpoint keeps; `recent` only holds batches that the next calibration may run on."""

    ratios: SampleRatios
    due: Any
    counts: Counts
    recent: tuple[tuple[tuple[Any, ...], dict[str, Any]], ...]
    known: tuple[tuple[tuple[tuple[str, float], ...], float], ...]
    measured: tuple[str, str]
    calibrations: int
    late: bool
    sooner_in: int

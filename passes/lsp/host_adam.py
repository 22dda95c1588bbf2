"""Adam's update of one compressed gradient, on the host and out of place."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass
class Moments:
    """Adam's state of one compressed gradient, (s x s) each, on the host."""

    first: Tensor
    second: Tensor
    step: int = 0


@dataclass(frozen=True)
class HostUpdate:
    """What a step will do to one weight once every host update has succeeded.

    Attributes:
        direction: u, on the host.
        moments: to be installed afterwards.
        before: the moments, betas and eps that it was computed with.
    """

    direction: Tensor
    moments: Moments
    before: tuple[Moments, Any, Any]


def adam_direction(gradient: Tensor, moments: Moments, betas: tuple[float, float], eps: float) -> tuple[Tensor, Moments]:
    """Adam's bias-corrected direction m / (sqrt(v) + eps), and the new moments; `moments` stay as they are.

    Source: Kingma and Ba, 2015, Alg. 1, as torch.optim.Adam computes it.
    """
    first = moments.first.lerp(gradient, 1 - betas[0])
    second = (moments.second * betas[1]).addcmul_(gradient, gradient, value=1 - betas[1])
    step = moments.step + 1
    denominator = (second.sqrt() / math.sqrt(1 - betas[1] ** step)).add_(eps)
    return (first / (1 - betas[0] ** step)).div_(denominator), Moments(first, second, step)

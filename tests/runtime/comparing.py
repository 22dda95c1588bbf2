"""Trees of plain values and tensors, compared to the bit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def same(one: Any, other: Any) -> bool:
    """Equal to the bit, NaN included."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.shape == other.shape and torch.equal(one.nan_to_num(), other.nan_to_num())
    if isinstance(one, dict):
        return isinstance(other, dict) and list(one) == list(other) and all(same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and (one == other or (one != one and other != other))

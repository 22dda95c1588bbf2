"""Budget: what a training step may cost, as the user states it."""

from __future__ import annotations

import math
import numbers
import re
import sys
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from graphopt.errors import BudgetError

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
          "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}  # fmt: skip

AUTO = 0.5
"""Part of the FLOPs that `budget="auto"` begins with."""

_MOST = 2**62  # bytes; sums of more would leave 64 bits


@dataclass(frozen=True)
class Budget:
    """Limits on one training step; None leaves a dimension free.

    Attributes:
        flops: forward and backward FLOPs as a fraction of full training's, in (0, 1] (GreenTrainer's rho).
        memory: peak bytes on the device: an int, or a text such as "24GiB".
        variance: extra gradient variance as a fraction of the mini-batch's own (VCAS's tau), positive.
        or_more: a plan may take more than `flops`: the forward and a quarter of the backward, or what trains well the matrix in
            which the loss is by far the steepest. `budget="auto"` is `Budget(flops=0.5, or_more=True)`.
    Raises:
        BudgetError: a value outside its range, or `or_more` without `flops`.
    """

    flops: float | None = None
    memory: int | str | None = None
    variance: float | None = None
    or_more: bool = False

    def __post_init__(self) -> None:
        if self.flops is not None and not (_is_number(self.flops) and 0 < self.flops <= 1):
            raise BudgetError(
                f"flops={self.flops!r} must be a number above 0 and at most 1: the fraction of a full training step."
            )
        if self.variance is not None and not (_is_number(self.variance) and 0 < self.variance <= sys.float_info.max):
            raise BudgetError(f"variance={self.variance!r} must be a positive number, for instance 0.025.")
        if self.or_more and self.flops is None:
            raise BudgetError("or_more=True needs flops=: the fraction that more than may be taken.")
        for name in ("flops", "variance"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, float(value))  # numpy's are numbers, too
        if self.memory is not None:
            object.__setattr__(self, "memory", parse_bytes(self.memory))

    @classmethod
    def of(cls, value: Limits) -> Budget:
        """A budget from what `optimize` accepts: a Budget, a bare FLOPs fraction, "auto", or None for no limit."""
        if value is None:
            return cls()
        if isinstance(value, str) and value == "auto":
            return cls(flops=AUTO, or_more=True)
        if isinstance(value, Budget):
            return value
        if _is_number(value):
            return cls(flops=value)
        raise BudgetError(f"budget={value!r} is neither a graphopt.Budget, nor a number such as 0.5, nor 'auto'.")

    def stated(self) -> dict[str, float | int]:
        """The dimensions that are limited."""
        fields = {"flops": self.flops, "memory": self.memory, "variance": self.variance}
        return {name: value for name, value in fields.items() if isinstance(value, (int, float))}


Limits: TypeAlias = Budget | float | Literal["auto"] | None
"""What `optimize` takes for a budget."""


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and (isinstance(value, int) or math.isfinite(value))


def parse_bytes(value: int | str) -> int:
    """Bytes from an int or a text with a unit, such as "24GiB" or "800 MB".

    Raises:
        BudgetError: not a positive amount of memory.
    """
    amount: Any = -1.0
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B?)\s*", value, re.IGNORECASE)
        if match and (unit := match.group(2).upper()) in _UNITS:
            amount = float(match.group(1)) * _UNITS[unit]
    elif _is_number(value):
        amount = value
    if not 1 <= amount < _MOST:
        raise BudgetError(f"memory={value!r} must be a positive number of bytes, or a text such as '24GiB' or '800MB'.")
    return int(amount)

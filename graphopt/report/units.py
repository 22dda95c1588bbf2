"""Amounts for people: three digits and a unit of fitting size. Bytes are counted in powers of 1,024, FLOPs in powers of 1,000."""

from __future__ import annotations

BYTE_UNITS = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
FLOP_UNITS = (("PFLOPs", 10**15), ("TFLOPs", 10**12), ("GFLOPs", 10**9), ("MFLOPs", 10**6), ("kFLOPs", 10**3))

FOUR_DIGITS = 999.5
"""From here on the next unit is taken: rounded, it would be 1,000."""


def in_bytes(count: float) -> str:
    """Such as "1.21 GiB", "96.0 MiB" or "512 B"."""
    return _amount(count, BYTE_UNITS, "B")


def in_flops(count: float) -> str:
    """Such as "12.1 GFLOPs"; 2 per multiply-add."""
    return _amount(count, FLOP_UNITS, "FLOPs")


def in_seconds(seconds: float) -> str:
    """Such as "1.24 s", "83.1 ms" or "2.0 min"."""
    if seconds >= 120:
        return f"{seconds / 60:.1f} min"
    return f"{_digits(seconds)} s" if seconds * 1000 >= FOUR_DIGITS else f"{_digits(seconds * 1000)} ms"


def in_percent(part: float) -> str:
    """Such as "49.8 %" of a part of 1; a small one keeps a digit, so that only nothing is 0."""
    percent = 100 * part
    return f"{percent:.1f} %" if not percent or abs(percent) >= 0.05 else f"{percent:.1g} %"


def unit_of(largest: float, units: tuple[tuple[str, int], ...], smallest: str) -> tuple[str, int]:
    """The name and size of the unit in which the values of an axis are below 1,000 or so, from the largest of them."""
    return next(((name, size) for name, size in units if largest >= size), (smallest, 1))


def _amount(count: float, units: tuple[tuple[str, int], ...], smallest: str) -> str:
    unit, size = unit_of(abs(count) * units[-1][1] / FOUR_DIGITS, units, smallest)
    return f"{count / size:,.0f} {unit}" if size == 1 else f"{_digits(count / size)} {unit}"


def _digits(value: float) -> str:
    size = abs(value)
    return f"{value:,.0f}" if size >= 99.95 else f"{value:.1f}" if size >= 9.995 else f"{value:.2f}"

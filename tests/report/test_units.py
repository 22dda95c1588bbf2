"""Amounts have three digits and a unit of fitting size."""

from __future__ import annotations

import pytest

from graphopt.report.units import BYTE_UNITS, FLOP_UNITS, in_bytes, in_flops, in_percent, in_seconds, unit_of


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (512, "512 B"), (1024, "1.00 KiB"), (1_300_000, "1.24 MiB"), (24 * 2**30, "24.0 GiB"), (600 * 2**40, "600 TiB")],
)
def test_bytes(count: int, text: str) -> None:
    assert in_bytes(count) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 FLOPs"), (999, "999 FLOPs"), (1000, "1.00 kFLOPs"), (12_090_000_000, "12.1 GFLOPs"), (-3e12, "-3.00 TFLOPs")],
)
def test_flops(count: float, text: str) -> None:
    assert in_flops(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0831, "83.1 ms"), (0.00042, "0.42 ms"), (1.236, "1.24 s"), (119.0, "119 s"), (150.0, "2.5 min")]
)
def test_seconds(seconds: float, text: str) -> None:
    assert in_seconds(seconds) == text


@pytest.mark.parametrize(
    ("part", "text"), [(0.0, "0.0 %"), (0.498, "49.8 %"), (1.0, "100.0 %"), (0.00012, "0.01 %"), (-0.2, "-20.0 %")]
)
def test_parts(part: float, text: str) -> None:
    assert in_percent(part) == text


def test_an_axis_has_the_unit_of_its_largest_value() -> None:
    assert unit_of(3 * 2**20, BYTE_UNITS, "B") == ("MiB", 2**20)
    assert unit_of(900, FLOP_UNITS, "FLOPs") == ("FLOPs", 1)


def test_what_would_be_rounded_to_four_digits_has_the_next_unit() -> None:
    assert in_seconds(0.9996) == "1.00 s"
    assert in_seconds(0.9994) == "999 ms"
    assert in_flops(999_600) == "1.00 MFLOPs"
    assert in_bytes(1023 * 2**20) == "1.00 GiB"

"""Where rows lie in a view of other sizes."""

from __future__ import annotations

from graphopt.analysis.row_axes import Axis
from graphopt.analysis.row_rules import in_other_sizes


def test_rows_are_where_as_many_come_before_and_belong_to_them() -> None:
    assert in_other_sizes((4, 6, 8), Axis(1, 1), (24, 8), 6) == Axis(0, 1)
    assert in_other_sizes((4, 6, 8), Axis(1, 1), (4, 48), 6) == Axis(1, 8)
    assert in_other_sizes((4, 6, 8), Axis(1, 1), (8, 24), 6) is None


def test_sizes_of_zero_have_no_rows() -> None:
    """A quotient of symbols is zero where primes stand in their places."""
    assert in_other_sizes((4, 6, 8), Axis(1, 1), (0, 24), 6) is None
    assert in_other_sizes((0, 6, 8), Axis(1, 1), (6, 8), 6) is None

"""The tables that benchmarks print."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table


def table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], words: int = 1, title: str | None = None, padding: int = 1
) -> Table:
    """A table of words and numbers; None is an empty cell.

    Args:
        words: how many columns, from the left, hold words; numbers are to the right of theirs.
        padding: blanks between columns.
    """
    made = Table(title=title, padding=(0, padding, 0, 0))
    for number, column in enumerate(columns):
        made.add_column(column, justify="left" if number < words else "right", overflow="fold")
    for row in rows:
        made.add_row(*("" if cell is None else str(cell) for cell in row))
    return made

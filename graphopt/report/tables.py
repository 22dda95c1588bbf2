"""The tables that commands and benchmarks print."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from rich.table import Table


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    words: int | Collection[str] = 1,
    title: str | None = None,
    padding: int = 1,
) -> Table:
    """A table of words and numbers; None is an empty cell.

    Args:
        words: how many columns, from the left, hold words, or their names; numbers are to the right of theirs.
        padding: blanks on either side of a cell.
    """
    made = Table(title=title, padding=(0, padding))
    hold_words = columns[:words] if isinstance(words, int) else words
    for column in columns:
        made.add_column(column, justify="left" if column in hold_words else "right", overflow="fold")
    for row in rows:
        made.add_row(*("" if cell is None else str(cell) for cell in row))
    return made

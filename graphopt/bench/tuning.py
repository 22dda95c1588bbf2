"""The search for a learning rate by which benchmarks tune everything alike: doubled or halved until the best lies between two.

Its runs are kept, line by line, so that a comparison can be made in many sittings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from graphopt.bench.cases import Row, read_rows

RESULTS = "runs.jsonl"
"""File of the finished runs, one per line."""


def next_rate(tried: Iterable[tuple[float, float]], first: float) -> float | None:
    """The next learning rate to try; None where the best of those tried lies between two others.

    Args:
        tried: (learning rate, accuracy).
        first: where the search begins.
    """
    found = dict(tried)
    if not found:
        return first
    best = best_rate(found)
    if best == min(found):
        return best / 2
    return best * 2 if best == max(found) else None


def best_rate(tried: Mapping[float, float]) -> float:
    """The learning rate that gave the best accuracy; the one tried first of several."""
    return max(tried, key=lambda rate: tried[rate])


def finished_runs(file: Path, run: type[Any], series: str) -> list[dict[str, Any]]:
    """The runs in a file; none if there is no such file. A last line that is still being written does not count.

    Args:
        run: a dataclass, the fields of which a row has.
        series: a field that is a list.
    Raises:
        InputError: it holds something else.
    """

    def check(row: Row) -> None:
        run(**{field.name: row[field.name] for field in fields(run)})
        float(row["accuracy"])
        list(row[series])

    return read_rows(file, check)

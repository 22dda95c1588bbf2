"""`graphopt bench loops`: ordinary training loops of other libraries, and whether graphopt trains in them as it should."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from graphopt.bench.cases import Benchmark, Row, chosen, print_faults
from graphopt.bench.loops_cases import CASES
from graphopt.bench.loops_run import VERDICTS, measure
from graphopt.bench.tables import table

BENCHMARK = Benchmark("loops", lambda name: measure(CASES[name]), VERDICTS)


def run(cases: Sequence[str] | None, folder: Path, jobs: int, console: Console, timeout: float) -> dict[str, Any]:
    """Run the cases that are not yet finished; see `Benchmark.run`.

    Args:
        cases: their names or patterns; None: all.
    """
    return BENCHMARK.run(chosen("case", cases, CASES), folder, jobs, console, timeout)


def show(results: dict[str, Any], console: Console) -> None:
    """Print a table, what is not as it should be, and how often there was each verdict."""
    columns = ("library", "case", "verdict", "FLOPs", "tensors", "graphs", "s")
    console.print(table(columns, map(_cells, results["rows"]), words=3))
    print_faults(results, why, console)


def _cells(row: Row) -> tuple[object, ...]:
    figures: tuple[object, ...] = (None, None, None)
    if "flops_ratio" in row:
        figures = f"{row['flops_ratio']:.0%}", f"{row['selected']}/{row['trainable']}", row["compilations"]
    return CASES[row["case"]].group, row["case"], row["verdict"], *figures, f"{row['seconds']:.0f}"


def why(row: Row) -> str:
    """What led to a verdict, in one line."""
    return ": ".join(filter(None, (row.get("run"), row["error"])))

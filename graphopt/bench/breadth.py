"""`graphopt bench breadth`: many tiny models, and whether graphopt trains what plain torch.compile trains."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from graphopt.bench.breadth_models import CASES
from graphopt.bench.breadth_run import VERDICTS, measure
from graphopt.bench.cases import Benchmark, Row, chosen, print_faults
from graphopt.bench.tables import table

BENCHMARK = Benchmark("breadth", lambda name: measure(CASES[name]), VERDICTS)


def run(cases: Sequence[str] | None, folder: Path, jobs: int, console: Console, timeout: float) -> dict[str, Any]:
    """Run the cases that are not yet finished; see `Benchmark.run`.

    Args:
        cases: their names or patterns; None: all.
    """
    return BENCHMARK.run(chosen("case", cases, CASES), folder, jobs, console, timeout)


def show(results: dict[str, Any], console: Console) -> None:
    """Print a table per group, what is not as it should be, and how often there was each verdict."""
    columns = ("case", "verdict", "FLOPs", "tensors", "graphs", "gradients differ", "s")
    groups: dict[str, list[Row]] = {}
    for row in results["rows"]:
        groups.setdefault(CASES[row["case"]].group, []).append(row)
    for group, rows in groups.items():
        console.print(table(columns, map(_cells, rows), words=2, title=group))
    print_faults(results, why, console)


def _cells(row: Row) -> tuple[object, ...]:
    ours = row.get("graphopt", {})
    if "gradient" not in ours:
        return row["case"], row["verdict"], None, None, None, None, f"{row['seconds']:.0f}"
    return (
        row["case"], row["verdict"], f"{ours['flops_ratio']:.0%}", f"{ours['selected']}/{ours['trainable']}", ours["regions"],
        f"{ours['gradient']:.0e}", f"{row['seconds']:.0f}",
    )  # fmt: skip


def why(row: Row) -> str:
    """What led to a verdict, in one line."""
    ours, compiled = row.get("graphopt", {}), row.get("torch_compile", {})
    if row["verdict"] == "torch.compile fails":
        said = compiled.get("error") or (f"gradients differ by {compiled['gradient']:.1g}" if compiled else row.get("error", ""))
        also = ours.get("error") or (f"differs by {ours['gradient']:.1g}" if "gradient" in ours else "")
        return f"{said}; graphopt: {also}" if also else said
    if row["verdict"] == "wrong":
        parts = [
            f"loss differs by {ours['loss']:.1g}" if ours["loss"] else "",
            f"{ours['where']} by {ours['gradient']:.1g}" if ours["gradient"] else "",
            f"gradients though not selected: {', '.join(ours['unselected_gradients'][:5])}"
            if ours["unselected_gradients"]
            else "",
            f"left behind: {ours['effects']}" if ours["effects"] else "",
        ]
        return "; ".join([*filter(None, parts), *ours["notes"]])
    if row["verdict"] in ("ok, partly planned", "ok, over budget"):
        counted = f", {ours['counted_ratio']:.1%} as counted" if ours["counted_ratio"] else ""
        unknown = f"trained though in no plan: {', '.join(ours['unknown_gradients'][:5])}" if ours["unknown_gradients"] else ""
        parts = [f"{ours['flops_ratio']:.1%} as planned{counted}, of {row['budget']:.0%}", unknown]
        return "; ".join([*filter(None, parts), *ours["notes"]])
    return str(row.get("error") or ours.get("error") or "; ".join(ours.get("notes", ())))

"""`graphopt bench operators`: torch's own operators and modules, and whether graphopt trains what plain torch.compile trains."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from graphopt.bench.cases import Benchmark, Row, chosen, print_faults
from graphopt.bench.operators_run import LEFT_OUT, STEPS, VERDICTS, case_names, first_cases, measure_named
from graphopt.errors import InputError
from graphopt.report.tables import table

BENCHMARK = Benchmark("operators", measure_named, VERDICTS, at_once=50)


def run(cases: Sequence[str] | None, samples: int, folder: Path, jobs: int, console: Console, timeout: float) -> dict[str, Any]:
    """Run the cases that are not yet finished; see `Benchmark.run`.

    Args:
        cases: their names, or patterns such as "operator/linalg.*"; None: all.
        samples: inputs per operator and per module, at most.
    Raises:
        InputError: a name or a pattern that fits no case.
    """
    for name in cases or ():
        if reason := LEFT_OUT.get(name.rpartition("/")[0]):
            raise InputError(f"{name} is left out: {reason}.")
    return BENCHMARK.run(chosen("case", cases, case_names(samples, cases) or first_cases()), folder, jobs, console, timeout)


def show(results: dict[str, Any], console: Console) -> None:
    """Print how often there was each verdict, what is not as it should be, and what did not run as planned."""
    lines = []
    for kind in ("module", "operator"):
        rows = [row for row in results["rows"] if row["case"].startswith(kind + "/")]
        counts = Counter(row["verdict"] for row in rows)
        seconds = sum(row["seconds"] for row in rows)
        lines.append((f"{kind}s", len(rows), *(counts[v] for v in VERDICTS), sum(map(uncompiled, rows)), f"{seconds:.0f}"))
    console.print(table(("", "cases", *VERDICTS, "uncompiled", "s"), lines))
    print_faults(results, why, console)
    for row in filter(uncompiled, results["rows"]):
        console.print(f"{row['case']}: uncompiled: {why(row)}", markup=False, highlight=False)
    console.print(f"left out: {', '.join(LEFT_OUT)}")


def uncompiled(row: Row) -> bool:
    """Whether a step was trained as it should be, but by the model itself."""
    return any(step in row and (row[step].get("model_runs") or row[step].get("steps_compiled") is False) for step in STEPS)


def why(row: Row) -> str:
    """What led to a verdict, in one line."""
    parts = [str(row["error"])] if "error" in row else []
    for step in ("torch_compile", *STEPS):
        found = row.get(step)
        if found is None:
            continue
        if "error" in found:
            parts.append(f"{step}: {found['error']}")
            continue
        said = [
            f"loss differs by {found['loss']:.1g}" if found["loss"] else "",
            f"{found['where']} by {found['gradient']:.1g}" if found["where"] else "",
            f"buffers: {found['effects']}" if found["effects"] else "",
            f"gradients though not selected: {', '.join(extra)}" if (extra := found.get("unselected_gradients")) else "",
            *found.get("notes", ()),
        ]
        if any(said):
            parts.append(f"{step}: " + "; ".join(filter(None, said)))
    return " | ".join(parts)

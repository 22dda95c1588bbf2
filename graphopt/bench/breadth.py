"""`graphopt bench breadth`: many tiny models, and whether graphopt trains what plain torch.compile trains.

Every case runs in a process of its own, of one thread, which may crash or hang without harm. Finished cases are kept, line by
line, so that the table can be made in many sittings; a case that is to run again is deleted from the file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from graphopt.bench.breadth_models import CASES
from graphopt.bench.breadth_run import PREFIX, VERDICTS
from graphopt.errors import InputError

RESULTS = "breadth.jsonl"
"""The file with a line per finished case."""

TIMEOUT = 300
"""Seconds of a case."""

Row = Mapping[str, Any]


def run(cases: Sequence[str] | None, folder: Path, jobs: int, console: Console, timeout: float = TIMEOUT) -> dict[str, Any]:
    """Run the cases that are not yet finished, in `jobs` processes at a time.

    Args:
        cases: their names; None: all.
        folder: of `RESULTS`.
    Raises:
        InputError: an unknown case, or a file that holds something else.
    """
    unknown = sorted(set(cases or ()) - set(CASES))
    if unknown:
        raise InputError(f"unknown case {', '.join(unknown)}: known are {', '.join(CASES)}.")
    wanted = list(dict.fromkeys(cases or CASES))
    file = folder / RESULTS
    rows = finished(file)
    folder.mkdir(parents=True, exist_ok=True)
    pending = [name for name in wanted if name not in rows]
    with Progress(console=console) as bar, ThreadPoolExecutor(jobs) as pool:
        task = bar.add_task("training", total=len(pending))
        for done in as_completed([pool.submit(run_case, name, timeout) for name in pending]):
            row = done.result()
            rows[row["case"]] = row
            with file.open("a") as out:
                out.write(json.dumps(row) + "\n")
            bar.update(task, advance=1, description=f"{row['case']}: {row['verdict']}")
    found = [rows[name] for name in wanted]
    counts = Counter(row["verdict"] for row in found)
    return {
        "torch": torch.__version__,
        "rows": found,
        "verdicts": {verdict: counts[verdict] for verdict in VERDICTS if counts[verdict]},
        "runs": str(file),
    }


def finished(file: Path) -> dict[str, Row]:
    """The rows in a file by case, without a last one that was not finished; the file is mended.

    Raises:
        InputError: the file holds something else.
    """
    if not file.exists():
        return {}
    text = file.read_text()
    if not text.endswith("\n"):
        text = text[: text.rfind("\n") + 1]
        file.write_text(text)
    try:
        rows = [json.loads(line) for line in text.splitlines()]
        return {row["case"]: row for row in rows if row["case"] in CASES and row["verdict"] in VERDICTS}
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{file} holds something else than cases of this benchmark ({error!r}): name another folder.") from error


def run_case(name: str, timeout: float = TIMEOUT) -> Row:
    """Measure a case in a process of its own; one that dies or takes too long is a row, too."""
    command = [sys.executable, "-m", "graphopt.bench.breadth_run", name]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    start = time.perf_counter()
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment, errors="replace")
        output, why = process.stdout, f"the process ended with {process.returncode}: {process.stderr.strip()[-300:]}"
    except subprocess.TimeoutExpired as error:
        output = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else error.stdout or ""
        why = f"not finished after {timeout:g} s"
    told = [json.loads(line.removeprefix(PREFIX)) for line in output.splitlines() if line.startswith(PREFIX)]
    if told and isinstance(told[-1], dict):
        return told[-1]
    seconds = time.perf_counter() - start
    phase = told[-1] if told else "case fails"
    row = {
        "case": name,
        "group": CASES[name].group,
        "verdict": phase,
        "error": why,
        "torch": torch.__version__,
        "seconds": seconds,
    }
    return {**row, "graphopt": {"error": why}} if phase == "refused" else row


def show(results: dict[str, Any], console: Console) -> None:
    """Print a table per group, what is not as it should be, and how often there was each verdict."""
    for group in dict.fromkeys(row["group"] for row in results["rows"]):
        table = Table(title=group, padding=(0, 1, 0, 0))
        for column in ("case", "verdict", "FLOPs", "tensors", "graphs", "gradients differ", "s"):
            table.add_column(column, justify="left" if column in ("case", "verdict") else "right", overflow="fold")
        for row in (row for row in results["rows"] if row["group"] == group):
            ours = row.get("graphopt", {})
            compared = "gradient" in ours
            table.add_row(
                row["case"],
                row["verdict"],
                f"{ours['flops_ratio']:.0%}" if compared else "",
                f"{ours['selected']}/{ours['trainable']}" if compared else "",
                str(ours["regions"]) if compared and ours["regions"] is not None else "",
                f"{ours['gradient']:.0e}" if compared else "",
                f"{row['seconds']:.0f}",
            )
        console.print(table)
    for row in results["rows"]:
        if row["verdict"] != "ok":
            console.print(f"{row['case']}: {row['verdict']}: {why(row)}", markup=False, highlight=False)
    counts = ", ".join(f"{count} {verdict}" for verdict, count in results["verdicts"].items())
    console.print(f"{len(results['rows'])} cases: {counts}; torch {results['torch']}; runs: {results['runs']}")


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

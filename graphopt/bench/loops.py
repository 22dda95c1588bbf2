"""`graphopt bench loops`: ordinary training loops of other libraries, and whether graphopt trains in them as it should.

Every case runs in a process of its own, of one thread, which may crash or hang without harm. Finished cases are kept, line by
line; a case that is to run again is deleted from the file. A case whose packages are not installed is not kept.
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

from graphopt.bench.loops_cases import CASES
from graphopt.bench.loops_run import PREFIX, VERDICTS
from graphopt.errors import InputError

RESULTS = "loops.jsonl"
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
            if row["verdict"] != "not installed":
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
    """Run a case in a process of its own; one that dies or takes too long is a row, too."""
    command = [sys.executable, "-m", "graphopt.bench.loops_run", name]
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment = {**os.environ, **threads, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
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
    phase = told[-1] if told else "eager"
    return {
        "case": name,
        "group": CASES[name].group,
        "verdict": "loop fails" if phase == "eager" else "wrong",
        "why": f"{phase}: {why}",
        "flops_ratio": None,
        "torch": torch.__version__,
        "seconds": time.perf_counter() - start,
    }


def show(results: dict[str, Any], console: Console) -> None:
    """Print a table, what is not as it should be, and how often there was each verdict."""
    table = Table(padding=(0, 1, 0, 0))
    for column in ("library", "case", "verdict", "FLOPs", "tensors", "graphs", "s"):
        table.add_column(column, justify="left" if column in ("library", "case", "verdict") else "right", overflow="fold")
    for row in results["rows"]:
        counted = row["flops_ratio"] is not None
        table.add_row(
            row["group"],
            row["case"],
            row["verdict"],
            f"{row['flops_ratio']:.0%}" if counted else "",
            f"{row['selected']}/{row['trainable']}" if counted else "",
            str(row["compilations"]) if counted else "",
            f"{row['seconds']:.0f}",
        )
    console.print(table)
    for row in results["rows"]:
        if row["verdict"] != "ok":
            console.print(f"{row['case']}: {row['why']}", markup=False, highlight=False)
    counts = ", ".join(f"{count} {verdict}" for verdict, count in results["verdicts"].items())
    console.print(f"{len(results['rows'])} cases: {counts}; torch {results['torch']}; runs: {results['runs']}")

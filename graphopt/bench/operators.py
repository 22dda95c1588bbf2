"""`graphopt bench operators`: torch's own operators and modules, and whether graphopt trains what plain torch.compile trains.

Cases run in batches, each in a process of its own, of one thread, which may crash or hang without harm. Finished cases are kept,
line by line, so that the table can be made in many sittings; a case that is to run again is deleted from the file.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from graphopt.bench.operators_run import LEFT_OUT, PREFIX, STEPS, VERDICTS, case_names
from graphopt.errors import InputError

RESULTS = "operators.jsonl"
"""The file with a line per finished case."""

TIMEOUT = 120
"""Seconds of each of the phases of a case: eager autograd, torch.compile, and graphopt with each of `STEPS`."""

AT_ONCE = 50
"""Cases of one process: what leaks is bounded."""

Row = Mapping[str, Any]


def run(cases: Sequence[str] | None, samples: int, folder: Path, console: Console, timeout: float = TIMEOUT) -> dict[str, Any]:
    """Run the cases that are not yet finished, one after another.

    Args:
        cases: their names, or patterns such as "operator/linalg.*"; None: all.
        samples: inputs per operator and per module, at most.
        folder: of `RESULTS`.
        timeout: seconds of a phase of a case.
    Raises:
        InputError: a name or a pattern that fits no case, or a file that holds something else.
    """
    wanted = chosen(cases, case_names(samples))
    file = folder / RESULTS
    rows = finished(file)
    folder.mkdir(parents=True, exist_ok=True)
    pending = [name for name in wanted if name not in rows]
    with Progress(console=console) as bar:
        task = bar.add_task("training", total=len(pending))
        while pending:
            for row in run_cases(pending[:AT_ONCE], timeout):
                rows[row["case"]] = row
                pending.remove(row["case"])
                with file.open("a") as out:
                    out.write(json.dumps(row) + "\n")
                bar.update(task, advance=1, description=f"{row['case']}: {row['verdict']}")
    return {"torch": torch.__version__, "rows": [rows[name] for name in wanted], "runs": str(file)}


def chosen(patterns: Sequence[str] | None, known: Sequence[str]) -> list[str]:
    """The cases that fit any of the patterns, in the order of `known`.

    Raises:
        InputError: a pattern fits none.
    """
    if patterns is None:
        return list(known)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in known):
            left_out = LEFT_OUT.get(pattern.rpartition("/")[0])
            raise InputError(
                f"{pattern!r} is left out: {left_out}."
                if left_out
                else f"{pattern!r} fits no case: they are named as module/nn.Linear/0 or operator/linalg.svd/0."
            )
    return [name for name in known if any(fnmatchcase(name, pattern) for pattern in patterns)]


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
        return {row["case"]: row for row in rows if row["verdict"] in VERDICTS}
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{file} holds something else than cases of this benchmark ({error!r}): name another folder.") from error


def run_cases(names: Sequence[str], timeout: float = TIMEOUT) -> Iterator[Row]:
    """Measure cases in one process, and give each row when it is there.

    Where the process dies, or a phase takes too long, that case is a row, too, and those after it are left for another process.
    """
    command = [sys.executable, "-m", "graphopt.bench.operators_run", *names]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    lines: queue.Queue[str | None] = queue.Queue()
    waiting = list(names)
    phase, why = "error", ""
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment, errors="replace")
        reader = threading.Thread(target=_read, args=(process, lines), daemon=True)
        reader.start()
        try:
            while waiting and not why:
                try:
                    line = lines.get(timeout=timeout)
                except queue.Empty:
                    why = f"not finished after {timeout:g} s"
                    continue
                if line is None:
                    process.wait()
                    errors.seek(0)
                    why = f"the process ended with {process.returncode}: {errors.read().strip()[-300:]}"
                elif line.startswith(PREFIX):
                    told = json.loads(line.removeprefix(PREFIX))
                    if isinstance(told, str):
                        phase = told
                    else:
                        waiting.remove(told["case"])
                        phase = "error"
                        yield told
        finally:
            process.kill()
            process.wait()
            reader.join()
    if waiting:
        yield {"case": waiting[0], "verdict": phase, "error": why, "torch": torch.__version__, "seconds": timeout}


def _read(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line)
    lines.put(None)


def show(results: dict[str, Any], console: Console) -> None:
    """Print how often there was each verdict, what is not as it should be, and what did not run as planned."""
    table = Table(padding=(0, 1, 0, 0))
    for column in ("", "cases", *VERDICTS, "uncompiled", "s"):
        table.add_column(column, justify="left" if not column else "right")
    for kind in ("module", "operator"):
        rows = [row for row in results["rows"] if row["case"].startswith(kind + "/")]
        counts = Counter(row["verdict"] for row in rows)
        seconds = sum(row["seconds"] for row in rows)
        told = (len(rows), *(counts[v] for v in VERDICTS), sum(map(uncompiled, rows)))
        table.add_row(f"{kind}s", *map(str, told), f"{seconds:.0f}")
    for row in results["rows"]:
        if row["verdict"] != "ok" or uncompiled(row):
            verdict = "uncompiled" if row["verdict"] == "ok" else row["verdict"]
            console.print(f"{row['case']}: {verdict}: {why(row)}", markup=False, highlight=False)
    console.print(table)
    console.print(f"left out: {', '.join(LEFT_OUT)}; torch {results['torch']}; runs: {results['runs']}")


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

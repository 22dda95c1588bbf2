"""Benchmarks of many cases: each is measured in a process that may crash or hang without harm, and kept as a line of JSON.

A table can be made in many sittings: finished cases are not measured again. One that is to be is deleted from the file.
`python -m graphopt.bench.cases BENCHMARK CASE...` is such a process: it measures the cases in turn, with one thread.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from graphopt.errors import GraphoptError, InputError

PREFIX = "graphopt bench: "
"""Of lines of a process that are meant for the one that started it."""

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1",
}  # fmt: skip

NOT_KEPT = "not installed"
"""The verdict of cases that are tried again next time."""

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Benchmark:
    """What is done with every case.

    Attributes:
        name: of the module in `graphopt.bench` that has this as `BENCHMARK`, and of the file of rows.
        measure: (name of a case) -> its row; runs in a process of its own.
        verdicts: what a row's "verdict" may be; the last one stands for a process that dies before it says anything.
        at_once: cases of one process: what leaks is bounded.
    """

    name: str
    measure: Callable[[str], Row]
    verdicts: Sequence[str]
    at_once: int = 1

    def run(self, names: Sequence[str], folder: Path, jobs: int, console: Console, timeout: float) -> dict[str, Any]:
        """Measure the cases that are not yet finished, in `jobs` processes at a time.

        Args:
            folder: of the file of rows.
            timeout: seconds of a case.
        Raises:
            InputError: the file holds something else.
        """
        file = folder / f"{self.name}.jsonl"
        rows = self.finished(file)
        pending = [name for name in names if name not in rows]
        lock = threading.Lock()
        with Progress(console=console) as bar, ThreadPoolExecutor(jobs) as pool:
            task = bar.add_task("training", total=len(pending))

            def work(waiting: Sequence[str]) -> None:
                while waiting:
                    for row in self.rows_of(waiting, timeout):
                        waiting = waiting[1:]
                        with lock:
                            rows[row["case"]] = row
                            if row["verdict"] != NOT_KEPT:
                                append_row(file, row)
                            bar.update(task, advance=1, description=f"{row['case']}: {row['verdict']}")

            list(pool.map(work, [pending[i : i + self.at_once] for i in range(0, len(pending), self.at_once)]))
        found = [rows[name] for name in names]
        counts = Counter(row["verdict"] for row in found)
        verdicts = {verdict: counts[verdict] for verdict in self.verdicts if counts[verdict]}
        return {"torch": torch.__version__, "rows": found, "verdicts": verdicts, "runs": str(file)}

    def finished(self, file: Path) -> dict[str, Row]:
        """The rows in a file by case.

        Raises:
            InputError: the file holds something else.
        """
        return {row["case"]: row for row in read_rows(file, lambda row: row["case"]) if row["verdict"] in self.verdicts}

    def rows_of(self, names: Sequence[str], timeout: float) -> Iterator[Row]:
        """Measure cases in one process, and give each row when it is there.

        Where the process dies, or a case takes too long, that is a row, too; those after it are left for another process.
        """
        command = [sys.executable, "-m", "graphopt.bench.cases", self.name, *names]
        environment = {**os.environ, **ENVIRONMENT}
        lines: queue.Queue[str | None] = queue.Queue()
        with tempfile.TemporaryFile("w+", errors="replace") as said:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True, env=environment, errors="replace")
            reader = threading.Thread(target=_read, args=(process, lines), daemon=True)
            reader.start()
            try:
                for name in names:
                    start, ended = time.perf_counter(), ""
                    row: Row = {"verdict": self.verdicts[-1]}
                    while "seconds" not in row:
                        try:
                            line = lines.get(timeout=max(0.0, start + timeout - time.perf_counter()))
                        except queue.Empty:
                            ended = f"not finished after {timeout:g} s"
                        else:
                            ended = _ended(process, said) if line is None else ""
                            if line is not None and line.startswith(PREFIX):
                                row = json.loads(line.removeprefix(PREFIX))
                        if ended:
                            row = {**row, "error": ended, "seconds": time.perf_counter() - start}
                    yield {"case": name, "torch": torch.__version__, **row}
                    if ended:
                        return
            finally:
                process.kill()
                process.wait()
                reader.join()


def _read(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line)
    lines.put(None)


def _ended(process: subprocess.Popen[str], said: Any) -> str:
    code = process.wait()
    if code == -signal.SIGINT:  # the user's: it is not the case that failed
        raise KeyboardInterrupt
    said.seek(0)
    return f"the process ended with {code}: {said.read().strip()[-300:]}"


def begin(row: Row) -> None:
    """Say how far a case has come: what its row is if this process dies now."""
    print(PREFIX + json.dumps(row), flush=True)


def attempt(work: Callable[[], Row]) -> dict[str, Any]:
    """What work gives, or how it fails, and in what time; nothing that was compiled before is left."""
    torch.compiler.reset()
    start = time.perf_counter()
    try:
        found = work()
    except Exception as error:
        found = {"error": described(error), "cause": type(error).__name__, "refused": isinstance(error, GraphoptError)}
    return {**found, "seconds": time.perf_counter() - start}


def described(error: BaseException) -> str:
    """Type, first line, and where in graphopt it was raised; and the same of its cause."""
    place = ""
    trace = error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if "/graphopt/" in name or "/passes/" in name:
            place = f" [{name.rsplit('/', 2)[-2]}/{name.rsplit('/', 1)[-1]}:{trace.tb_lineno}]"
        trace = trace.tb_next
    cause = f"; from {described(error.__cause__)}" if error.__cause__ is not None else ""
    return f"{type(error).__name__}: {str(error).strip().split(chr(10))[0][:400]}{place}{cause}"


def chosen(kind: str, wanted: Iterable[str] | None, known: Iterable[str]) -> list[str]:
    """Those of `known`, in their order, that are named or fit a pattern such as "operator/linalg.*"; all for None.

    Raises:
        InputError: a name or a pattern that fits none.
    """
    patterns, names = list(wanted or ["*"]), list(known)
    unknown = sorted(p for p in patterns if not any(fnmatchcase(name, p) for name in names))
    if unknown:
        shown = names if len(names) < 300 else [*names[:2], "...", *names[-2:]]
        raise InputError(f"unknown {kind} {', '.join(unknown)}: known are {', '.join(shown)}.")
    return [name for name in names if any(fnmatchcase(name, p) for p in patterns)]


def read_rows(file: Path, check: Callable[[Row], object]) -> list[dict[str, Any]]:
    """The rows in a file; none if there is no such file. A last line that was not finished does not count.

    Args:
        check: fails for a row of something else.
    Raises:
        InputError: the file holds something else.
    """
    if not file.exists():
        return []
    try:
        rows = [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
        for row in rows:
            check(row)
    except (ValueError, TypeError, KeyError) as error:
        raise InputError(f"{file} holds no results of this benchmark ({error!r}): name another folder with --out.") from error
    return rows


def append_row(file: Path, row: Row) -> None:
    """Add a line, in place of a last one that was not finished."""
    file.parent.mkdir(parents=True, exist_ok=True)
    text = file.read_text() if file.exists() else ""
    if not text.endswith("\n"):
        file.write_text(text[: text.rfind("\n") + 1])
    with file.open("a") as out:
        out.write(json.dumps(row) + "\n")


def print_faults(results: Mapping[str, Any], why: Callable[[Row], str], console: Console) -> None:
    """Print the cases that are not as they should be, and how often there was each verdict."""
    for row in results["rows"]:
        if row["verdict"] != "ok":
            console.print(f"{row['case']}: {row['verdict']}: {why(row)}", markup=False, highlight=False)
    counts = ", ".join(f"{count} {verdict}" for verdict, count in results["verdicts"].items())
    console.print(f"{len(results['rows'])} cases: {counts}; torch {results['torch']}; runs: {results['runs']}")


def main() -> None:
    """Measure the cases that are named on the command line."""
    warnings.simplefilter("ignore")
    logging.getLogger("graphopt").addHandler(logging.NullHandler())
    torch.set_num_threads(1)
    benchmark: Benchmark = importlib.import_module(f"graphopt.bench.{sys.argv[1]}").BENCHMARK
    for name in sys.argv[2:]:
        start = time.perf_counter()
        begin({**benchmark.measure(name), "seconds": time.perf_counter() - start})


if __name__ == "__main__":
    main()

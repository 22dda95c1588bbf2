"""The driver of `graphopt bench breadth`, `operators` and `loops`: every case leaves a row, and finished ones are kept."""

from __future__ import annotations

import json
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from graphopt.bench import cases
from graphopt.bench.cases import PREFIX, Benchmark, append_row, chosen, read_rows
from graphopt.errors import GraphoptError, InputError

QUIET = Console(quiet=True)


def ok(name: str) -> dict[str, Any]:
    return {"case": name, "verdict": "ok", "seconds": 1.0}


class Process:
    """A process that writes some lines and then ends, or, without a code, hangs."""

    def __init__(self, lines: list[Any], code: int | None) -> None:
        self.lines, self.returncode, self.killed = lines, code, threading.Event()

    @property
    def stdout(self) -> Any:
        yield "noise\n"
        yield from (PREFIX + json.dumps(line) + "\n" for line in self.lines)
        if self.returncode is None:
            self.killed.wait()

    def wait(self) -> int | None:
        return self.returncode

    def kill(self) -> None:
        self.killed.set()


class Processes:
    """Stands in for `subprocess`; notes the cases of every process, which by default measures all of them."""

    def __init__(self) -> None:
        self.cases: list[list[str]] = []
        self.behaviour: list[tuple[list[Any], int | None]] = []

    def __call__(self, command: list[str], **options: Any) -> Process:
        options["stderr"].write("killed")
        names = command[4:]
        self.cases.append(names)
        return Process(*(self.behaviour.pop(0) if self.behaviour else ([ok(name) for name in names], 0)))


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Processes:
    made = Processes()
    monkeypatch.setattr(cases, "subprocess", SimpleNamespace(Popen=made, PIPE=subprocess.PIPE))
    return made


def benchmark(at_once: int = 1) -> Benchmark:
    return Benchmark("some", ok, ("ok", "refused", "not installed", "case fails"), at_once)


def test_a_process_that_dies_leaves_its_other_cases_to_another(tmp_path: Path, processes: Processes) -> None:
    processes.behaviour.append(([ok("a"), {"group": "g", "verdict": "refused"}], -11))
    found = benchmark(at_once=3).run(["a", "b", "c"], tmp_path, 1, QUIET, 60)
    assert processes.cases == [["a", "b", "c"], ["c"]]
    assert [row["verdict"] for row in found["rows"]] == ["ok", "refused", "ok"]
    assert found["verdicts"] == {"ok": 2, "refused": 1}
    died = found["rows"][1]
    assert (died["case"], died["group"], died["error"]) == ("b", "g", "the process ended with -11: killed")


def test_finished_cases_are_not_measured_again(tmp_path: Path, processes: Processes) -> None:
    benchmark().run(["a", "b"], tmp_path, 2, QUIET, 60)
    assert {row["case"] for row in map(json.loads, (tmp_path / "some.jsonl").read_text().splitlines())} == {"a", "b"}
    found = benchmark().run(["c", "a"], tmp_path, 2, QUIET, 60)
    assert [row["case"] for row in found["rows"]] == ["c", "a"]
    assert sorted(processes.cases) == [["a"], ["b"], ["c"]]


def test_what_is_not_installed_is_tried_again(tmp_path: Path, processes: Processes) -> None:
    processes.behaviour.append(([{**ok("a"), "verdict": "not installed"}], 0))
    assert benchmark().run(["a"], tmp_path, 1, QUIET, 60)["verdicts"] == {"not installed": 1}
    assert benchmark().run(["a"], tmp_path, 1, QUIET, 60)["verdicts"] == {"ok": 1}


def test_a_process_that_dies_at_once_is_the_last_verdict(processes: Processes) -> None:
    processes.behaviour.append(([], 1))
    (row,) = benchmark().rows_of(["a"], 60)
    assert (row["case"], row["verdict"], row["error"]) == ("a", "case fails", "the process ended with 1: killed")


def test_a_process_that_hangs_is_a_row(processes: Processes) -> None:
    processes.behaviour.append(([ok("a"), {"verdict": "refused"}], None))
    rows = list(benchmark().rows_of(["a", "b", "c"], 0.2))
    assert [(row["case"], row["verdict"]) for row in rows] == [("a", "ok"), ("b", "refused")]
    assert rows[1]["error"] == "not finished after 0.2 s"


def test_a_keyboard_interrupt_is_no_row(tmp_path: Path, processes: Processes) -> None:
    processes.behaviour.append(([ok("a")], -2))
    with pytest.raises(KeyboardInterrupt):
        benchmark(at_once=2).run(["a", "b", "c", "d", "e"], tmp_path, 1, QUIET, 60)
    kept = benchmark().finished(tmp_path / "some.jsonl")
    assert "a" in kept
    assert "b" not in kept


def test_the_first_attempt_says_how_it_failed() -> None:
    def refuse() -> Any:
        raise InputError("not this") from ValueError("the reason")

    found = cases.attempt(refuse)
    assert (found["cause"], found["refused"]) == ("InputError", True)
    assert "InputError: not this" in found["error"]
    assert "ValueError: the reason" in found["error"]
    assert not cases.attempt(lambda: {"a": 1 // 0})["refused"]
    assert cases.attempt(lambda: {"a": 1})["a"] == 1


def test_a_torn_line_is_replaced(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    assert read_rows(file, lambda row: row["case"]) == []
    append_row(file, ok("a"))
    with file.open("a") as out:
        out.write('{"case": "b", "ver')
    assert read_rows(file, lambda row: row["case"]) == [ok("a")]
    append_row(file, ok("b"))
    assert list(benchmark().finished(file)) == ["a", "b"]


@pytest.mark.parametrize("text", ["[1]\n", "{}\n", "a,b\n", "null\n", '{"verdict": "ok"}\n'])
def test_a_file_of_something_else_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "some.jsonl").write_text(text)
    with pytest.raises(GraphoptError, match="holds no results of this benchmark"):
        benchmark().run(["a"], tmp_path, 1, QUIET, 60)


def test_names_and_patterns_are_chosen_in_the_order_that_is_known() -> None:
    known = ["operator/a/0", "module/b/0", "module/b/1"]
    assert chosen("case", None, known) == known
    assert chosen("case", ["module/*", "operator/a/0"], known) == known
    assert chosen("case", ["module/b/1"], known) == ["module/b/1"]
    with pytest.raises(InputError, match=r"unknown case c, d/\*: known are operator/a/0, module/b/0, module/b/1\."):
        chosen("case", ["d/*", "module/*", "c"], known)
    with pytest.raises(InputError, match=r"known are 0, 1, \.\.\., 998, 999\."):
        chosen("case", ["c"], map(str, range(1000)))

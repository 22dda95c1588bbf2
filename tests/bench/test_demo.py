"""What the demo shares with the examples: finished runs are kept, and not run again with `--resume`; and what it shows."""

from __future__ import annotations

import argparse
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from graphopt import InputError
from graphopt.bench import demo
from graphopt.bench.glosses import rate_factor
from graphopt.cli import app


@pytest.fixture
def run_every(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(demo, "label_numbers", lambda: {"a": 0, "b": 1})
    monkeypatch.setattr(demo, "Glosses", lambda *a: SimpleNamespace())
    return demo.run_every


def settings(folder: Path, **others: Any) -> argparse.Namespace:
    defaults = {"out": folder, "resume": True, "runs": ["full", "budget"], "seeds": [0, 1], "length": 8, "validation_rows": 5}
    return argparse.Namespace(**(defaults | others))


def test_a_run_that_was_interrupted_goes_on_with_what_is_not_finished(run_every: Any, tmp_path: Path) -> None:
    begun = []

    def one(args: Any, kind: str, seed: int, data: Any, classes: int, bar: Any) -> dict:
        assert classes == 2
        begun.append((kind, seed))
        if len(begun) == 3:
            raise KeyboardInterrupt
        return {"seed": seed, "value": len(begun)}

    with pytest.raises(KeyboardInterrupt):
        run_every(settings(tmp_path, resume=False), one)
    results = run_every(settings(tmp_path), one)
    assert begun == [("full", 0), ("budget", 0), ("full", 1), ("full", 1), ("budget", 1)]
    assert [(r["kind"], r["seed"], r["value"]) for r in results] == [
        ("full", 0, 1), ("budget", 0, 2), ("full", 1, 4), ("budget", 1, 5)
    ]  # fmt: skip
    assert json.loads((tmp_path / "results.json").read_text())["results"] == results
    assert run_every(settings(tmp_path), one) == results
    assert len(begun) == 5


def test_results_of_other_settings_are_neither_mixed_nor_lost(run_every: Any, tmp_path: Path) -> None:
    def one(args: Any, kind: str, seed: int, *others: Any) -> dict:
        return {"seed": seed, "length": args.length}

    kept = run_every(settings(tmp_path), one)
    with pytest.raises(InputError, match="other settings: name another folder"):
        run_every(settings(tmp_path, length=16), one)
    assert run_every(settings(tmp_path), one) == kept
    assert run_every(settings(tmp_path, length=16, resume=False), one)[0]["length"] == 16


def result(kind: str, accuracy: float, seed: int = 0, steps: int = 40) -> dict:
    return {
        "kind": kind,
        "run": "full" if kind == "full" else "flops=0.125",
        "seed": seed,
        "rate": 3e-4,
        "flops_per_step": 8_123_456_789 if kind == "full" else 4_012_345_678,
        "losses": [3 / (i + 1) for i in range(steps)],
        "accuracy": [(steps // 2, accuracy / 2), (steps, accuracy)],
        "clock": [12.3456 * (i + 1) for i in range(steps)],
        "seconds": 12.3456 * steps,
        "seconds_per_step": 12.3456,
        "compile_seconds": 1234.5,
        "report": None,
    }


def test_the_learning_rate_rises_for_a_tenth_of_a_run_and_then_falls_to_zero() -> None:
    assert rate_factor(0.0, 0.01) == pytest.approx(0.1)
    assert rate_factor(0.05, 0.0) == pytest.approx(0.5)
    assert rate_factor(0.1, 0.0) == pytest.approx(1.0)
    assert rate_factor(0.55, 0.01) == pytest.approx(0.5)
    assert rate_factor(1.0, 0.01) == 0.0
    assert all(0 < rate_factor(i / 3, 1 / 3) <= 1 for i in range(3))  # also in runs of very few steps


def test_a_run_is_over_by_its_clock_if_it_has_one_and_else_by_its_steps() -> None:
    timed = SimpleNamespace(steps=600, seconds=60.0, evaluate=100)
    counted = SimpleNamespace(steps=600, seconds=None, evaluate=100)
    assert demo.progress_of(timed, 5, 30.0) == 0.5
    assert demo.progress_of(timed, 1000, 30.0) == 0.5
    assert demo.progress_of(timed, 5, 61.0) == 1.0
    assert demo.progress_of(counted, 300, 1e9) == 0.5
    assert demo.progress_of(counted, 600, 0.0) == 1.0
    assert [demo.evaluates(timed, 100, before, before + 0.04) for before in (0.0, 0.07, 0.11)] == [False, True, False]
    assert demo.evaluates(timed, 7, 0.99, 1.0)
    assert [demo.evaluates(counted, n, 0.0, n / 600) for n in (99, 100, 600)] == [False, True, True]


def test_the_table_fits_80_columns() -> None:
    title = "WordNet glosses, MiniLM-L6: accuracy on 5,000 definitions"
    results = [result("full", 1.0, seed=1234, steps=12_345), result("budget", 0.5, seed=1234, steps=12_345)]
    file = io.StringIO()
    Console(width=80, file=file).print(demo.summary(results, title))
    lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in file.getvalue()
    assert title in file.getvalue()
    for kind, cells in ("full", ["100.0%", "100.0%"]), ("flops=0.125", ["50.0%", "49.4%"]):
        row = next(line for line in lines if line.startswith(f"│ {kind} "))
        assert [cell.strip() for cell in row.strip("│").split("│")] == [
            kind, "1234", "12345", *cells, "12.346", "152406", "1234"
        ]  # fmt: skip


def test_the_outcome_names_the_side_that_is_ahead() -> None:
    timed, counted = SimpleNamespace(steps=600, seconds=75.0, budget=0.5), SimpleNamespace(steps=600, seconds=None, budget=0.35)
    full, budget = result("full", 0.472), result("budget", 0.61)
    assert demo.outcome(timed, [full, budget]) == (
        "After 75 s of training each, the budget is ahead: 61.0% with 50% of the FLOPs per step, 47.2% in full."
    )
    assert demo.outcome(counted, [budget, result("full", 0.7)]) == (
        "After 600 steps of training each, full training is ahead: 61.0% with 35% of the FLOPs per step, 70.0% in full."
    )
    assert "the two are level: 61.0%" in demo.outcome(timed, [result("full", 0.61001), budget])
    seeds = [full, result("full", 0.99, seed=1), budget]
    assert demo.outcome(timed, seeds).endswith("full training is ahead: 61.0% with 50% of the FLOPs per step, 73.1% in full.")
    assert demo.outcome(timed, [full]) == demo.outcome(timed, [budget]) == ""


def test_the_picture_is_drawn_for_runs_of_any_length(tmp_path: Path) -> None:
    demo.plot([result("full", 0.4, steps=2), result("budget", 0.6)], tmp_path / "curves.png", "title")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_the_demo_compares_at_equal_time(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[list[str]] = []
    monkeypatch.setattr(demo, "main", given.append)
    assert CliRunner().invoke(app, ["demo"]).exit_code == 0
    assert CliRunner().invoke(app, ["demo", "--steps", "5"]).exit_code == 0
    assert "--seconds" in given[0]
    assert given[1] == ["--steps", "5"]


def test_each_side_trains_at_a_rate_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given: list[argparse.Namespace] = []

    def run_every(args: argparse.Namespace, one: Any) -> list[dict]:
        given.append(args)
        return [result("full", 0.5), result("budget", 0.6)]

    monkeypatch.setattr(demo, "run_every", run_every)
    demo.main(["--seconds", "60", "--out", str(tmp_path)])
    assert (given[0].lr, given[0].budget_lr) == (3e-4, 1e-3)
    assert (tmp_path / "curves.png").exists()


@pytest.mark.parametrize("wrong", [["--steps", "0"], ["--seconds", "0"], ["--seconds", "-1"]])
def test_a_run_of_no_length_is_refused(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        demo.main(wrong)
    assert "must be positive" in capsys.readouterr().err

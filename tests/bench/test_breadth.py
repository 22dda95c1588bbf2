"""`graphopt bench breadth`: models are trained as in eager mode, and what is wrong is called wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import graphopt
from graphopt.bench import breadth
from graphopt.bench.breadth import CASES
from graphopt.bench.breadth_run import Trained, compare, matrix_flops, measure, verdict
from graphopt.bench.commands import bench_app
from graphopt.errors import InputError


def bench(folder: Path, *options: str) -> Any:
    return CliRunner().invoke(bench_app, ["breadth", "--out", str(folder), *options])


def test_two_cases_end_to_end(tmp_path: Path) -> None:
    found = bench(tmp_path, "--cases", "plain,mask-index")
    assert found.exit_code == 0, found.output
    assert "2 cases: 2 ok" in found.output
    rows = {row["case"]: row for row in map(json.loads, (tmp_path / "breadth.jsonl").read_text().splitlines())}
    assert set(rows) == {"plain", "mask-index"}
    for row in rows.values():
        assert row["verdict"] == "ok"
        assert row["torch_compile"]["ok"]
        assert 0 < row["graphopt"]["selected"] < row["graphopt"]["trainable"]
        assert 0.3 < row["graphopt"]["counted_ratio"] <= 0.7
    assert rows["plain"]["graphopt"]["regions"] == 1
    again = bench(tmp_path, "--cases", "plain", "--json")
    assert again.exit_code == 0
    assert json.loads(again.stdout)["verdicts"] == {"ok": 1}


def planted(change: Any) -> Any:
    """An `optimize` whose models are changed before they train."""

    def optimize(model: torch.nn.Module, batch: Any, **options: Any) -> Any:
        opt = graphopt.optimize(model, batch, **options)
        change(opt, dict(model.named_parameters()))
        return opt

    return optimize


def test_wrong_gradients_those_that_were_not_asked_for_and_lost_effects_are_found() -> None:
    """In one run; that each of them alone is wrong is below."""

    def change(opt: Any, parameters: dict[str, torch.Tensor]) -> None:
        left_out = next(p for n, p in parameters.items() if n not in opt.selected)
        parameters[max(opt.selected)].register_hook(lambda _: setattr(left_out, "grad", torch.ones_like(left_out)))
        parameters[max(opt.selected)].register_hook(lambda gradient: gradient * 1.01)
        opt._graphopt_model.optimized = True

    case = replace(CASES["plain"], effects=lambda model: 1.0 if hasattr(model, "optimized") else 0.0)
    row = measure(case, planted(change))
    assert row["verdict"] == "wrong"
    assert row["graphopt"]["gradient"] == pytest.approx(0.01, rel=1e-3)
    assert row["graphopt"]["where"] in breadth.why(row)
    assert len(row["graphopt"]["unselected_gradients"]) == 1
    assert row["graphopt"]["effects"] == "1.0 instead of 0.0"


def test_a_refusal_names_its_cause() -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise InputError("not this") from ValueError("the reason")

    row = measure(CASES["plain"], refuse)
    assert row["verdict"] == "refused"
    assert "InputError: not this" in breadth.why(row)
    assert "ValueError: the reason" in breadth.why(row)


OURS = {
    "loss": 0.0, "gradient": 0.0, "unselected_gradients": [], "unknown_gradients": [], "effects": "", "model_runs": 0,
    "steps_compiled": True, "flops_ratio": 0.69, "counted_ratio": 0.7,
}  # fmt: skip
PLAIN = {"ok": True, "gradient": 0.0, "effects": ""}


@pytest.mark.parametrize(
    ("changed", "wanted"),
    [
        ({}, "ok"),
        ({"flops_ratio": 0.71}, "ok, over budget"),
        ({"counted_ratio": 0.75}, "ok, over budget"),
        ({"counted_ratio": None}, "ok"),
        ({"unknown_gradients": ["a"]}, "ok, partly planned"),
        ({"model_runs": 1}, "uncompiled"),
        ({"steps_compiled": False}, "uncompiled"),
        ({"loss": 0.1}, "wrong"),
        ({"gradient": 0.01}, "wrong"),
        ({"gradient": float("nan")}, "wrong"),
        ({"unselected_gradients": ["a"]}, "wrong"),
        ({"effects": "1.0 instead of 0.0"}, "wrong"),
        ({"error": "no"}, "refused"),
    ],
)
def test_verdicts(changed: dict[str, Any], wanted: str) -> None:
    assert verdict(PLAIN, {**OURS, **changed}) == wanted
    assert verdict({"ok": False}, {**OURS, **changed}) == "torch.compile fails"


def test_compare_ignores_rounding_errors_alone() -> None:
    def run(*values: float) -> Trained:
        return Trained([1.0], [{"large": torch.tensor([100.0]), "small": torch.tensor(values)}], [[]])

    assert compare(run(1e-9, 0.0), run(0.0, 0.0))["gradient"] < 1e-6
    assert compare(run(0.1, 0.0), run(0.1, 0.05))["gradient"] == pytest.approx(0.5)
    assert compare(run(float("nan"), 0.0), run(0.0, 0.0))["gradient"] == float("inf")


@pytest.mark.parametrize("phase", ["case fails", "torch.compile fails", "refused"])
def test_of_a_process_that_died_the_reason_is_told(phase: str) -> None:
    assert breadth.why({"verdict": phase, "error": "the process ended with -9"}) == "the process ended with -9"


def test_an_unknown_case_is_refused(tmp_path: Path) -> None:
    found = bench(tmp_path, "--cases", "nobody")
    assert isinstance(found.exception, InputError)
    assert "unknown case nobody" in str(found.exception)


def test_flops_that_torchs_counter_cannot_count_are_unknown_and_other_errors_are_raised() -> None:
    case, model = CASES["plain"], torch.nn.Linear(2, 2)

    def fail(error: Exception) -> Any:
        def call() -> Any:
            raise error

        return call

    assert matrix_flops(case, model, lambda: model(torch.ones(1, 2)).sum(), {}) == 16
    assert matrix_flops(case, model, fail(AssertionError("Expected gradient function to be set")), {}) is None
    assert matrix_flops(case, model, fail(TypeError("'NotImplementedType' object is not subscriptable")), {}) is None
    for error in (TypeError("'NoneType' object is not subscriptable"), ValueError("no")):
        with pytest.raises(type(error), match=str(error)):
            matrix_flops(case, model, fail(error), {})


def test_there_are_many_cases() -> None:
    assert len(CASES) >= 110

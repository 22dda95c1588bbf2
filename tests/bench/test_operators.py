"""`graphopt bench operators`: torch's own operators are trained as in eager mode, and what is wrong is called wrong."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

import graphopt
from graphopt.bench import operators
from graphopt.bench.operators_run import LEFT_OUT, PREFIX, case_names, case_of, measure, verdict
from graphopt.errors import InputError


@pytest.mark.parametrize("name", ["operator/cumprod/0", "operator/linalg.inv/0", "module/nn.BatchNorm1d/0", "module/nn.GLU/0"])
def test_a_case_is_trained_as_in_eager_mode(name: str) -> None:
    row = measure(case_of(name)[0], 1e-6)
    assert row["verdict"] == "ok", operators.why(row)
    assert row["exact"]["selected"] == row["exact"]["trainable"]
    assert 0 < row["budget"]["selected"] < row["budget"]["trainable"]
    assert not operators.uncompiled(row)


def test_a_planted_wrong_gradient_is_wrong() -> None:
    def optimize(model: torch.nn.Module, batch: Any, **options: Any) -> Any:
        opt = graphopt.optimize(model, batch, **options)
        if options.get("passes") is None:  # that of the budget alone
            dict(model.named_parameters())["tensor0"].register_hook(lambda gradient: gradient * 1.01)
        return opt

    row = measure(case_of("operator/cumprod/0")[0], 1e-6, optimize)
    assert row["verdict"] == "wrong"
    assert row["exact"]["verdict"] == "ok"
    assert row["budget"]["gradient"] == pytest.approx(0.01, rel=1e-3)
    assert "tensor0 by 0.01" in operators.why(row)


def test_what_eager_mode_does_not_train_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    case, _ = case_of("operator/cumprod/0")
    make, calls = case.make, []

    def other() -> Any:
        calls.append(1)
        model, batch = make()
        return model, {"x": batch["x"] * len(calls)}

    monkeypatch.setattr(case, "make", other)
    row = measure(case, 1e-6)
    assert row["verdict"] == "eager's"
    assert "does not repeat itself" in operators.why(row)


SAME = {"loss": 0.0, "gradient": 0.0, "effects": "", "unselected_gradients": []}
OTHER = {**SAME, "gradient": 0.1}
REFUSED = {"error": "InputError", "refused": True}
FAILED = {"error": "KeyError", "refused": False}


@pytest.mark.parametrize(
    ("plain", "ours", "wanted"),
    [
        (SAME, SAME, "ok"),
        (OTHER, SAME, "ok"),
        (FAILED, SAME, "ok"),
        (SAME, OTHER, "wrong"),
        (SAME, {**SAME, "loss": float("nan")}, "wrong"),
        (SAME, {**SAME, "effects": "1 instead of 0"}, "wrong"),
        (SAME, {**SAME, "unselected_gradients": ["a"]}, "wrong"),
        (FAILED, OTHER, "wrong"),
        (OTHER, OTHER, "torch's"),
        (SAME, REFUSED, "ours"),
        (OTHER, REFUSED, "torch's"),
        (FAILED, REFUSED, "torch's"),
        (SAME, FAILED, "error"),
        (OTHER, FAILED, "error"),
        (FAILED, FAILED, "torch's"),
    ],
)
def test_verdicts(plain: dict[str, Any], ours: dict[str, Any], wanted: str) -> None:
    assert verdict(plain, ours, 1e-6) == wanted


class Process:
    """A process that has written some lines and ended."""

    def __init__(self, *told: Any) -> None:
        self.stdout = [PREFIX + json.dumps(line) + "\n" for line in told]
        self.returncode = -11

    def wait(self) -> None: ...
    def kill(self) -> None: ...


def test_a_process_that_dies_leaves_the_other_cases_to_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []

    def row(name: str) -> dict[str, Any]:
        return {"case": name, "verdict": "ok", "seconds": 1.0}

    def start(command: list[str], **options: Any) -> Process:
        names = command[3:]
        started.append(names)
        return Process(row(names[0]), "torch's") if len(names) == 3 else Process(*map(row, names))

    monkeypatch.setattr(operators, "subprocess", SimpleNamespace(Popen=start, PIPE=subprocess.PIPE))
    monkeypatch.setattr(operators, "case_names", lambda samples: ["operator/a/0", "operator/b/0", "operator/c/0"])
    console = Console(quiet=True)
    results = operators.run(None, 1, tmp_path, console)
    assert started == [["operator/a/0", "operator/b/0", "operator/c/0"], ["operator/c/0"]]
    assert [r["verdict"] for r in results["rows"]] == ["ok", "torch's", "ok"]
    assert "ended with -11" in operators.why(results["rows"][1])
    operators.show(results, console)
    operators.run(["operator/*"], 1, tmp_path, console)
    assert len(started) == 2  # finished cases are kept
    with pytest.raises(InputError, match="fits no case"):
        operators.run(["operator/d/0"], 1, tmp_path, console)
    with pytest.raises(InputError, match="complex"):
        operators.run(["operator/imag/0"], 1, tmp_path, console)


def test_there_are_many_cases() -> None:
    names = case_names(1)
    assert len(names) == len(set(names)) >= 600
    assert not {name.rpartition("/")[0] for name in names} & set(LEFT_OUT)

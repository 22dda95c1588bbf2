"""`graphopt bench operators`: torch's own operators are trained as in eager mode, and what is wrong is called wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import graphopt
from graphopt.bench import operators
from graphopt.bench.operators_run import LEFT_OUT, case_names, case_of, first_cases, measure, verdict
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


def test_a_case_end_to_end(tmp_path: Path) -> None:
    console = Console(quiet=True)
    results = operators.run(["module/nn.GLU/*"], 1, tmp_path, 1, console, 300)
    assert [(row["case"], row["verdict"]) for row in results["rows"]] == [("module/nn.GLU/0", "ok")]
    operators.show(results, console)


def test_what_is_left_out_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="unknown case operator/d/0"):
        operators.run(["operator/d/0"], 1, tmp_path, 1, Console(quiet=True), 300)
    with pytest.raises(InputError, match="operator/imag/0 is left out: complex"):
        operators.run(["operator/imag/0"], 1, tmp_path, 1, Console(quiet=True), 300)


def test_there_are_many_cases() -> None:
    names = first_cases()
    assert len(names) == len(set(names)) >= 600
    assert not {name.rpartition("/")[0] for name in names} & set(LEFT_OUT)
    assert case_names(2, ["module/nn.GLU/*", "operator/ab?/0"]) == ["module/nn.GLU/0", "module/nn.GLU/1", "operator/abs/0"]

"""The report begins with a verdict, has human units, stays within its width, and says all of it to machines."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from graphopt.passes import Lsp, Vcas

import graphopt
from graphopt.report.plan import StepClock, summarise
from graphopt.report.summary import SCHEMA, Report
from graphopt.report.tensors import TensorRow
from graphopt.report.text import WIDTH
from tests import zoo

SCHEMA_PAGE = Path(__file__).parents[2] / "docs" / "report.md"


def report_of(name: str, budget: graphopt.Budget | float | None = None, passes: object = "auto") -> Report:
    model, inputs = zoo.make(name, 4)
    return graphopt.optimize(model, inputs, budget, passes, "aot_eager").report  # type: ignore[arg-type]


def test_the_first_line_is_the_verdict() -> None:
    report = report_of("bert", 0.5)
    assert report.verdict == (
        f"Trains {report.trained} of {report.trainable} tensors at {100 * report.flops_ratio:.1f} % of the FLOPs; "
        "no approximation of their gradients."
    )
    assert " ".join(str(report).partition("\n\n")[0].split()) == report.verdict
    assert report_of("mlp").verdict == "Trains all 6 tensors at 100.0 % of the FLOPs; no approximation."


def test_the_verdict_names_approximations_and_the_peak() -> None:
    sampled = report_of("mlp", None, [Vcas(keep_rows=0.5)])
    assert sampled.verdict.endswith("; approximations: vcas: gradients unbiased.")
    limited = report_of("mlp", graphopt.Budget(memory="1GiB"))
    assert limited.plan is not None
    assert re.search(r"; peak [\d.]+ KiB predicted; no approximation\.$", limited.verdict)
    measured = replace(limited, plan=replace(limited.plan, measured={**limited.plan.measured, "peak_bytes": 3 * 2**30}))
    assert "; peak 3.00 GiB measured;" in measured.verdict


def test_the_measured_peak_is_that_of_the_models_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was that of the device that is current in CUDA, of models elsewhere as well."""
    model, inputs = zoo.make("mlp", 4)
    opt = graphopt.optimize(model, inputs, backend="aot_eager")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    monkeypatch.setattr("torch.cuda.max_memory_allocated", lambda device=None: 1 + torch.device(device or "cuda:0").index)
    assert opt.report.plan is not None
    assert opt.report.plan.measured["peak_bytes"] is None
    plan = summarise(opt.plan, (), {}, StepClock(), device=torch.device("cuda:1"))
    assert plan.measured["peak_bytes"] == 2


def test_a_model_that_is_trained_as_it_is_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHOPT_DISABLE", "1")
    assert report_of("mlp").verdict == "The model is trained as it is: GRAPHOPT_DISABLE is set."


def test_a_report_in_a_list_is_one_line() -> None:
    report = report_of("mlp", 0.6)
    assert repr(report) == f"<Report: {report.verdict}>"


@pytest.mark.parametrize("passes", ["auto", [Lsp(subspace=4, nonzeros=2)], [Vcas(keep_rows=0.5)]])
def test_lines_stay_within_the_width(passes: object) -> None:
    for line in str(report_of("bert", 0.5 if passes == "auto" else None, passes)).splitlines():
        longest = max(map(len, line.split()), default=0)
        assert len(line) <= max(WIDTH, 17 + longest)


def test_amounts_have_units() -> None:
    report = report_of("bert", graphopt.Budget(flops=0.5, memory="1GiB"))
    text = str(report)
    assert re.search(r"^FLOPs per step   [\d.]+ MFLOPs -> [\d.]+ MFLOPs \([\d.]+ %\) at batch 4$", text, re.MULTILINE)
    assert re.search(r"^budget           flops at most 50.0 %, memory at most 1.00 GiB$", text, re.MULTILINE)
    assert not re.search(r"\d,\d{3}", text)


def test_every_field_for_machines_is_documented() -> None:
    values = json.loads(json.dumps(report_of("bert", graphopt.Budget(flops=0.5, memory="1GiB")).to_dict()))
    assert list(values)[:2] == ["schema", "verdict"]
    assert values["schema"] == SCHEMA == 1
    documented = set(re.findall(r"^\| `([\w.]+)` \|", SCHEMA_PAGE.read_text("utf-8").partition("## JSON")[2], re.MULTILINE))
    found = {*values, *(f"tensors.{key}" for key in values["tensors"][0])}
    found |= {f"plan.{key}" for key in values["plan"]} | {f"selection.{key}" for key in values["selection"]}
    assert documented == found
    assert set(values["tensors"][0]) == {f.name for f in fields(TensorRow)}

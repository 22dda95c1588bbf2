"""`graphopt bench loops`: loops train as without graphopt, and the first thing that is wrong is named."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.utils.data import DataLoader

from graphopt.bench import loops
from graphopt.bench.loops import CASES
from graphopt.bench.loops_models import ADAM, Mlp, points
from graphopt.bench.loops_run import Case, Loop, measure
from graphopt.errors import InputError

QUIET = Console(quiet=True)


def test_a_case_end_to_end(tmp_path: Path) -> None:
    found = loops.run(["plain-accumulation"], tmp_path, 1, QUIET, 300)
    (row,) = found["rows"]
    assert row["verdict"] == "ok", row
    assert row["flops_ratio"] <= 0.7
    assert 0 < row["selected"] < row["trainable"]
    assert [json.loads(line)["case"] for line in (tmp_path / "loops.jsonl").read_text().splitlines()] == ["plain-accumulation"]
    loops.show(found, QUIET)


@pytest.mark.long  # the callback has tests of its own
def test_a_case_of_a_library_that_tests_need() -> None:
    row = measure(CASES["trainer-callback"])
    assert row["verdict"] == "ok", row
    assert row["flops_ratio"] <= 0.7


def small(loop: Loop) -> None:
    """Three steps."""
    model = Mlp(8)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    batches = list(DataLoader(points(12), 4))
    step = loop.optimized(model, batches[0], optimizer)
    for batch in batches:
        loss = step(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loop.losses.append(float(loss.detach()))


def with_graphopt(change: Any) -> Case:
    """A case in which something is changed after three steps with graphopt."""

    def run(loop: Loop) -> None:
        small(loop)
        if loop.ours:
            change(loop)

    return Case(run, "PyTorch")


def parameter(loop: Loop, name: str) -> nn.Parameter:
    return dict(loop.opt.named_parameters())[name]


def move(loop: Loop, name: str) -> None:
    with torch.no_grad():
        parameter(loop, name).add_(1.0)


def under_a_budget(change: Any) -> Any:
    return lambda loop: change(loop) if loop.budget else None


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda loop: move(loop, "head.bias"), "without a budget: head.bias differs"),
        (lambda loop: loop.losses.pop(), "without a budget: 2 losses instead of 3"),
        (lambda loop: loop.losses.__setitem__(1, float("nan")), "without a budget: the loss of step 2 is nan"),
        (lambda loop: loop.effects.append(torch.ones(1)), "without a budget: 1 tensors were collected instead of 0"),
        (lambda loop: loop.opt.note("left to eager mode"), "without a budget: left to eager mode"),
        (lambda loop: logging.getLogger("graphopt.some").warning("beware"), "without a budget: beware"),
        (lambda loop: loop.check(False, "not reloaded"), "without a budget: not reloaded"),
        (lambda loop: 1 / 0, "without a budget: ZeroDivisionError"),
        (lambda loop: setattr(loop, "opt", None), "without a budget: nothing was optimised"),
        (
            under_a_budget(lambda loop: move(loop, min(set(loop.before) - loop.opt.selected))),
            "that are not selected were trained",
        ),
        (under_a_budget(lambda loop: move(loop, min(loop.opt.selected))), "differs by"),
    ],
)
def test_what_is_wrong_is_named(change: Any, why: str) -> None:
    row = measure(with_graphopt(change))
    assert row["verdict"] == "wrong"
    assert why in loops.why(row)


def test_what_a_loop_calls_for_is_no_fault() -> None:
    case = with_graphopt(lambda loop: loop.opt.note("the model returns no loss"))
    assert measure(case)["verdict"] == "wrong"
    case.told = ("no loss",)
    assert measure(case)["verdict"] == "ok"


def test_loops_that_cannot_be_judged() -> None:
    row = measure(Case(lambda loop: loop.begin(Mlp()), "PyTorch"))
    assert (row["verdict"], loops.why(row)) == ("loop fails", "it has no losses")
    row = measure(Case(small, "PyTorch", ("torch", "no_such_package")))
    assert (row["verdict"], loops.why(row)) == ("not installed", "pip install no-such-package")


@pytest.mark.parametrize("run", ["", "without a budget", "under a budget"])
def test_rows_of_processes_that_ended_too_soon_are_shown(run: str) -> None:
    row = {"case": "hooks", "verdict": "wrong", "run": run, "error": "the process ended with -9", "seconds": 1.0}
    assert loops.why(row) == (f"{run}: " if run else "") + row["error"]
    loops.show({"rows": [row], "verdicts": {"wrong": 1}, "torch": "2", "runs": "here"}, QUIET)


def test_an_unknown_case_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="unknown case nobody"):
        loops.run(["nobody"], tmp_path, 1, QUIET, 300)

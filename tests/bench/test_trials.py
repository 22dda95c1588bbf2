"""`graphopt bench trials`, on a toy task."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from graphopt.bench import trials
from graphopt.bench.selection_tasks import Batch, Task, evaluate
from graphopt.bench.trials import MARKS, ROWS, Finished, compare, finished_sets
from graphopt.bench.tuning import RESULTS
from graphopt.errors import InputError


class Output(dict[str, Any]):
    __getattr__ = dict.__getitem__


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Output:
        logits = self.head(self.first(x).relu())
        return Output(loss=nn.functional.cross_entropy(logits, labels), logits=logits)


def toy() -> Task:
    def make(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return Classifier()

    x = torch.randn(ROWS + 320, 4, generator=torch.Generator().manual_seed(0))
    data = {"x": x, "labels": (x.sum(1) > 0).long()}
    return Task(make, data, data, data, 1e-2, 30)


def row(trained: list[str], loss: float, **fields: Any) -> dict[str, Any]:
    named = {"task": "digits", "rule": "ours", "flops": 0.5, "rate": 1e-3, "steps": 30, "seed": 0, "draw": 0}
    return {**named, "accuracy": 1 - loss, "loss": loss, "trained": trained, **fields}


def test_every_set_counts_once_at_its_best_rate() -> None:
    rows = [row(["a"], 0.5), row(["b"], 0.6), row(["a"], 0.4, rule="topmost", rate=2e-3)]
    others: list[dict[str, Any]] = [{"seed": 1}, {"flops": 0.6}, {"task": "glosses"}, {"steps": 31}, {"rule": "rotation"}]
    others.append({"rule": "full"})
    rows += [row(["a"], 0.1, **other) for other in others]
    assert finished_sets(rows, "digits", 0.5, 30) == [Finished(("a",), 0.4, 0.6), Finished(("b",), 0.6, 0.4)]


def test_a_trial_trains_its_tensors_alone_on_rows_that_do_not_judge_it(monkeypatch: pytest.MonkeyPatch) -> None:
    toys, made = toy(), []

    def make(seed: int) -> nn.Module:
        made.append(toys.make_model(seed))
        return made[-1]

    judged: list[torch.Tensor] = []

    def evaluated(model: nn.Module, data: Batch) -> tuple[float, float]:
        judged.append(data["x"])
        return evaluate(model, data)

    monkeypatch.setattr(trials, "evaluate", evaluated)
    task = replace(toys, make_model=make)
    losses = trials.trial(task, ["head.weight"], 1e-2)
    assert len(losses) == len(MARKS)
    assert losses[-1] < losses[0]
    before = dict(toys.make_model(0).named_parameters())
    changed = {n for n, p in made[0].named_parameters() if not torch.equal(p, before[n])}
    assert changed == {"head.weight"}
    assert all(torch.equal(rows, task.train["x"][-ROWS:]) for rows in judged)


def test_a_row_says_how_well_early_losses_rank() -> None:
    ends = [Finished(("a",), 0.3, 0.7), Finished(("b",), 0.4, 0.6), Finished(("c",), 0.5, 0.5)]
    same, reversed_ = [1.0, 2.0, 3.0], [3.0, 2.0, 1.0]
    rows = compare(ends, [[reversed_[k], *[same[k]] * (len(MARKS) - 1)] for k in range(3)])
    assert [r["rank_correlation"] for r in rows] == pytest.approx([-1.0, *[1.0] * (len(MARKS) - 1)])
    assert (rows[0]["picked"], rows[0]["place_of_best"], rows[0]["trial_steps"]) == (0.5, 3, 3 * MARKS[0])
    assert (rows[1]["picked"], rows[1]["place_of_best"], rows[1]["best"]) == (0.7, 1, 0.7)


def test_the_command_compares_what_was_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "load", lambda task, folder: toy())
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    sets = [["head.weight"], ["head.bias"], ["first.weight", "head.weight"]]
    file = tmp_path / RESULTS
    file.write_text("".join(json.dumps(row(trained, 0.5 - 0.1 * k)) + "\n" for k, trained in enumerate(sets[:2])))
    console = Console(file=io.StringIO(), width=80)
    with pytest.raises(InputError, match=r"has 2 sets trained on digits within flops=0\.5: run graphopt bench selection"):
        trials.run("digits", 0.5, 1e-2, tmp_path, console)
    with file.open("a") as end:
        end.write(json.dumps(row(sets[2], 0.2)) + "\n")
    results = trials.run("digits", 0.5, 1e-2, tmp_path, console)
    assert [(r["steps"], r["sets"], r["best"]) for r in results["rows"]] == [(mark, 3, 0.8) for mark in MARKS]
    text = io.StringIO()
    trials.show(results, Console(file=text, width=80))
    assert max(map(len, text.getvalue().splitlines())) <= 80
    assert "40" in text.getvalue()

"""The search of `graphopt bench selection`, driven by made-up accuracies: nothing is trained here."""

from __future__ import annotations

import io
import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from rich.console import Console

import graphopt
from graphopt.bench import selection, selection_run
from graphopt.bench.selection import DRAWS, NEAR, Settings, compare, missing, show
from graphopt.bench.selection_run import RULES, Run, finished
from graphopt.errors import InputError
from graphopt.planner.costs import BackwardCosts

RATE, STEPS = 1e-3, 10
Accuracy = Callable[[Run], float]


def asked(rules: Sequence[str], seeds: int = 1, flops: Sequence[float] = (0.5,), tasks: Sequence[str] = ("digits",)) -> Settings:
    return Settings(tuple(tasks), tuple(flops), tuple(rules), 0, seeds)


def result(run: Run, accuracy: float) -> dict[str, Any]:
    return {
        **asdict(run), "accuracy": accuracy, "loss": 1 - accuracy, "held_out": accuracy - 0.1, "held_out_loss": 1.1 - accuracy,
        "trained": ["a", "b"], "step_flops": 0.5, "seconds": 1.0, "choosing_seconds": 2.0,
    }  # fmt: skip


def of_tasks(wanted: Settings, value: Any) -> dict[str, Any]:
    return dict.fromkeys(wanted.tasks, value)


def search(wanted: Settings, accuracy: Accuracy, at_a_time: int = 1, results: list[dict[str, Any]] | None = None) -> list[Any]:
    """Everything that a search runs, a few at a time; fails if it does not come to an end."""
    found = [] if results is None else results
    for _ in range(500):
        runs = list(dict.fromkeys(missing(wanted, found, of_tasks(wanted, RATE), of_tasks(wanted, STEPS))))
        if not runs:
            return found
        found += [result(run, accuracy(run)) for run in runs[:at_a_time]]
    raise AssertionError("the search does not end")


def peaked(best: dict[str, float], peaks: dict[str, int] | None = None) -> Accuracy:
    """Of each rule its best accuracy, at a rate of 2 ** peak times the first; draws and seeds differ a little."""

    def accuracy(run: Run) -> float:
        away = abs(math.log2(run.rate / RATE) - (peaks or {}).get(run.rule, 0))
        return best[run.rule] - 0.02 * away + 0.001 * math.sin(7 * run.draw + 3 * run.seed)

    return accuracy


def runs_of(found: list[Any], rule: str, **fields: Any) -> list[Any]:
    return [r for r in found if r["rule"] == rule and all(r[name] == value for name, value in fields.items())]


@given(
    st.dictionaries(st.sampled_from(sorted(RULES)), st.tuples(st.floats(0.3, 0.9), st.integers(-5, 5)), min_size=1),
    st.integers(1, 4),
)
@settings(max_examples=40)
def test_every_rules_best_rate_ends_between_two_others(rules: dict[str, tuple[float, int]], seeds: int) -> None:
    accuracy = peaked({r: best for r, (best, _) in rules.items()}, {r: peak for r, (_, peak) in rules.items()})
    found = search(asked(list(rules), seeds), accuracy)
    for rule, (_, peak) in rules.items():
        tuned = runs_of(found, rule, seed=0, draw=0)
        rates = [r["rate"] for r in tuned]
        best = max(tuned, key=lambda r: r["accuracy"])["rate"]
        assert best == RATE * 2.0**peak
        assert min(rates) < best < max(rates)
        assert {best / 2, best * 2} <= set(rates)
        assert len(rates) == len(set(rates)) == abs(peak) + (2 if peak < 0 else 3)


@given(st.integers(1, 9), st.integers(1, 3))
@settings(max_examples=15)
def test_how_many_run_at_a_time_does_not_matter_and_nothing_runs_twice(at_a_time: int, seeds: int) -> None:
    wanted = asked(["ours", "random", "topmost", "full"], seeds, flops=(0.4, 0.5), tasks=("digits", "glosses"))
    accuracy = peaked({"ours": 0.8, "random": 0.795, "topmost": 0.6, "full": 0.81}, {"random": 2, "full": -1})

    def runs(found: list[Any]) -> Counter[Run]:
        return Counter(Run(**{name: r[name] for name in asdict(Run("", "", 0, 0, 0, 0))}) for r in found)

    found = runs(search(wanted, accuracy, at_a_time))
    assert found == runs(search(wanted, accuracy))
    assert max(found.values()) == 1


def test_the_first_rate_is_tried_first_then_half_of_it_then_twice() -> None:
    found = search(asked(["ours"]), peaked({"ours": 0.8}))
    assert [r["rate"] for r in found] == [RATE, RATE / 2, RATE * 2]
    assert {(r["task"], r["flops"], r["steps"], r["seed"], r["draw"]) for r in found} == {("digits", 0.5, STEPS, 0, 0)}


@pytest.mark.parametrize("accuracy", [lambda run: 0.5, lambda run: min(0.5, run.rate), lambda run: float(run.rate < RATE)])
def test_a_search_ends_where_rates_do_not_matter_or_more_does_not_help(accuracy: Accuracy) -> None:
    assert search(asked(["ours", "topmost"], 2), accuracy)


def test_of_random_sets_several_are_drawn_at_the_best_rate_and_the_best_counts() -> None:
    best_draw = {d: math.sin(7 * d) for d in range(DRAWS)}
    expected = max(best_draw, key=best_draw.__getitem__)
    wanted = asked(["random", "ours"], seeds=3)
    found = search(wanted, peaked({"random": 0.8, "ours": 0.8}, {"random": 1}))
    assert sorted(r["draw"] for r in runs_of(found, "random", seed=0, rate=2 * RATE)) == list(range(DRAWS))
    assert {r["draw"] for r in runs_of(found, "random") if r["rate"] != 2 * RATE} == {0}
    assert {(r["draw"], r["rate"]) for r in runs_of(found, "random") if r["seed"]} == {(expected, 2 * RATE)}
    assert {r["draw"] for r in runs_of(found, "ours")} == {0}
    row = compare(wanted, found, {"digits": RATE}, {"digits": STEPS})[0]
    three = [0.8 + 0.001 * math.sin(7 * expected + 3 * seed) for seed in range(3)]
    assert (row["rule"], row["seeds"], row["accuracy"]) == ("random", 3, pytest.approx(sum(three) / 3))


def test_rotations_are_not_drawn() -> None:
    assert {r["draw"] for r in search(asked(["rotation"]), peaked({"rotation": 0.8}))} == {0}


def test_further_seeds_are_run_of_ours_of_full_training_and_of_rules_near_the_best() -> None:
    best = {"ours": 0.5, "full": 0.4, "topmost": 0.9, "greentrainer": 0.9 - NEAR / 2, "attention first": 0.9 - 2 * NEAR}
    found = search(asked(list(best), seeds=4), peaked(best))
    seeds = {rule: sorted(r["seed"] for r in runs_of(found, rule) if r["rate"] == RATE) for rule in best}
    assert seeds == {rule: [0] if rule == "attention first" else [0, 1, 2, 3] for rule in best}
    assert {r["rate"] for r in found if r["seed"]} == {RATE}


def test_rates_that_one_seed_does_not_tell_apart_are_run_with_further_seeds_and_the_best_mean_counts() -> None:
    by_rate = {RATE: (0.8, 0.7, 0.7), RATE / 2: (0.799, 0.75, 0.76), 2 * RATE: (0.79, 0.9, 0.9)}
    wanted = asked(["ours"], seeds=3)
    found = search(wanted, lambda run: by_rate[run.rate][run.seed])
    assert {(r["rate"], r["seed"]) for r in found if r["seed"]} == {(rate, s) for rate in (RATE, RATE / 2) for s in (1, 2)}
    (row,) = compare(wanted, found, {"digits": RATE}, {"digits": STEPS})
    assert (row["rate"], row["seeds"], row["accuracy"]) == (RATE / 2, 3, pytest.approx((0.799 + 0.75 + 0.76) / 3))


def test_no_further_seed_is_run_before_every_rule_is_tuned() -> None:
    best = {"ours": 0.9, "topmost": 0.5}
    found: list[Any] = []
    search(asked(list(best), seeds=3), peaked(best, {"topmost": 4}), results=found)
    first = next(k for k, r in enumerate(found) if r["seed"])
    assert all(r["seed"] for r in found[first:])
    assert len(runs_of(found[:first], "topmost")) == 7


def test_full_training_is_run_once_for_all_fractions() -> None:
    wanted = asked(["full", "ours"], flops=(0.4, 0.6))
    found = search(wanted, peaked({"full": 0.9, "ours": 0.8}))
    assert [r["flops"] for r in runs_of(found, "full")] == [1.0] * 3
    rows = compare(wanted, found, {"digits": RATE}, {"digits": STEPS})
    assert [(row["flops"], row["rule"]) for row in rows] == [(0.4, "full"), (0.4, "ours"), (0.6, "full"), (0.6, "ours")]


def test_a_finished_search_asks_for_nothing_and_one_that_was_broken_off_goes_on_from_there() -> None:
    wanted = asked(["ours", "random"], seeds=2)
    accuracy = peaked({"ours": 0.8, "random": 0.79}, {"ours": 2})
    whole = search(wanted, accuracy)
    assert search(wanted, lambda run: pytest.fail(f"{run} is finished"), results=list(whole)) == whole
    for kept in range(len(whole)):
        assert search(wanted, accuracy, results=whole[:kept]) == whole


def test_more_seeds_and_more_rules_add_to_what_is_finished() -> None:
    accuracy = peaked({"ours": 0.8, "topmost": 0.5})
    before = search(asked(["ours"]), accuracy)
    after = search(asked(["ours", "topmost"], seeds=2), accuracy, results=list(before))
    assert after[: len(before)] == before
    assert [r["seed"] for r in runs_of(after[len(before) :], "ours")] == [1]
    assert len(runs_of(after, "topmost")) == 3


def test_runs_of_other_lengths_tasks_and_fractions_do_not_count() -> None:
    accuracy = peaked({"ours": 0.8})
    others = [result(run, 0.99) for run in (
        Run("digits", "ours", 0.5, 4 * RATE, STEPS + 1, 0), Run("glosses", "ours", 0.5, 4 * RATE, STEPS, 0),
        Run("digits", "ours", 0.6, 4 * RATE, STEPS, 0), Run("digits", "topmost", 0.5, 4 * RATE, STEPS, 0),
    )]  # fmt: skip
    wanted = asked(["ours"])
    found = search(wanted, accuracy, results=list(others))
    assert found[4:] == search(wanted, accuracy)
    (row,) = compare(wanted, found, {"digits": RATE}, {"digits": STEPS})
    assert row["accuracy"] == pytest.approx(0.8)


# The table.


def test_a_row_has_means_over_the_seeds_at_the_best_rate() -> None:
    wanted = asked(["ours", "topmost", "random"], seeds=3)
    runs = {(RATE, 0): 0.7, (RATE / 2, 0): 0.6, (2 * RATE, 0): 0.5, (RATE, 1): 0.8, (RATE, 2): 0.6}
    found = [result(Run("digits", "ours", 0.5, rate, STEPS, seed), accuracy) for (rate, seed), accuracy in runs.items()]
    found.append(result(Run("digits", "topmost", 0.5, RATE, STEPS, 0), 0.4))
    ours, topmost = compare(wanted, found, {"digits": RATE}, {"digits": STEPS})
    assert (ours["task"], ours["flops"], ours["rule"], ours["rate"], ours["seeds"]) == ("digits", 0.5, "ours", RATE, 3)
    means = {"accuracy": 0.7, "held_out": 0.6, "loss": 0.3, "held_out_loss": 0.4, "choosing_seconds": 2.0, "step_flops": 0.5}
    assert {name: ours[name] for name in means} == pytest.approx(means)
    assert ours["trained"] == 2
    assert ours["complete"]
    assert (topmost["seeds"], topmost["accuracy"], topmost["complete"]) == (1, 0.4, False)


def shown(rows: list[dict[str, Any]]) -> str:
    out = io.StringIO()
    show({"torch": "2", "device": "CPU", "runs": "runs.jsonl", "rows": rows}, Console(file=out, width=80))
    return out.getvalue()


def test_the_table_fits_a_terminal_with_the_best_rule_first_and_marks_what_is_not_tuned() -> None:
    wanted = asked(["topmost", "biases and norms first", "ours", "full"], seeds=2, flops=(0.4, 0.5), tasks=("digits", "glosses"))
    best = {"topmost": 0.6, "biases and norms first": 0.7, "ours": 0.9, "full": 0.8}
    found = search(wanted, peaked(best))
    found = [r for r in found if r["rule"] != "topmost" or r["rate"] == RATE]
    text = shown(compare(wanted, found, of_tasks(wanted, RATE), of_tasks(wanted, STEPS)))
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("of the FLOPs") == 4
    table = text[text.index("digits, 0.4") : text.index("digits, 0.5")]
    order = [table.index(rule) for rule in ("ours", "full", "biases and norms first", "topmost")]
    assert order == sorted(order)
    assert [line.count("*") for line in table.splitlines() if "topmost" in line] == [1]
    assert "*" not in next(line for line in table.splitlines() if "ours" in line)


def test_without_results_there_is_no_table() -> None:
    assert "of the FLOPs" not in shown([])


# Files and settings.


def test_what_does_not_exist_is_refused_by_name() -> None:
    asked([*RULES, "full"], tasks=("glosses", "parts_of_speech", "digits", "definitions")).check()
    known = r"glosses, parts_of_speech, digits, digits_resnet, definitions, smollm2\."
    with pytest.raises(InputError, match=f"unknown task cola, mnli: known are {known}"):
        asked(["ours"], tasks=("mnli", "digits", "cola")).check()
    with pytest.raises(InputError, match=r"unknown rule best: known are ours, .*full\."):
        asked(["ours", "best"]).check()


def test_finished_runs_are_read_back(tmp_path: Path) -> None:
    assert finished(tmp_path / "runs.jsonl") == []
    runs = [result(Run("digits", "ours", 0.5, RATE, STEPS, seed), 0.5) for seed in range(3)]
    (tmp_path / "runs.jsonl").write_text("".join(json.dumps(run) + "\n" for run in runs))
    assert finished(tmp_path / "runs.jsonl") == runs


@pytest.mark.parametrize("text", ["[]", "3", "null", '"x"', "{}", '{"task": "digits"}', "task,rule\n", "{", "\ufffd\x00"])
def test_a_file_that_holds_something_else_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "runs.jsonl").write_text(json.dumps(result(Run("digits", "ours", 0.5, RATE, STEPS, 0), 0.5)) + "\n" + text + "\n")
    with pytest.raises(InputError, match="holds no results of this benchmark"):
        finished(tmp_path / "runs.jsonl")


def test_what_another_rule_trained_alike_is_not_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    costs = BackwardCosts(("b", "a"), 1, ((1, 1), (2, 1)), (1, 1), saved_flops=1)
    task = SimpleNamespace(precision="highest", make_model=lambda seed: pytest.fail("trained again"))
    limit = SimpleNamespace(costs=costs, most=2, profile=SimpleNamespace(forward=1))
    monkeypatch.setattr(selection_run, "_limited", lambda name, folder, flops: (task, limit, {"a": (2,), "b": (2, 2)}))
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    earlier = {**result(Run("digits", "topmost", 0.7, RATE, STEPS, 0), 0.75), "trained": ["b"]}
    (tmp_path / "runs.jsonl").write_text(json.dumps(earlier) + "\n")
    wanted = Run("digits", "biases and norms first", 0.7, RATE, STEPS, 0)
    monkeypatch.setitem(RULES, "biases and norms first", lambda problem: [0])
    found = selection_run.train(wanted, tmp_path)
    assert Run(**{name: found[name] for name in asdict(wanted)}) == wanted
    assert {found[name] == earlier[name] for name in ("accuracy", "loss", "held_out", "held_out_loss")} == {True}
    assert found["step_flops"] == (1 + costs.cost([0])) / 4  # exact rewrites may have been added since
    others: list[dict[str, Any]] = [
        {"seed": 1},
        {"rate": RATE / 2},
        {"steps": STEPS + 1},
        {"task": "glosses"},
        {"rule": "rotation"},
    ]
    for other in others:
        with pytest.raises(pytest.fail.Exception, match="trained again"):
            selection_run.train(replace(wanted, **other), tmp_path)
    monkeypatch.setitem(RULES, "biases and norms first", lambda problem: [0, 1])
    with pytest.raises(pytest.fail.Exception, match="trained again"):
        selection_run.train(wanted, tmp_path)


class AtOnce:
    """Stands in for a pool of processes."""

    def __init__(self, jobs: int, mp_context: Any) -> None:
        assert jobs == 3

    def __enter__(self) -> AtOnce:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(function(*args))
        return future


def test_a_comparison_is_kept_run_by_run_and_another_sitting_adds_only_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[Run] = []
    accuracy = peaked({"ours": 0.8, "random": 0.78, "full": 0.9}, {"random": -2})

    def train(run: Run, folder: Path) -> dict[str, Any]:
        assert folder == tmp_path
        trained.append(run)
        return result(run, accuracy(run))

    monkeypatch.setattr(selection, "train", train)
    monkeypatch.setattr(selection, "load", lambda task, folder: SimpleNamespace(rate=RATE, steps=STEPS))
    monkeypatch.setattr(selection, "ProcessPoolExecutor", AtOnce)
    console = Console(file=io.StringIO())
    wanted = asked(["ours", "random", "full"], seeds=2, flops=(0.4, 0.5))
    first = selection.run(wanted, tmp_path, 3, console)
    assert len(trained) == len(set(trained)) == len(finished(tmp_path / "runs.jsonl"))
    assert [(row["flops"], row["rule"], row["seeds"]) for row in first["rows"]] == [
        (0.4, "ours", 2), (0.4, "random", 1), (0.4, "full", 2), (0.5, "ours", 2), (0.5, "random", 1), (0.5, "full", 2),
    ]  # fmt: skip
    assert all(row["complete"] for row in first["rows"])
    assert first["runs"] == str(tmp_path / "runs.jsonl")
    show(first, console)
    before = len(trained)
    assert selection.run(wanted, tmp_path, 3, console) == first
    assert len(trained) == before
    selection.run(Settings(wanted.tasks, (0.4,), ("ours",), STEPS + 5, 1), tmp_path, 3, console)
    assert {run.steps for run in trained[before:]} == {STEPS + 5}


class FirstRow(torch.nn.Module):
    """Classifies sequences by their first row."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
        self.head = torch.nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x)[:, 0])


def test_what_exact_rewrites_save_is_spent_by_every_rule() -> None:
    batch = {"x": torch.randn(4, 16, 8)}
    task = SimpleNamespace(make_model=lambda seed: FirstRow(), rate=RATE, train=batch, example=lambda: batch)
    flops = 0.4
    model = FirstRow()
    opt = graphopt.optimize(model, batch, flops, backend="aot_eager")  # without a loss: by place and size
    plain = graphopt.optimize(model, batch, flops, [graphopt.passes.GreenTrainer(rule="capacity")], "aot_eager")
    names = tuple(dict(model.named_parameters()))
    costs = BackwardCosts(names, 1, (((1 << len(names)) - 1, 1),), (1,) * len(names))
    chosen = selection_run.by_place(selection_run.Problem(task, costs, {}, flops, 0, 0, 0))
    assert {names[k] for k in chosen} == opt.selected > plain.selected

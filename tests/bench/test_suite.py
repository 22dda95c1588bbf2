"""The schedule and the tables of `graphopt bench suite`, driven by made-up runs; what ways do is in `test_suite_ways`."""

import io
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from graphopt.bench import suite
from graphopt.bench.glosses import rate_factor
from graphopt.bench.selection_tasks import evaluate
from graphopt.bench.suite import Settings, compare, missing
from graphopt.bench.suite_run import Run
from graphopt.bench.timing import this_device
from graphopt.errors import GraphoptError, InputError

RATES, STEPS = {"digits": 1e-3}, {"digits": 10}
SETTINGS = Settings(("digits",), ("auto",), 0, 2, 0.5, 1, "aot_eager")


def finished(run: Run, seconds: float = 90.0, accuracies: tuple[float, ...] = (0.5, 0.6, 0.7)) -> dict[str, Any]:
    """A run of two steps per accuracy, with 10 seconds of compiling."""
    curve = [
        {"step": 2 * i, "seconds": seconds * i / len(accuracies), "compile_seconds": 10.0, "accuracy": a, "loss": 1 - a}
        for i, a in enumerate(accuracies, 1)
    ]
    last = accuracies[-1]
    return {
        **asdict(run), "device": this_device()[0], "limit_seconds": None if run.way == "exact" else 45.0,
        "taken_steps": 2 * len(accuracies), "seconds": seconds, "compile_seconds": 10.0,
        "seconds_per_step": seconds / 2 / len(accuracies), "accuracy": last, "loss": 1 - last, "held_out": last - 0.1,
        "held_out_loss": 1.1 - last, "curve": curve, "peak_bytes": 10**8, "step_flops": 2e9,
    }  # fmt: skip


def run_of(way: str, rate: float = 1e-3, seed: int = 0) -> Run:
    return Run("digits", way, rate, seed, 10, 0.5, 1, "aot_eager")


def tuned(way: str, seconds: float = 90.0, accuracies: tuple[float, ...] = (0.5, 0.6, 0.7)) -> list[dict[str, Any]]:
    """Runs at three rates, of which the middle one is best."""
    worse = tuple(a - 0.1 for a in accuracies)
    return [
        finished(run_of(way), seconds, accuracies),
        finished(run_of(way, 5e-4), seconds, worse),
        finished(run_of(way, 2e-3), seconds, worse),
    ]


def row_of(seconds: float, accuracies: tuple[float, ...]) -> dict[str, Any]:
    return compare(SETTINGS, [*tuned("exact"), *tuned("auto", seconds, accuracies)], RATES, STEPS)[1]


def test_the_goal_is_reached_at_the_first_evaluation_that_is_as_accurate_as_exact_training_in_the_end() -> None:
    row = row_of(60.0, (0.6, 0.7, 0.65, 0.75))
    assert row["reached"] == pytest.approx(30 / 90)
    assert row["reached_with_compiling"] == pytest.approx(40 / 100)
    assert (row["rate"], row["seeds"], row["tuned"]) == (1e-3, 1, True)


def test_a_way_of_which_one_seed_stays_behind_never_reaches_the_goal() -> None:
    row = row_of(60.0, (0.6, 0.69))
    assert row["reached"] is row["reached_with_compiling"] is None


def test_every_way_is_tuned_and_then_run_with_every_seed_exact_training_first() -> None:
    results: list[dict[str, Any]] = []
    asked: list[tuple[str, float, int]] = []
    while (wanted := next(missing(SETTINGS, results, RATES, STEPS), None)) is not None:
        asked.append((wanted.way, wanted.rate, wanted.seed))
        results.append(finished(wanted, accuracies=(0.7 if wanted.rate == 2e-3 else 0.6,)))
    search = [(1e-3, 0), (5e-4, 0), (2e-3, 0), (4e-3, 0), (2e-3, 1)]
    assert asked == [(way, *run) for way in ("exact", "auto") for run in search]


def test_runs_on_another_kind_of_device_do_not_count() -> None:
    elsewhere = [{**run, "device": "elsewhere"} for run in tuned("exact")]
    first = next(missing(SETTINGS, elsewhere, RATES, STEPS))
    assert (first.way, first.rate) == ("exact", RATES["digits"])
    assert next(missing(SETTINGS, tuned("exact"), RATES, STEPS)) != first


def test_runs_of_another_time_do_not_count() -> None:
    """Of exact training on a slower machine, with a limit that was another therefore."""
    good = [{**run, "limit_seconds": 46.0} for run in tuned("auto")]
    longer = [{**run, "limit_seconds": 60.0, "accuracy": 0.9} for run in tuned("auto")]
    rows = compare(SETTINGS, [*tuned("exact"), *good, *longer], RATES, STEPS)
    assert [row["accuracy"] for row in rows] == [0.7, 0.7]
    first = next(run for run in missing(SETTINGS, [*tuned("exact"), *longer], RATES, STEPS) if run.way == "auto")
    assert (first.rate, first.seed) == (RATES["digits"], 0)


def test_the_table_and_the_picture_hold_all_ways(tmp_path: Path) -> None:
    rows = compare(SETTINGS, [*tuned("exact"), *tuned("auto", 48.0, (0.6, 0.8))], RATES, STEPS)
    assert [row["step_flops"] for row in rows] == [2e9, 2e9]
    suite.plot("digits", rows, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    out = io.StringIO()
    suite.show({"torch": "2", "rows": rows, "runs": "runs.jsonl"}, Console(file=out, width=80))
    text = out.getvalue()
    assert text.index("auto") < text.index("exact")  # the best first
    assert "80.0 | " in text
    assert "…" not in text  # it fits a terminal
    uncounted = [{k: v for k, v in run.items() if k != "step_flops"} for run in tuned("exact")]  # as they were kept before
    (row,) = compare(replace(SETTINGS, ways=("exact",)), uncounted, RATES, STEPS)
    assert row["step_flops"] is None
    suite.plot("digits", [row], tmp_path / "plot.png")


def test_the_learning_rate_rises_to_its_peak_and_falls_to_zero() -> None:
    steps = 600
    found = [rate_factor(i / steps, 1 / steps) for i in range(steps)]
    as_in_examples = [min((i + 1) / 60, (steps - i) / (steps - 60)) for i in range(steps)]
    assert found == pytest.approx(as_in_examples)


class Runs:
    """Stands in for processes; notes what was asked of them."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, float | None]] = []

    def __call__(self, run: Run, limit: float | None, folder: Path, keep_compiled: bool, on_step: Any) -> dict[str, Any]:
        self.asked.append((run.way, limit))
        on_step(1)
        return finished(run, 90.0 if run.way == "exact" else 60.0, (0.7 if run.rate == 1e-3 else 0.6,))


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    fake = Runs()
    monkeypatch.setattr(suite, "in_process", fake)
    task = type("Task", (), {"rate": 1e-3, "steps": 10})()
    monkeypatch.setattr(suite, "load", lambda name, folder: task)
    return fake


def compared(folder: Path, *ways: str) -> dict[str, Any]:
    settings = Settings(("digits",), ways, 0, 1, 0.5, 1, "aot_eager")
    return suite.run(settings, folder, Console(file=io.StringIO()))


def test_finished_runs_are_kept_and_the_rest_goes_on_from_there(tmp_path: Path, runs: Runs) -> None:
    compared(tmp_path, "exact")
    assert runs.asked == 3 * [("exact", None)]
    results = compared(tmp_path, "auto")
    assert runs.asked[3:] == 3 * [("auto", 45.0)]
    assert [row["way"] for row in results["rows"]] == ["exact", "auto"]
    compared(tmp_path, "auto")
    assert len(runs.asked) == 6


def test_a_run_that_fails_leaves_the_finished_ones(tmp_path: Path, runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    compared(tmp_path, "exact")
    before = (tmp_path / suite.RESULTS).read_text()

    def fail(*_: Any) -> None:
        raise GraphoptError("ended")

    monkeypatch.setattr(suite, "in_process", fail)
    with pytest.raises(GraphoptError, match="ended"):
        compared(tmp_path, "auto")
    assert (tmp_path / suite.RESULTS).read_text() == before


def test_what_is_unknown_or_something_else_is_refused(tmp_path: Path, runs: Runs) -> None:
    with pytest.raises(InputError, match="unknown way sgd"):
        compared(tmp_path, "sgd")
    (tmp_path / suite.RESULTS).write_text("[]\n")
    with pytest.raises(InputError, match="no results of this benchmark"):
        compared(tmp_path, "auto")


def test_a_process_that_ends_without_a_result_is_reported(tmp_path: Path, capfd: Any) -> None:
    with pytest.raises(GraphoptError, match="nonsense on nothing ended with exit code 1"):
        suite.in_process(Run("nothing", "nonsense", 1e-3, 0, 1, 1.0, 1, "aot_eager"), None, tmp_path, False, lambda done: None)
    assert "unknown task" in capfd.readouterr().err


class Echo(torch.nn.Module):
    """Finds label 1 wherever the first token is 1; in training mode, nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.device = torch.nn.Parameter(torch.zeros(()))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        hit = (input_ids[:, 0] == 1) & (not self.training)
        return type("Output", (), {"logits": torch.nn.functional.one_hot(hit.long(), 2).float(), "loss": hit.float().mean()})


def test_accuracy_counts_rows_over_batches_in_eval_mode_and_goes_back_to_training() -> None:
    ids = torch.arange(600).remainder(3)[:, None]
    model = Echo().train()
    found = evaluate(model, {"input_ids": ids, "labels": torch.ones(600, dtype=torch.long)})
    assert found == pytest.approx((1 / 3, 1 / 3))
    assert model.training

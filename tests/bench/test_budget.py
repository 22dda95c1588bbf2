import io
import json
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from rich.console import Console

from graphopt.bench import budget
from graphopt.bench.budget_run import Settings, peak_resident_bytes
from graphopt.bench.glosses import correct, rate_factor
from graphopt.errors import GraphoptError, InputError

SETTINGS = Settings(steps=4, most_steps=4, evaluate=2)


def finished(variant: str, seconds: float, accuracies: tuple[float, ...]) -> dict[str, Any]:
    """A run of two steps per accuracy, with 10 seconds of compiling."""
    curve = [
        {"step": 2 * i, "seconds": seconds * i / len(accuracies), "compile_seconds": 10.0, "accuracy": a}
        for i, a in enumerate(accuracies, 1)
    ]
    steps = 2 * len(accuracies)
    return {
        "variant": variant, "rate": 1e-3, "steps": steps, "seconds": seconds, "compile_seconds": 10.0,
        "seconds_per_step": seconds / steps, "accuracy": accuracies[-1], "curve": curve, "peak_bytes": 10**8,
        "peak_rss_bytes": 10**9,
    }  # fmt: skip


EXACT = finished("exact", 90.0, (0.5, 0.6, 0.7))


def row_of(variant: str, seconds: float, accuracies: tuple[float, ...]) -> dict[str, Any]:
    return budget.compare({"exact": EXACT, variant: finished(variant, seconds, accuracies)})[1]


def test_the_goal_is_reached_at_the_first_evaluation_that_is_as_accurate_as_exact_training_in_the_end() -> None:
    row = row_of("auto", 60.0, (0.6, 0.7, 0.65, 0.75))
    assert (row["reached_step"], row["reached_seconds"]) == (4, 30.0)
    assert row["reached_ratio"] == pytest.approx(30 / 90)
    assert row["reached_ratio_with_compiling"] == pytest.approx(40 / 100)
    assert row["step_ratio"] == pytest.approx(7.5 / 15)


def test_a_run_that_stays_behind_never_reaches_the_goal() -> None:
    row = row_of("auto", 60.0, (0.6, 0.69))
    assert row["reached_step"] is row["reached_ratio"] is row["reached_ratio_with_compiling"] is None


@pytest.mark.parametrize(
    ("seconds", "accuracies", "verdict"),
    [(48.0, (0.6, 0.7, 0.7, 0.7), "met"), (90.0, (0.6, 0.65, 0.7), "missed"), (60.0, (0.6, 0.69), "missed")],
)
def test_the_table_says_whether_the_aim_is_met(
    tmp_path: Path, seconds: float, accuracies: tuple[float, ...], verdict: str
) -> None:
    runs = {"exact": EXACT, "greentrainer": EXACT, "auto": finished("auto", seconds, accuracies)}
    budget.plot(runs, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    out = io.StringIO()
    results = {"settings": vars(SETTINGS), "torch": "2", "device": "CPU", "rows": budget.compare(runs), "plot": "plot.png"}
    budget.show(results, Console(file=out, width=80))
    text = out.getvalue()
    assert text.rstrip().splitlines()[-2].endswith(f"{verdict}.")
    assert "…" not in text  # it fits a terminal
    assert ("never" in text) == (max(accuracies) < 0.7)


def test_the_learning_rate_rises_to_its_peak_and_falls_to_zero() -> None:
    steps = 600
    found = [rate_factor(i / steps, 1 / steps) for i in range(steps)]
    as_in_examples = [min((i + 1) / 60, (steps - i) / (steps - 60)) for i in range(steps)]
    assert found == pytest.approx(as_in_examples)


class Runs:
    """Stands in for processes; notes what was asked of them."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, float, float | None]] = []

    def __call__(self, variant: str, settings: Settings, rate: float, limit: float | None, on_step: Any) -> dict[str, Any]:
        self.asked.append((variant, rate, limit))
        on_step(1)
        return EXACT if variant == "exact" else finished(variant, 60.0, (0.6, 0.7))


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    fake = Runs()
    monkeypatch.setattr(budget, "in_process", fake)
    return fake


def compared(folder: Path, *variants: str, settings: Settings = SETTINGS, **rates: float) -> dict[str, Any]:
    return budget.run(variants or None, settings, rates, folder, Console(file=io.StringIO()))


def test_finished_runs_are_kept_and_the_rest_goes_on_from_there(tmp_path: Path, runs: Runs) -> None:
    settings = Settings(steps=4, most_steps=4, time=0.5)
    compared(tmp_path, "exact", settings=settings)
    compared(tmp_path, "auto", settings=settings, auto=7e-4)
    assert runs.asked == [("exact", 3e-4, None), ("auto", 7e-4, 45.0)]
    results = compared(tmp_path, settings=settings)
    assert [variant for variant, _, _ in runs.asked[2:]] == ["greentrainer", "vcas", "lsp", "runlora"]
    assert [row["variant"] for row in results["rows"]] == ["exact", "greentrainer", "vcas", "lsp", "runlora", "auto"]
    assert list(json.loads((tmp_path / "results.json").read_text())["runs"]) == [row["variant"] for row in results["rows"]]


def test_a_new_exact_run_makes_the_others_void(tmp_path: Path, runs: Runs) -> None:
    compared(tmp_path, "exact", "auto")
    assert [row["variant"] for row in compared(tmp_path, "exact")["rows"]] == ["exact"]


def test_a_run_that_fails_leaves_the_finished_ones(tmp_path: Path, runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    compared(tmp_path, "exact")
    before = (tmp_path / "results.json").read_text()

    def fail(*_: Any) -> None:
        raise GraphoptError("ended")

    monkeypatch.setattr(budget, "in_process", fail)
    with pytest.raises(GraphoptError, match="ended"):
        compared(tmp_path)
    assert (tmp_path / "results.json").read_text() == before


def test_what_cannot_be_compared_is_refused(tmp_path: Path, runs: Runs) -> None:
    with pytest.raises(InputError, match="unknown variant galore"):
        compared(tmp_path, "galore")
    with pytest.raises(InputError, match="unknown variant sgd"):
        compared(tmp_path, "exact", sgd=1.0)
    with pytest.raises(InputError, match="no exact run"):
        compared(tmp_path, "auto")
    compared(tmp_path, "exact")
    with pytest.raises(InputError, match="other settings"):
        compared(tmp_path, "auto", settings=Settings(steps=5))
    (tmp_path / "results.json").write_text("[]")
    with pytest.raises(InputError, match="no results of this benchmark"):
        compared(tmp_path, "auto")


def test_learning_rates_are_read_from_text() -> None:
    assert budget.parse_rates("auto=5e-4,lsp=0.001") == {"auto": 5e-4, "lsp": 1e-3}
    assert budget.parse_rates("") == {}
    with pytest.raises(InputError, match="VARIANT=RATE"):
        budget.parse_rates("auto")


def test_a_process_that_ends_without_a_result_is_reported(monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    with pytest.raises(GraphoptError, match="nonsense ended with exit code 1"):
        budget.in_process("nonsense", SETTINGS, 1e-3, None, lambda done: None)
    assert "KeyError" in capfd.readouterr().err


class Echo(torch.nn.Module):
    """Finds label 1 wherever the first token is 1; in training mode, nowhere."""

    def forward(self, input_ids: torch.Tensor) -> Any:
        hit = (input_ids[:, 0] == 1) & (not self.training)
        return type("Output", (), {"logits": torch.nn.functional.one_hot(hit.long(), 2).float()})


def test_accuracy_counts_rows_over_batches_in_eval_mode_and_goes_back_to_training() -> None:
    ids = torch.arange(600).remainder(3)[:, None]
    model = Echo().train()
    found = correct(model, {"input_ids": ids, "labels": torch.ones(600, dtype=torch.long)}, "cpu")
    assert found.tolist() == (ids[:, 0] == 1).double().tolist()
    assert model.training


def test_the_peak_of_a_process_remembers_what_was_freed() -> None:
    held = bytearray(b"1") * 64_000_000
    assert len(held) == 64_000_000
    del held
    assert peak_resident_bytes() > psutil.Process().memory_info().rss + 50_000_000

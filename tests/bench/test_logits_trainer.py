"""SmolLM2 in the Trainer, beside torch.compile; the measuring is tried on a tiny model."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from rich.console import Console

from graphopt.bench import logits_trainer
from graphopt.bench.batches import run as predict_batches
from graphopt.bench.smollm2 import smollm2_folder
from graphopt.errors import InputError
from tests.integrations.trainer_runs import llama


def test_weights_that_are_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"come with a package: make llm"):
        smollm2_folder()


@pytest.mark.long
@pytest.mark.parametrize("memory", [None, 0.78])
def test_both_sides_train_alike(monkeypatch: pytest.MonkeyPatch, memory: float | None) -> None:
    def packed(samples: int, length: int, labelled: float) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, 50, (samples, length), generator=torch.Generator().manual_seed(0))
        return {"input_ids": ids, "labels": ids.clone()}

    monkeypatch.setattr(logits_trainer, "_model", lambda lora: llama())
    monkeypatch.setattr(logits_trainer, "packed", packed)
    compiled, ours = logits_trainer.run(32, 2, 1.0, False, memory, 5, Console(quiet=True))["rows"]
    assert ours["losses"] == pytest.approx(compiled["losses"], rel=1e-4)
    assert min(compiled["peak"], ours["peak"], compiled["cpu_seconds"], ours["cpu_seconds"]) > 0
    assert compiled["peak_ratio"] == compiled["time_ratio"] == 1.0
    assert ours["peak_ratio"] <= memory if memory else ours["peak_ratio"] > 0.8  # so that the limit takes effect


def test_the_largest_batches_of_a_shape_with_few_layers() -> None:
    before, after = predict_batches(["qwen3*"], 4096, "aot_eager", 1, Console(quiet=True))["rows"]
    assert after["one_sample_bytes"] < 0.5 * before["one_sample_bytes"]
    for capacity, largest in before["largest"].items():
        assert 0 < largest < after["largest"][capacity]


def test_few_tokens_of_half_precision_are_left_whole() -> None:
    """The weight's gradient is added up in single precision, which would take more than the logits."""
    before, after = predict_batches(["qwen3*"], 256, "aot_eager", 1, Console(quiet=True))["rows"]
    assert after["one_sample_bytes"] <= before["one_sample_bytes"]

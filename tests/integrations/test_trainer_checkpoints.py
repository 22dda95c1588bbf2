"""The plan in the Trainer's checkpoints: written, resumed to the bit, and never in the way of training."""

from __future__ import annotations

import errno
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers
from graphopt.passes import Vcas
from transformers.trainer_utils import HPSearchBackend

import graphopt
from graphopt.integrations.trainer import STATE_FILE
from graphopt.runtime import state_file
from tests.forked import ended
from tests.integrations.trainer_runs import (
    RUNS,
    callback,
    classifier,
    history,
    killed,
    points,
    same,
    trainer,
)
from tests.long_forms import long
from tests.rules import MEASURED


def test_whoever_saves_in_the_trainer_saves_the_plan(tmp_path: Path) -> None:
    """With `save_on_each_node` that is a process of every node."""
    ours, saved = callback(), []
    ours._steps = SimpleNamespace(opt=SimpleNamespace(save_state=lambda path, optimizer: saved.append(path)))
    (tmp_path / "checkpoint-1").mkdir()
    for should_save in (False, True):
        assert not saved
        args = SimpleNamespace(output_dir=tmp_path, should_save=should_save)
        ours.on_save(args, SimpleNamespace(global_step=1, is_world_process_zero=not should_save), None)
    assert saved == [tmp_path / "checkpoint-1" / STATE_FILE]


@pytest.mark.parametrize(("name", "batches"), [("causal", 21), *long(("linear", 12), ("minilm", 12))])
def test_a_run_that_is_killed_and_resumed_ends_with_the_same_weights(name: str, batches: int, tmp_path: Path) -> None:
    whole = RUNS[name](tmp_path / "whole", [callback(0.7, passes=MEASURED)])
    whole.train()
    folder = tmp_path / "killed"
    assert ended(killed, name, folder) == -signal.SIGKILL
    assert sorted(path.parent.name for path in folder.glob(f"*/{STATE_FILE}")) == ["checkpoint-3", "checkpoint-6"]
    ours = callback(0.7, passes=MEASURED)
    resumed = RUNS[name](folder, [ours])
    resumed.train(resume_from_checkpoint=True)
    assert whole.state.global_step == resumed.state.global_step == 12
    assert same(whole.model, resumed.model)
    assert history(whole, "graphopt/trained_tensors")[:12] == history(resumed, "graphopt/trained_tensors")[:12]
    assert len(history(whole, "loss")) == 12
    for key in ("loss", "eval_loss"):
        assert history(whole, key) == history(resumed, key)
    saved = [history(run, "graphopt/flops_saved")[-1] for run in (whole, resumed)]
    assert saved[1] == pytest.approx(saved[0] - 1 / batches)  # tensors were rated once more


def test_sampling_is_resumed_to_the_bit(tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 5, "per_device_train_batch_size": 16, "num_train_epochs": 3}

    def made(folder: Path) -> transformers.Trainer:
        ours = callback(graphopt.Budget(variance=2.0), passes=[Vcas(every=4, alpha=0.4, beta=0.8)])
        return trainer(classifier(width=32), points(64), folder, [ours], **options)

    whole = made(tmp_path)
    whole.train()
    resumed = made(tmp_path)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert same(whole.model, resumed.model)
    assert history(whole, "graphopt/keep_rows") == history(resumed, "graphopt/keep_rows")
    assert min(history(whole, "graphopt/keep_rows")) < 1
    assert history(whole, "graphopt/flops_saved") == history(resumed, "graphopt/flops_saved")


def test_a_plan_is_resumed_from_wherever_the_checkpoint_lies(tmp_path: Path, warnings: list[str]) -> None:
    options = {"save_strategy": "steps", "save_steps": 3, "num_train_epochs": 1}
    whole = trainer(classifier(), points(), tmp_path / "whole", [callback(0.7)], **options)
    whole.train()
    elsewhere = (tmp_path / "whole" / "checkpoint-3").rename(tmp_path / "kept")
    resumed = trainer(classifier(), points(), tmp_path / "resumed", [callback(0.7)], **options)
    resumed.train(resume_from_checkpoint=str(elsewhere))
    assert same(whole.model, resumed.model)
    assert not warnings


def test_every_trial_of_a_search_has_its_plan(tmp_path: Path, warnings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As `hyperparameter_search` runs them under optuna, each with a model and a folder of its own."""
    monkeypatch.setattr("transformers.integrations.hp_params", lambda trial: trial.params)
    run = trainer(classifier(), points(), tmp_path, [callback(0.7)], save_strategy="steps", save_steps=2, max_steps=2)
    run.model_init = lambda: classifier()
    run.hp_search_backend, run.hp_name = HPSearchBackend.OPTUNA, None
    run.hp_space = lambda trial: {"learning_rate": 0.01 * (1 + trial.number)}
    for number in range(2):
        run.train(trial=SimpleNamespace(number=number, params={}))
    assert sorted(path.relative_to(tmp_path).parts[0] for path in tmp_path.rglob(STATE_FILE)) == ["run-0", "run-1"]
    run.hp_search_backend = None
    run.train()
    assert (tmp_path / "checkpoint-2" / STATE_FILE).exists()
    assert not warnings


@pytest.mark.parametrize("lost", [False, True])
def test_without_a_plan_in_the_checkpoint_a_new_one_is_made(tmp_path: Path, warnings: list[str], lost: bool) -> None:
    options = {"save_strategy": "steps", "save_steps": 3, "num_train_epochs": 1}
    trainer(classifier(), points(), tmp_path, [callback(0.7)], **options).train()
    path = tmp_path / "checkpoint-3" / STATE_FILE
    path.unlink() if lost else path.write_bytes(path.read_bytes()[:-9])
    run = trainer(classifier(), points(), tmp_path, [callback(0.7)], **options)
    run.train(resume_from_checkpoint=str(path.parent))
    assert run.state.global_step == 4
    assert run.state.log_history[-1]["graphopt/trained_tensors"] < 8
    assert len(warnings) == 1
    assert "not resumed" in warnings[0]


def test_a_full_disk_costs_the_plan_of_a_checkpoint_alone(tmp_path: Path, monkeypatch: Any, warnings: list[str]) -> None:
    def full(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(state_file.os, "fsync", full)
    run = trainer(classifier(), points(), tmp_path, [callback(0.7)], save_strategy="steps", save_steps=2)
    run.train()
    assert run.state.global_step == 8
    assert (tmp_path / "checkpoint-8" / "model.safetensors").exists()
    assert not list(tmp_path.rglob("*graphopt*"))
    assert len(warnings) == 1
    assert "No space left" in warnings[0]

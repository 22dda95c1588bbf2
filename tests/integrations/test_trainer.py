"""Training through transformers' Trainer and an accelerate loop: the same as without, but for what the budget cuts."""

from __future__ import annotations

import copy
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from graphopt.passes import GreenTrainer, Lsp, Vcas
from torch import nn

import graphopt
from graphopt.errors import InputError, PassError
from graphopt.frontend import backend as frontend_backend
from graphopt.frontend.running import Running
from graphopt.integrations.trainer import bucketed
from tests.integrations.trainer_runs import (
    bert,
    callback,
    classifier,
    history,
    llama,
    points,
    same,
    sentences,
    tokenizer,
    trainer,
    weights,
)
from tests.rules import MEASURED


def test_without_passes_every_weight_is_the_plain_trainers_to_the_bit(tmp_path: Path) -> None:
    """Accumulation, clipping, a schedule, dropout, evaluation, a smaller last batch, a column that the model does not take, and
    sequences of any length, padded to two.
    """
    options = {
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.1,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "data_collator": bucketed(transformers.DataCollatorWithPadding(tokenizer()), (8, 16)),
    }
    rows = [*sentences(6, length=7), *sentences(7, length=6), *sentences(1, length=11)]
    plain = trainer(bert(), rows, tmp_path, **options)
    plain.train()
    ours = trainer(bert(), rows, tmp_path, [callback(passes=[])], **options)  # products of other shapes round otherwise
    ours.train()
    assert same(plain.model, ours.model)
    for key in ("loss", "grad_norm", "learning_rate", "eval_loss"):
        assert history(plain, key) == history(ours, key)
    assert history(ours, "graphopt/compilations")[-1] <= 4  # sizes and lengths become symbols
    assert history(ours, "graphopt/original_steps")[-1] == 0
    assert "forward" not in vars(ours.model)


def test_counts_of_tokens_and_mixed_precision_and_checkpointing_need_one_capture(tmp_path: Path) -> None:
    """The Trainer hands a causal model the number of labels that count, another one with every step."""
    options = {
        "bf16": True,
        "gradient_accumulation_steps": 2,
        "activation_checkpointing": True,
        "activation_checkpointing_kwargs": {"use_reentrant": False},
    }
    rows = sentences(14, causal=True)
    plain = trainer(llama(), rows, tmp_path, **options)
    plain.train()
    ours = trainer(llama(), rows, tmp_path, [callback()], **options)
    ours.train()
    assert same(plain.model, ours.model)
    assert history(ours, "graphopt/captures")[-1] == 1
    assert history(ours, "graphopt/original_steps")[-1] == 0


class Report(transformers.TrainerCallback):
    """Stands for TensorBoard's."""

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logs.append(dict(logs))


@pytest.mark.parametrize(("passes", "measurements"), [("auto", 1), ([GreenTrainer(rule="greentrainer")], 3)])
def test_a_flops_budget_selects_anew_every_epoch_and_logs_what_it_saves(
    tmp_path: Path, monkeypatch: Any, passes: Any, measurements: int
) -> None:
    selections: list[int] = []
    reselect = graphopt.OptimizedModule.reselect

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        selections.append(run.state.global_step)
        return reselect(self, *args, **kwargs)

    monkeypatch.setattr(graphopt.OptimizedModule, "reselect", counted)
    report, ours, model = Report(), callback(graphopt.Budget(flops=0.7), passes=passes), classifier()
    before = weights(model)
    run = trainer(model, points(), tmp_path, [report, ours], num_train_epochs=3)
    result = run.train()
    assert selections == [4, 8]  # epochs of 4 steps; after the last there is nothing to select for
    assert all(log["graphopt/flops_ratio"] <= 0.7 for log in report.logs)
    assert all(0 < log["graphopt/trained_tensors"] < 8 for log in report.logs)
    assert all(type(value) is float for log in report.logs for key, value in log.items() if key.startswith("graphopt/"))
    saved = result.metrics["graphopt/flops_saved"]
    assert saved == pytest.approx(1 - (sum(history(run, "graphopt/flops_ratio")[:12]) + measurements) / 12)
    assert ours.opt is not None
    assert ours.opt.report.flops_ratio <= 0.7
    moved = {name for name, value in weights(model).items() if not torch.equal(value, before[name])}
    assert ours.opt.selected <= moved < set(before)


def test_sampling_ratios_adapt(tmp_path: Path) -> None:
    ours = callback(graphopt.Budget(variance=2.0), passes=[Vcas(every=8, alpha=0.4, beta=0.8)])
    run = trainer(
        classifier(width=32, dropout=0.0), points(64), tmp_path, [ours], per_device_train_batch_size=16, num_train_epochs=6
    )
    run.train()
    assert ours.opt is not None
    assert ours.opt.controller is not None
    assert len(ours.opt.controller.history) == 3
    assert min(history(run, "graphopt/keep_rows")) < 1
    assert min(history(run, "graphopt/flops_ratio")) < 1


def test_a_trainer_can_train_again_and_make_its_models(tmp_path: Path) -> None:
    plain = trainer(None, points(), tmp_path, model_init=lambda: classifier())
    ours = trainer(None, points(), tmp_path, [callback()], model_init=lambda: classifier())
    for _ in range(2):
        plain.train()
        ours.train()  # its model_init sets the seed
        assert same(plain.model, ours.model)
        assert history(ours, "graphopt/original_steps")[-1] == 0
        assert "forward" not in vars(ours.model)


def test_after_an_exception_the_model_works_and_can_be_had_back(tmp_path: Path) -> None:
    class Interrupted(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            raise KeyboardInterrupt

    model, ours = classifier(), callback(0.7)
    run = trainer(model, points(), tmp_path, [ours, Interrupted()])
    with pytest.raises(KeyboardInterrupt):
        run.train()
    batch = {"x": torch.randn(3, 5), "labels": torch.arange(3)}
    reference = copy.deepcopy(model)  # of a diverted model: plain
    reference(**batch)["loss"].backward()
    assert all(p.grad is not None for p in reference.parameters())
    model.eval(), reference.eval()
    assert torch.equal(model(**batch)["loss"], reference(**batch)["loss"])
    ours.detach()
    assert "forward" not in vars(model)
    run.pop_callback(Interrupted)
    run.train()
    assert run.state.global_step == 8


def test_hooks_of_the_model_run_once(tmp_path: Path) -> None:
    calls: list[bool] = []
    model = classifier()
    model.register_forward_pre_hook(lambda module, args: calls.append(module.training))
    trainer(model, points(8), tmp_path, [callback()], num_train_epochs=1).train()
    assert calls == [True, True]


def test_where_nothing_can_be_compiled_training_is_the_plain_trainers(
    tmp_path: Path, monkeypatch: Any, warnings: list[str]
) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("no compiler")

    plain = trainer(classifier(), points(), tmp_path)
    plain.train()
    for name in ("compile_joint", "compile_plainly"):
        monkeypatch.setattr(frontend_backend, name, fails)
    ours = trainer(classifier(), points(), tmp_path, [callback()])
    ours.train()
    assert same(plain.model, ours.model)
    assert ["no compiler" in text for text in warnings] == [True, True]  # under the plan, and as torch.compile has it


def test_a_shape_that_fails_is_left_to_torch_compile(tmp_path: Path, monkeypatch: Any, warnings: list[str]) -> None:
    compile_joint, calls = frontend_backend.compile_joint, []

    def fails_for_the_second(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise RuntimeError("another size")
        return compile_joint(*args)

    monkeypatch.setattr(frontend_backend, "compile_joint", fails_for_the_second)
    plain = trainer(classifier(), points(), tmp_path)
    plain.train()
    ours = trainer(classifier(), points(), tmp_path, [callback()])
    ours.train()
    assert same(plain.model, ours.model)
    assert ["another size" in text for text in warnings] == [True]


def test_a_step_that_runs_out_of_memory_is_computed_as_the_model_is(
    tmp_path: Path, monkeypatch: Any, warnings: list[str]
) -> None:
    def fails(*_: Any) -> Any:
        raise torch.OutOfMemoryError("16 GiB")

    monkeypatch.setattr(Running, "__call__", fails)
    run = trainer(classifier(), points(8), tmp_path, [callback()], num_train_epochs=1)
    run.train()
    assert history(run, "graphopt/original_steps")[-1] == 2
    assert len(warnings) == 1
    assert "16 GiB" in warnings[0]


@pytest.mark.parametrize("step", [0, 2])
def test_a_nan_batch_costs_one_step(tmp_path: Path, warnings: list[str], step: int) -> None:
    """With the first one, no tensor can be rated either."""
    rows = points()
    model, ours = classifier(), callback(0.7, passes=MEASURED, reselect_every=3)
    rows[4 * step]["x"] = torch.full((5,), torch.nan)
    run = trainer(model, rows, tmp_path, [ours], train_sampling_strategy="sequential", num_train_epochs=1)
    run.train()
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert history(run, "graphopt/skipped_steps")[-1] == 1
    assert history(run, "graphopt/original_steps")[-1] == (1 if step == 0 else 0)
    assert history(run, "graphopt/trained_tensors")[-1] < 8
    assert any("NaN" in text for text in warnings)


def test_a_loss_of_the_models_own_that_nobody_differentiates_costs_no_step(tmp_path: Path) -> None:
    rows, before = points(), weights(classifier())
    for row in rows:
        row["labels"].fill_(-100)  # of which the mean is NaN
    ours = callback()
    run = trainer(classifier(), rows, tmp_path, [ours], num_train_epochs=1)
    run.compute_loss = lambda model, inputs, **_: model(**inputs)["logits"].square().mean()
    run.train()
    assert history(run, "graphopt/skipped_steps")[-1] == 0
    assert not any(torch.equal(value, before[name]) for name, value in weights(run.model).items())


def test_what_cannot_be_asked_for_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    with pytest.raises(PassError, match="make_optimizer"):
        callback(passes=["lsp"])
    with pytest.raises(InputError, match="at least 1 optimizer step"):
        callback(reselect_every=0)
    with pytest.raises(InputError, match="torch_compile"):
        trainer(classifier(), points(), tmp_path, [callback()], torch_compile=True)
    with pytest.raises(graphopt.BudgetError, match="Smallest feasible"):
        trainer(classifier(), points(), tmp_path, [callback(0.01)]).train()
    batch = {"x": torch.randn(4, 5), "labels": torch.arange(4) % 3}
    other = graphopt.optimize(classifier(), batch, backend="aot_eager")
    with pytest.raises(InputError, match="another model"):
        trainer(classifier(), points(), tmp_path, [callback(other)])


def test_compressed_gradients_with_an_optimizer_of_their_own(tmp_path: Path) -> None:
    model = classifier(width=32, dropout=0.0)
    batch = {"x": torch.randn(4, 5), "labels": torch.arange(4) % 3}
    opt = graphopt.optimize(model, batch, passes=[Lsp(subspace=8, nonzeros=2, criterion="flops")], backend="aot_eager")
    optimizer = opt.make_optimizer(torch.optim.AdamW, lr=1e-2)
    with pytest.raises(InputError, match="max_grad_norm=0"):
        trainer(model, points(), tmp_path, [callback(opt)], optimizers=(optimizer, None)).train()
    run = trainer(
        model, points(32), tmp_path, [callback(opt)], optimizers=(optimizer, None), max_grad_norm=0.0, num_train_epochs=8
    )
    run.train()
    losses = history(run, "loss")
    assert sum(losses[-8:]) < 0.7 * sum(losses[:8])
    assert history(run, "graphopt/original_steps")[-1] == 0


def test_an_accelerate_loop_trains_as_without(tmp_path: Path) -> None:
    """Mixed precision, accumulation and clipping, as the README writes it."""

    def trained(budget: float | None, ours: bool) -> tuple[nn.Module, Any, Any]:
        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
        model = classifier(dropout=0.0)  # of which eager's backward in bfloat16 rounds in another order
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        rows = torch.utils.data.DataLoader(points(), batch_size=4)
        step: nn.Module = model
        if ours:
            with accelerator.autocast():
                step = graphopt.optimize(model, next(iter(rows)), budget, backend="aot_eager", optimizer=optimizer)
        step, optimizer, rows = accelerator.prepare(step, optimizer, rows)
        controller = graphopt.SelectionController(step, optimizer, every=len(rows)) if ours else None
        torch.manual_seed(0)
        for _ in range(2):
            for batch in rows:
                with accelerator.accumulate(step):
                    accelerator.backward(step(**batch)["loss"])
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(step.parameters(), 0.5)
                    optimizer.step()
                    optimizer.zero_grad()
                if controller is not None:
                    with accelerator.autocast():
                        controller.after_step(batch)
        return model, step, controller

    plain, _, _ = trained(None, ours=False)
    exact, opt, _ = trained(None, ours=True)
    assert same(plain, exact)
    assert opt.counters.captures == 1
    _, opt, controller = trained(0.7, ours=True)
    assert opt.counters.captures == 2  # what it selects anew on has another size
    assert len(controller.history) == 2
    assert not any(math.isnan(outcome.gain) for outcome in controller.history)  # it could rate by the wrapped optimizer
    assert opt.report.flops_ratio <= 0.7


def test_a_gradient_scaler_skips_the_steps_that_it_skips_without() -> None:
    """Half precision, whose first scales overflow."""

    def trained(budget: float | None, ours: bool) -> tuple[nn.Module, list[float]]:
        model = classifier(dropout=0.0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=4)
        step: nn.Module = model
        scales = []
        for batch in torch.utils.data.DataLoader(points(48), batch_size=4):
            with torch.autocast("cpu", torch.float16):
                if ours and not scales:
                    step = graphopt.optimize(model, batch, budget, backend="aot_eager", optimizer=optimizer)
                loss = step(**batch)["loss"]
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
        return model, scales

    plain, scales = trained(None, ours=False)
    assert scales[0] < 2.0**20
    assert sum(after >= before for before, after in pairwise(scales)) >= 4
    exact, again = trained(None, ours=True)
    assert scales == again
    assert same(plain, exact)
    assert all(torch.isfinite(p).all() for p in trained(0.7, ours=True)[0].parameters())


def test_a_budget_that_needs_no_selection_costs_none(tmp_path: Path) -> None:
    run = trainer(classifier(), points(), tmp_path, [callback(1.0)], num_train_epochs=3)
    run.train()
    assert history(run, "graphopt/flops_saved")[-1] == 0.0

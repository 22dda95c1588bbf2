"""`graphopt bench logits --trainer`: SmolLM2-135M with its weights on real text, in the Trainer of transformers.

One Trainer compiles its model with `torch_compile=True`, the other has a `TrainerCallback`. Neither the model nor the Trainer is
changed. One trains after the other: accelerate keeps one state per process, so that two Trainers cannot take turns step by step.
So CPU seconds (of all threads of the process) are reported beside seconds: other work on the machine disturbs them less.

With `memory` the second Trainer's steps are limited to a part of the bytes that the first one's allocate. Only passes that keep
every gradient may serve the limit, so that both train alike.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn

import graphopt
from graphopt.bench.logits import described, with_adapters
from graphopt.bench.peak import PeakBytes
from graphopt.bench.smollm2 import packed, pretrained_smollm2
from graphopt.bench.steps import COMPILED, number, show_rows
from graphopt.bench.timing import now, this_device
from graphopt.compat.inductor import fresh_compiler_cache

WARMUP = 3
"""Steps of each Trainer that do not count: the first compile, and the next may compile what the optimizer changed."""

SIDES = (COMPILED, "graphopt")

EXACT = ("dead_rows", "linear_cross_entropy", "runlora", "recompute")
"""Passes that keep every gradient."""


class Measured(transformers.TrainerCallback):
    """Measures forward and backward of a Trainer's steps, and in the last one their memory."""

    def __init__(self, device: str, progress: Callable[[], object]) -> None:
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []
        self.losses: list[float] = []
        self.peak_bytes = 0
        self._device, self._progress = device, progress
        self._peak: PeakBytes | None = None
        self._start = self._cpu_start = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin to measure."""
        if state.global_step == state.max_steps - 1:
            self._peak = PeakBytes(self._device).begin()
        self._start, self._cpu_start = now(self._device), time.process_time()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Forward and backward have ended."""
        seconds, cpu_seconds = now(self._device) - self._start, time.process_time() - self._cpu_start
        if self._peak is not None:
            self.peak_bytes = self._peak.end()
            self._peak = None
        elif state.global_step >= WARMUP:
            self.seconds.append(seconds)
            self.cpu_seconds.append(cpu_seconds)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Tell it."""
        self._progress()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Note the loss."""
        if logs is not None and "loss" in logs:
            self.losses.append(float(logs["loss"]))


def run(
    tokens: int, samples: int, labelled: float, lora: bool, memory: float | None, repeats: int, console: Console
) -> dict[str, Any]:
    """Measure both sides.

    Args:
        tokens, samples, labelled, lora, repeats, console: as for `graphopt.bench.logits.run`.
        memory: the most that a step of the second Trainer may allocate, as a part of the first one's bytes; None: no limit.
    """
    device, name = this_device()
    steps = WARMUP + repeats + 1
    columns = packed(samples * steps, tokens // samples, labelled)
    with Progress(console=console) as bar, tempfile.TemporaryDirectory() as folder:
        task = bar.add_task("training", total=len(SIDES) * steps)
        measured = {side: Measured(device, lambda: bar.advance(task)) for side in SIDES}
        for side in SIDES:
            model = _model(lora)
            callbacks: list[transformers.TrainerCallback] = [measured[side]]
            if side == "graphopt":
                callbacks.append(_ours(model, None if memory is None else int(memory * measured[COMPILED].peak_bytes)))
            with fresh_compiler_cache():
                _trainer(side, model, columns, samples, steps, folder, callbacks).train()
    rows = [_row(side, found, measured[COMPILED]) for side, found in measured.items()]
    settings = {"tokens": tokens, "samples": samples, "labelled": labelled, "lora": lora, "memory": memory, "repeats": repeats}
    return {"torch": torch.__version__, "device": name, **settings, "rows": rows}


def _model(lora: bool) -> nn.Module:
    return with_adapters(pretrained_smollm2()) if lora else pretrained_smollm2()


def _ours(model: nn.Module, step_bytes: int | None) -> graphopt.TrainerCallback:
    if step_bytes is None:
        return graphopt.TrainerCallback()
    weights = sum(parameter.nbytes for parameter in model.parameters())
    states = sum(2 * parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    return graphopt.TrainerCallback(graphopt.Budget(memory=weights + states + step_bytes), passes=EXACT)


def _trainer(
    side: str, model: nn.Module, columns: dict[str, Tensor], samples: int, steps: int, folder: str,
    callbacks: list[transformers.TrainerCallback],
) -> transformers.Trainer:  # fmt: skip
    arguments = transformers.TrainingArguments(
        folder, per_device_train_batch_size=samples, max_steps=steps, learning_rate=1e-5, lr_scheduler_type="constant",
        logging_steps=1, report_to=[], save_strategy="no", disable_tqdm=True, seed=0, torch_compile=side == COMPILED,
        dataloader_pin_memory=False,
    )  # fmt: skip
    rows = [{key: column[row] for key, column in columns.items()} for row in range(len(columns["labels"]))]
    trainer = transformers.Trainer(model, arguments, train_dataset=rows, callbacks=callbacks)
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def _row(side: str, measured: Measured, compiled: Measured) -> dict[str, Any]:
    seconds, cpu_seconds = statistics.median(measured.seconds), statistics.median(measured.cpu_seconds)
    return {
        "model": "SmolLM2-135M",
        "variant": side,
        "peak": measured.peak_bytes,
        "peak_ratio": measured.peak_bytes / compiled.peak_bytes,
        "seconds": seconds,
        "time_ratio": seconds / statistics.median(compiled.seconds),
        "cpu_seconds": cpu_seconds,
        "cpu_time_ratio": cpu_seconds / statistics.median(compiled.cpu_seconds),
        "losses": measured.losses,
    }


def show(results: dict[str, Any], console: Console) -> None:
    """Print the table."""
    limit = "" if results["memory"] is None else f", limited to {results['memory']:.0%} of torch.compile's bytes"
    columns = {
        "CPU s": number("cpu_seconds", ".2f"),
        "CPU time": number("cpu_time_ratio", ".2f"),
        "first loss": lambda row: f"{row['losses'][0]:.5f}",
        "last": lambda row: f"{row['losses'][-1]:.5f}",
    }
    show_rows(results, f"in the Trainer, real text, {described(results)}{limit}", columns, console)

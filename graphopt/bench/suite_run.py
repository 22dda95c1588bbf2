"""One run of `graphopt bench suite`: a task fine-tuned one way, with its clock and its memory.

The clock of training stands still while something compiles and while the model is evaluated; what a technique does besides its
steps (rating tensors, calibrating a sampler, fitting projectors) counts. What the benchmark itself has to find out (the tensors
of a simple rule, the bytes that are half of the memory) does not. Compiling has a clock of its own, which counts all that
is traced and compiled, also for batches of another size. With one CPU thread a step's seconds are the processor's, which other
work on the machine does not lengthen.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import graphopt
from graphopt.bench.glosses import Batch, rate_factor
from graphopt.bench.peak import held_bytes, peak_of
from graphopt.bench.selection_tasks import batches, evaluate, load
from graphopt.bench.suite_ways import WAYS, Prepared, Start, Way
from graphopt.bench.timing import now, this_device
from graphopt.compat.dynamo import seconds_compiling
from graphopt.compat.inductor import fresh_compiler_cache
from graphopt.integrations.models import quiet_transformers

EVALUATIONS = 10
"""Of a run, at equal parts of it."""


@dataclass(frozen=True)
class Run:
    """What is run.

    Attributes:
        task: of `selection_tasks.TASKS`.
        way: of `suite_ways.WAYS`.
        rate: peak learning rate.
        seed: of the model's head, the batches, dropout and adapters.
        steps: of exact training; the most that any way makes is four times as many.
        time: part of exact training's seconds after which every other run ends.
        threads: of the CPU.
        backend: "inductor", or "aot_eager" to compile nothing.
    """

    task: str
    way: str
    rate: float
    seed: int
    steps: int
    time: float
    threads: int
    backend: str


def train(run: Run, limit: float | None, folder: Path, keep_compiled: bool, tell: Callable[[int], None]) -> dict[str, Any]:
    """Train and measure, in a process that has done nothing else.

    Args:
        limit: seconds of training after which the run ends, if not by its steps; the learning rate follows whichever is nearer.
        folder: see `selection_tasks.load`.
        keep_compiled: use what earlier runs compiled, and leave what this one compiles.
        tell: how many steps are done.
    """
    quiet_transformers()
    torch.set_num_threads(run.threads)
    device, _ = this_device()
    task = load(run.task, folder)
    torch.set_float32_matmul_precision(task.precision)
    model = task.make_model(run.seed).to(torch.device(device))
    most = run.steps if limit is None else 4 * run.steps
    data = batches(task.train, run.seed)
    seconds: list[float] = []
    curve: list[dict[str, float]] = []
    with contextlib.nullcontext() if keep_compiled else fresh_compiler_cache():
        start = Start(model, _moved(task.example(), device), run.rate, run.seed, run.backend)
        prepared, training, compiling = prepare(WAYS[run.way], start, device)
        optimizer = prepared.optimizer
        peaks = [group["lr"] for group in optimizer.param_groups]
        torch.manual_seed(run.seed)  # preparing draws different numbers in each way

        def step(batch: Batch) -> None:
            prepared.step(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        progress = 0.0  # the first step is always made, even if preparing it took all the time
        while progress < 1:
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * rate_factor(progress, 1 / most)
            batch = _moved(next(data), device)
            begin, own, compiled, traced = now(device), time.process_time(), prepared.compile_seconds(), seconds_compiling()
            step(batch)
            prepared.after_step(batch)
            compiled = max(prepared.compile_seconds() - compiled, seconds_compiling() - traced)  # what is traced is in both
            alone = device == "cpu" and run.threads == 1 and not compiled
            seconds.append(time.process_time() - own if alone else max(0.0, now(device) - begin - compiled))
            training += seconds[-1]
            compiling += compiled
            before, progress = progress, max(len(seconds) / most, training / limit if limit else 0.0)
            if int(EVALUATIONS * progress) > int(EVALUATIONS * before):
                accuracy, loss = evaluate(prepared.model, task.tuning)
                point = {"step": len(seconds), "seconds": training, "compile_seconds": compiling}
                curve.append({**point, "accuracy": accuracy, "loss": loss})
            tell(len(seconds))
        held_out, held_out_loss = evaluate(prepared.model, task.held_out)
        # the smaller of two: one of them may be among those in which projectors are fitted
        example = _moved(task.example(), device)
        step(example)  # is compiled here if batches were shorter
        peak_bytes = min(_step_peak(prepared, example, device, step) for _ in range(2))
        step_flops = prepared.step_flops()
    opt = prepared.step if isinstance(prepared.step, graphopt.OptimizedModule) else None
    return {
        **asdict(run),
        "device": device,
        "limit_seconds": limit,
        "taken_steps": len(seconds),
        "seconds": training,
        "compile_seconds": compiling,
        "seconds_per_step": statistics.median(seconds[2:] or seconds),
        "accuracy": curve[-1]["accuracy"],
        "loss": curve[-1]["loss"],
        "held_out": held_out,
        "held_out_loss": held_out_loss,
        "curve": curve,
        "peak_bytes": peak_bytes,
        "step_flops": step_flops,
        "selected": None if opt is None else len(opt.selected),
    }


def prepare(way: Way, start: Start, device: str) -> tuple[Prepared, float, float]:
    """A way that is ready to train; seconds that this took, besides compiling; seconds of compiling."""
    begin, traced = now(device), seconds_compiling()
    prepared = way(start)
    compiling = max(prepared.compile_seconds(), seconds_compiling() - traced - start.apart.compiling)
    return prepared, now(device) - begin - start.apart.seconds - compiling, compiling


def work(connection: Connection, run: Run, limit: float | None, folder: Path, keep_compiled: bool) -> None:
    """`train` in a process of its own: sends the number of steps after each one, and at last the result."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # the profiler would write over the progress bar
    connection.send(train(run, limit, folder, keep_compiled, connection.send))
    connection.close()


def _step_peak(prepared: Prepared, batch: Batch, device: str, step: Callable[[Batch], object]) -> int:
    """The most bytes that tensors hold during a step: weights, optimizer state, gradients and activations."""

    def train_once() -> None:
        step(batch)

    return peak_of(train_once, device, held_bytes(prepared.model, batch, prepared.optimizer))


def _moved(batch: Batch, device: str) -> Batch:
    return {key: tensor.to(device) for key, tensor in batch.items()}

"""One run of `graphopt bench budget`: MiniLM-L6 trained one way on the WordNet glosses, with its clock and its memory.

The clock of training stands still while something compiles and while the model is evaluated; what a technique does besides its
steps (rating tensors, calibrating a sampler, fitting projectors) counts. Compiling has a clock of its own.
"""

from __future__ import annotations

import os
import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import graphopt
from graphopt.bench.glosses import Batch, Glosses, correct, label_numbers, pretrained_minilm, rate_factor
from graphopt.bench.memory import held_bytes, peak_of
from graphopt.bench.timing import now, this_device
from graphopt.compat import pytree
from graphopt.compat.inductor import fresh_compiler_cache
from graphopt.passes import Lsp, Vcas
from graphopt.passes.lsp.optimizer import SubspaceOptimizer

BATCH, LENGTH = 32, 32
"""Samples in a batch, and tokens of each."""

FLOPS, VARIANCE = 0.5, 0.025


@dataclass(frozen=True)
class Settings:
    """What all runs that are compared have in common.

    Attributes:
        steps: of exact training.
        most_steps: of every other run.
        time: part of exact training's seconds after which every other run ends.
        seed: of the classification head, the batches, dropout, and adapters.
        threads: of the CPU.
        evaluate: steps between evaluations.
        validation_rows: used by them; the end of a run is evaluated on all rows, too.
        backend: "inductor", or "aot_eager" to compile nothing.
    """

    steps: int = 600
    most_steps: int = 600
    time: float = 1.0
    seed: int = 0
    threads: int = 1
    evaluate: int = 50
    validation_rows: int = 2000
    backend: str = "inductor"


@dataclass(frozen=True)
class Prepared:
    """A way to train, ready for its first step.

    Attributes:
        model: to evaluate.
        step: called as the model is.
        after_step: called with every batch after its step.
        compile_seconds: spent on tracing and compiling so far.
    """

    model: nn.Module
    step: Callable[..., Any]
    optimizer: torch.optim.Optimizer
    after_step: Callable[[Batch], object]
    compile_seconds: Callable[[], float]


Prepare = Callable[[nn.Module, Batch, float, str], Prepared]
"""(model, example batch, peak learning rate, backend) -> a way to train."""


@dataclass(frozen=True)
class Variant:
    """A technique.

    Attributes:
        rate: peak learning rate.
    """

    rate: float
    prepare: Prepare


def exact(model: nn.Module, example: Batch, rate: float, backend: str) -> Prepared:
    """`torch.compile`; its first step, on the example, is counted as compiling."""
    step = torch.compile(model, backend=backend)
    start = time.perf_counter()
    step(**example).loss.backward()
    model.zero_grad()
    elapsed = time.perf_counter() - start
    return Prepared(model, step, _adamw(model, rate), lambda batch: None, lambda: elapsed)


def within(budget: graphopt.Budget, passes: Any = "auto") -> Prepare:
    """A budget, met by some passes."""

    def prepare(model: nn.Module, example: Batch, rate: float, backend: str) -> Prepared:
        optimizer = _adamw(model, rate)
        opt = graphopt.optimize(model, example, budget, passes, backend, optimizer=optimizer)
        return _prepared(model, opt, optimizer)

    return prepare


def compressed(model: nn.Module, example: Batch, rate: float, backend: str) -> Prepared:
    """Compressed gradients; what is not compressed keeps exact training's learning rate."""
    rewrite = Lsp(subspace=128, nonzeros=8, check_every=200, batches=16, threshold=0.3)  # as in examples/lsp_glosses.py
    opt = graphopt.optimize(model, example, passes=[rewrite], backend=backend)
    weights = opt.states["lsp"].variables()
    groups = [
        {"params": [p for name, p in model.named_parameters() if name in weights], "lr": rate},
        {"params": [p for name, p in model.named_parameters() if name not in weights], "lr": VARIANTS["exact"].rate},
    ]
    return _prepared(model, opt, opt.make_optimizer(torch.optim.AdamW, groups, lr=rate))


def adapters(model: nn.Module, example: Batch, rate: float, backend: str) -> Prepared:
    """Adapters of rank 8 on every linear layer, their products in the cheapest order; the classifier is trained in full."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=8,
        lora_alpha=16,
        target_modules=["query", "key", "value", "dense"],
        exclude_modules=["pooler.dense"],
        modules_to_save=["classifier"],
    )
    adapted: nn.Module = get_peft_model(model, config).train()
    opt = graphopt.optimize(adapted, example, passes=["runlora"], backend=backend)
    return _prepared(adapted, opt, _adamw(adapted, rate))


VARIANTS = {
    "exact": Variant(3e-4, exact),
    "greentrainer": Variant(1e-3, within(graphopt.Budget(flops=FLOPS), ["greentrainer"])),
    # as in examples/vcas_glosses.py: the defaults are for longer training
    "vcas": Variant(3e-4, within(graphopt.Budget(variance=VARIANCE), [Vcas(every=50, alpha=0.03, beta=0.85)])),
    "lsp": Variant(1e-3, compressed),
    "runlora": Variant(1e-3, adapters),
    "auto": Variant(1e-3, within(graphopt.Budget(flops=FLOPS, variance=VARIANCE))),
}


def _adamw(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate)


def _prepared(model: nn.Module, opt: graphopt.OptimizedModule, optimizer: torch.optim.Optimizer) -> Prepared:
    after_step = (lambda batch: None) if opt.controller is None else opt.controller.after_step
    counters = opt.counters
    return Prepared(model, opt, optimizer, after_step, lambda: counters.capture_seconds + counters.compile_seconds)


def train(name: str, settings: Settings, rate: float, limit: float | None, tell: Callable[[int], None]) -> dict[str, Any]:
    """Train one way and measure it, in a process that has done nothing else.

    Args:
        name: of `VARIANTS`.
        rate: peak learning rate.
        limit: seconds of training after which the run ends, if not by its steps; the learning rate follows whichever is nearer,
            so that only runs that the clock ends depend on it.
        tell: how many steps are done.
    """
    prepare = VARIANTS[name].prepare
    torch.set_num_threads(settings.threads)
    device, _ = this_device()
    labels = label_numbers()
    data, validation = (Glosses(part, labels, LENGTH) for part in ("train", "validation"))
    rows = {key: tensor[: settings.validation_rows] for key, tensor in validation.tensors.items()}
    model = pretrained_minilm(len(labels), settings.seed).to(torch.device(device))
    most = settings.steps if name == "exact" else settings.most_steps
    batches = data.batches(BATCH, settings.seed)
    seconds: list[float] = []
    losses: list[float] = []
    curve: list[dict[str, float]] = []
    with fresh_compiler_cache():
        start = now(device)
        prepared = prepare(model, _moved(next(data.batches(BATCH, settings.seed)), device), rate, settings.backend)
        compiling = prepared.compile_seconds()
        training = setup = now(device) - start - compiling
        optimizer = prepared.optimizer
        peaks = [group["lr"] for group in optimizer.param_groups]
        torch.manual_seed(settings.seed)  # preparing draws different numbers in each variant

        def step(batch: Batch) -> Tensor:
            loss: Tensor = prepared.step(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        progress = 0.0  # the first step is always made, even if preparing it took all the time
        while progress < 1:
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * rate_factor(progress, 1 / most)
            batch = _moved(next(batches), device)
            start, compiled = now(device), prepared.compile_seconds()
            loss = step(batch)
            prepared.after_step(batch)
            compiled = prepared.compile_seconds() - compiled
            seconds.append(now(device) - start - compiled)
            training += seconds[-1]
            compiling += compiled
            losses.append(float(loss))
            progress = max(len(losses) / most, training / limit if limit else 0.0)
            if len(losses) % settings.evaluate == 0:
                share = float(correct(prepared.model, rows, device).mean())
                curve.append({"step": len(losses), "seconds": training, "compile_seconds": compiling, "accuracy": share})
            tell(len(losses))
        right = correct(prepared.model, validation.tensors, device)
        if not curve or curve[-1]["step"] != len(losses):
            share = float(right[: settings.validation_rows].mean())
            curve.append({"step": len(losses), "seconds": training, "compile_seconds": compiling, "accuracy": share})
        peak_rss = peak_resident_bytes()
        # the smaller of two: one of them may be among those in which projectors are fitted
        peak_bytes = min(_step_peak(prepared, batch, device, step) for _ in range(2))
    return {
        "variant": name,
        "rate": rate,
        "limit_seconds": limit,
        "steps": len(losses),
        "seconds": training,
        "setup_seconds": setup,
        "compile_seconds": compiling,
        "seconds_per_step": statistics.median(seconds[2:] or seconds),
        "accuracy": float(right.mean()),
        "curve": curve,
        "peak_rss_bytes": peak_rss,
        "peak_bytes": peak_bytes,
        "losses": losses,
        "step_seconds": seconds,
        "report": prepared.step.report.to_dict() if isinstance(prepared.step, graphopt.OptimizedModule) else None,
    }


def work(connection: Connection, name: str, settings: Settings, rate: float, limit: float | None) -> None:
    """`train` in a process of its own: sends the number of steps after each one, and at last the result."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # the profiler would write over the progress bar
    connection.send(train(name, settings, rate, limit, connection.send))
    connection.close()


def peak_resident_bytes() -> int:
    """The most memory that this process has had, libraries and compiling included."""
    status = Path("/proc/self/status")
    if status.exists():  # getrusage also counts what the parent had when it started this process
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _step_peak(prepared: Prepared, batch: Batch, device: str, step: Callable[[Batch], object]) -> int:
    """The most bytes that tensors hold during a step: weights, optimizer state, gradients and activations."""

    def train_once() -> None:
        step(batch)

    optimizer = prepared.optimizer
    held = [*prepared.model.parameters(), *prepared.model.buffers(), *batch.values()]
    held += [t for t in pytree.tree_leaves(optimizer.state_dict()["state"]) if isinstance(t, Tensor)]
    if isinstance(optimizer, SubspaceOptimizer):
        held += [t for weight in optimizer.subspaces.weights.values() for t in weight.inputs.values()]
        held += [t for moments in optimizer.moments.values() for t in (moments.first, moments.second)]
    return peak_of(train_once, device, held_bytes(held))


def _moved(batch: Batch, device: str) -> Batch:
    return {key: tensor.to(device) for key, tensor in batch.items()}

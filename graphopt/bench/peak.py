"""How benchmarks measure the memory of a step."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from graphopt.passes.lsp.optimizer import SubspaceOptimizer


class PeakBytes:
    """Measures between `begin` and `end` the most bytes that exist at once, beside what existed before.

    On the CPU that is the largest running sum of the allocator's events in this thread; on CUDA, what
    `torch.cuda.max_memory_allocated` grows by.
    """

    def __init__(self, device: str) -> None:
        self._profiler = None if device == "cuda" else profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._before = 0

    def begin(self) -> PeakBytes:
        """Start to measure."""
        gc.collect()
        if self._profiler is not None:
            self._profiler.start()
        else:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
        return self

    def end(self) -> int:
        """The bytes."""
        if self._profiler is None:
            torch.cuda.synchronize()
            return torch.cuda.max_memory_allocated() - self._before
        self._profiler.stop()
        current = peak = 0
        results: Any = self._profiler.profiler
        for event in results.kineto_results.events():
            if event.name() == "[memory]":
                current += event.nbytes()
                peak = max(peak, current)
        return peak


def peak_of(train: Callable[[], None], device: str, held: int = 0) -> int:
    """The most bytes that exist at once during a step.

    Args:
        held: bytes that exist for the whole step, which are not measured.
    """
    peak = PeakBytes(device).begin()
    train()
    return peak.end() + held


def held_bytes(model: nn.Module, inputs: Mapping[str, Tensor], optimizer: torch.optim.Optimizer | None) -> int:
    """Bytes that exist before and after a step, each storage once: of weights, buffers, the batch and the optimizer's states."""
    tensors = [*model.parameters(), *model.buffers(), *inputs.values()]
    if optimizer is not None:
        tensors += [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
    if isinstance(optimizer, SubspaceOptimizer):
        tensors += [t for weight in optimizer.subspaces.weights.values() for t in weight.inputs.values()]
        tensors += [t for moments in optimizer.moments.values() for t in (moments.first, moments.second)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())

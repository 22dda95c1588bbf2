"""Will a training step fit a GPU? The predicted peak, the largest batch, and what to change where it does not fit."""

from __future__ import annotations

import contextlib
import copy
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from graphopt import compat
from graphopt.analysis.allocator import CONTEXT_BYTES
from graphopt.analysis.memory import MemoryProfile
from graphopt.analysis.optimizers import OptimizerFactory, check_optimizer
from graphopt.analysis.segments import MERGED, find_segments
from graphopt.analysis.step_memory import StepTimeline, step_memory
from graphopt.api import Analysis, analyze
from graphopt.budget import Budget, parse_bytes
from graphopt.calls import BatchDim
from graphopt.errors import BudgetError, GraphoptError, InputError, LossNotFirst
from graphopt.frontend.accepted import require_module
from graphopt.graph import TrainingGraph
from graphopt.passes.technique import Found
from graphopt.planner.make_plan import make_plan
from graphopt.planner.memory_limit import MemoryLimit
from graphopt.planner.memory_problem import adopted
from graphopt.planner.parallel import MARGIN, SEGMENT_SLACK
from graphopt.planner.peaks import Peaks
from graphopt.planner.plan import Plan, resolve_passes
from graphopt.report.units import in_bytes
from graphopt.runtime.stages import stage
from graphopt.transforms.symbolic_zeros import without_other_outputs

OVERHEAD = CONTEXT_BYTES + SEGMENT_SLACK
"""Bytes beside what a step allocates: the CUDA context, and partly used segments of the allocator."""

GPUS: dict[str, int] = {
    "t4": 15360, "l4": 23034, "a10g": 23028, "l40s": 46068, "a6000": 49140, "a100-40g": 40960, "a100-80g": 81920,
    "h100": 81559, "h200": 143771, "rtx3090": 24576, "rtx4090": 24564, "rtx5090": 32607,
}  # fmt: skip
"""MiB of one GPU, as nvidia-smi prints it."""

Optimizer = str | OptimizerFactory | torch.optim.Optimizer | None


@dataclass(frozen=True)
class Change:
    """One thing that could be changed, everything else as it is.

    Attributes:
        what: in words.
        peak_bytes: predicted, with what the context and the allocator take.
        fits: whether that is within what may be used.
    """

    what: str
    peak_bytes: int
    fits: bool


@dataclass(frozen=True)
class Fit:
    """Whether a training step fits a GPU.

    Attributes:
        fits: whether `peak_bytes` is at most `usable_bytes`.
        gpu: as it was asked for.
        capacity_bytes, usable_bytes: of the GPU, and without the share that stays free.
        batch_size: samples of the example.
        peak_bytes: predicted, with what the context and the allocator take.
        largest_batch: that fits; 0 if not even one sample does, None if the model fixes its batch or every batch fits.
        changes: what would need less, the smallest change of the training first; empty if the step fits.
        assumptions: what the figures rest on.
    """

    fits: bool
    gpu: str
    capacity_bytes: int
    usable_bytes: int
    batch_size: int
    peak_bytes: int
    largest_batch: int | None
    changes: tuple[Change, ...]
    assumptions: tuple[str, ...]

    def __str__(self) -> str:
        verdict = "It fits" if self.fits else "It does not fit"
        largest = "" if self.largest_batch is None else f" The largest batch that fits is {self.largest_batch}."
        lines = [
            f"{verdict}: a step with a batch of {self.batch_size} needs {in_bytes(self.peak_bytes)} of the "
            f"{in_bytes(self.usable_bytes)} of {self.gpu} that it may use.{largest}"
        ]
        if self.changes:
            lines.append("What to change, the smallest change of the training first:")
            width = max(len(change.what) for change in self.changes)
            lines += [f"  {c.what:<{width}}  {in_bytes(c.peak_bytes):>10}  {'fits' if c.fits else ''}" for c in self.changes]
        return "\n".join(line.rstrip() for line in lines)


def fit(
    model: nn.Module,
    example_inputs: Any,
    gpu: int | str,
    *,
    optimizer: Optimizer = "adamw",
    backend: Literal["inductor", "aot_eager"] = "inductor",
    lora: int | None = None,
    batch_dim: BatchDim = 0,
    margin: float = MARGIN,
) -> Fit:
    """Whether a training step fits a GPU, without allocating, compiling or changing anything.

    Args:
        model, example_inputs, optimizer, batch_dim: as for `analyze`.
        gpu: a name such as "h100" or "a100-40g" (see `graphopt.integrations.fit.GPUS`), bytes, or a text such as "16GiB".
        backend: whose memory: "inductor" or "aot_eager".
        lora: rank of low-rank adapters (PEFT) that are trained in the place of all weights.
        margin: share of the GPU's memory that stays free.
    Raises:
        InputError, CaptureError, TorchVersionError: with cause and remedy.
    """
    capacity = gpu_bytes(gpu)
    check_optimizer(optimizer)
    require_module(model)
    if backend not in ("inductor", "aot_eager"):
        raise InputError(f"backend={backend!r}: use 'inductor' or 'aot_eager'.")
    if not 0 <= margin < 1:
        raise InputError(f"margin={margin!r} must be in [0, 1): the share of the GPU's memory that stays free.")
    if lora is not None:
        model = with_adapters(model, lora)
    usable = math.floor(capacity * (1 - margin))

    def counted(of: nn.Module, inputs: Any = example_inputs) -> Analysis:
        return analyze(of, inputs, batch_dim=batch_dim, backend=backend, optimizer=optimizer)

    graph = counted(model).graph
    eight = _in_8_bits(optimizer)
    with stage("memory"):
        timeline = StepTimeline(graph, backend)
        memory, *others = map(timeline.profile, [optimizer] if eight is None else [optimizer, eight])
    largest = _largest(memory, usable)
    peak = memory.peak_bytes + OVERHEAD
    found = []
    for what, measure in (
        () if peak <= usable else _changes(model, example_inputs, graph, [memory, *others], usable, optimizer, backend, counted)
    ):
        try:
            size = measure() + OVERHEAD
        except GraphoptError:  # such as adapters where there is no linear layer
            continue
        if size < peak:
            found.append(Change(what, size, size <= usable))
    assumptions = (
        *memory.assumptions,
        f"CUDA context {in_bytes(CONTEXT_BYTES)}, allocator slack {in_bytes(SEGMENT_SLACK)}, {margin:.0%} of the GPU stays free",
    )
    return Fit(peak <= usable, str(gpu), capacity, usable, memory.batch_size, peak, largest, tuple(found), assumptions)


def gpu_bytes(gpu: int | str) -> int:
    """Bytes of a GPU's memory.

    Args:
        gpu: one of `GPUS`, bytes, or a text such as "16GiB".
    Raises:
        InputError: none of these.
    """
    if isinstance(gpu, str) and (mib := GPUS.get(gpu.lower())) is not None:
        return mib * 2**20
    try:
        return parse_bytes(gpu)
    except BudgetError as error:
        raise InputError(f"gpu={gpu!r} is unknown: use one of {', '.join(GPUS)}, or an amount such as '16GiB'.") from error


def _largest(memory: MemoryProfile, usable: int) -> int | None:
    if not memory.symbolic:
        return None
    try:
        return memory.max_batch(usable - OVERHEAD) if usable > OVERHEAD else 0
    except InputError:  # it does not grow with the batch
        return None


def _changes(
    model: nn.Module,
    inputs: Any,
    graph: TrainingGraph,
    memories: Sequence[MemoryProfile],
    usable: int,
    optimizer: Optimizer,
    backend: str,
    counted: Callable[..., Analysis],
) -> Iterator[tuple[str, Callable[[], int]]]:
    """What can be changed, and what finds the bytes of a step then; `memories` are with the optimizer, and with one in 8 bits."""
    memory, parameters = memories[0], list(model.parameters())
    rewritten = with_exact_rewrites(graph)
    if rewritten is not None:
        yield "graphopt.optimize(model, batch, outputs='loss')", lambda: step_memory(rewritten, backend, optimizer).peak_bytes
    if memory.symbolic and memory.batch_size > 1:
        gathering = step_memory(graph, backend, optimizer, accumulation=2)
        batch = max(_largest(gathering, usable) or 1, 1)
        yield f"a batch of {batch}, with gradient accumulation", lambda: gathering.at(batch).peak_bytes
    yield "activation checkpointing (Budget(memory=...))", lambda: _recomputed(graph, backend, optimizer)
    if len(memories) > 1:
        yield f"{_in_8_bits(optimizer)} in the place of {optimizer}", lambda: memories[1].peak_bytes
    wide = any(p.dtype == torch.float32 for p in parameters)
    if wide:
        yield "weights in bfloat16", lambda: counted(*_in_bfloat16(model, inputs)).memory.peak_bytes
    if all(p.requires_grad for p in parameters) and _peft() is not None:
        yield "LoRA of rank 16", lambda: counted(with_adapters(model, 16)).memory.peak_bytes
        if wide:

            def both() -> int:
                half, cast = _in_bfloat16(model, inputs)
                return counted(with_adapters(half, 16), cast).memory.peak_bytes

            yield "LoRA of rank 16 and weights in bfloat16", both


def with_exact_rewrites(graph: TrainingGraph) -> TrainingGraph | None:
    """A step whose loss alone is read, as `optimize` has it without a budget; None: that is the same step."""
    with contextlib.suppress(LossNotFirst):
        graph = without_other_outputs(graph)
    passes = resolve_passes(["dead_rows", "linear_cross_entropy"], Budget())
    plan = make_plan(nn.Module(), (), {}, graph, Budget(), passes, None, None, "inductor", lambda _: "", auto=True)
    rewritten, reports = plan.rewrite(graph)
    return rewritten if any(report.changes.changed for report in reports) else None


def _in_8_bits(optimizer: Optimizer) -> str | None:
    """The same optimizer with states of 8 bits, where there is one."""
    if isinstance(optimizer, str) and optimizer.startswith("adam") and "8bit" not in optimizer:
        return f"{optimizer.partition('-')[0]}8bit"
    return None


def _recomputed(graph: TrainingGraph, backend: str, optimizer: Optimizer) -> int:
    """Bytes of a step in which every segment of the forward is computed again, with as many merged as need least."""
    plan = Plan(Budget(), resolve_passes(["recompute"], Budget(memory=1)))
    peaks = Peaks(graph, MemoryLimit(0, backend, optimizer))
    segments = {merged: find_segments(graph, merged) for merged in MERGED}
    plans = [adopted(plan, Found((), tuple(s.name for s in found if s.saved_bytes), m)) for m, found in segments.items()]
    with stage("memory"):
        return peaks.predicted(min(plans, key=peaks.estimated))


def _in_bfloat16(model: nn.Module, inputs: Any) -> tuple[nn.Module, Any]:
    """A copy of a model without memory, and its inputs, with bfloat16 in the place of float32."""

    def cast(value: Any) -> Any:
        return value.bfloat16() if isinstance(value, Tensor) and value.dtype == torch.float32 else value

    return _copied(model).bfloat16(), compat.pytree.tree_map(cast, inputs)


def _copied(model: nn.Module) -> nn.Module:
    """A copy without memory, on the meta device, that shares nothing with the model."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    return copy.deepcopy(model, memo)


def with_adapters(model: nn.Module, rank: int) -> nn.Module:
    """A copy of a model, without memory, in which LoRA adapters of all linear layers are trained, and nothing else.

    Raises:
        InputError: PEFT is not installed, or cannot adapt the model.
    """
    peft = _peft()
    if peft is None:
        raise InputError("adapters need PEFT: pip install 'graphopt[transformers]'")
    if rank < 1:
        raise InputError(f"lora={rank} must be a rank of at least 1.")
    copied = _copied(model)
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    targets = "all-linear" if hasattr(model, "get_output_embeddings") else linear
    try:
        config = peft.LoraConfig(r=rank, target_modules=targets)
        with warnings.catch_warnings(category=FutureWarning, action="ignore"):  # of PEFT's calls of transformers
            return peft.get_peft_model(copied, config, low_cpu_mem_usage=True)
    except Exception as error:  # whatever a library says of a model that it does not know
        raise InputError(f"PEFT cannot add adapters to {type(model).__name__}: {error}") from error


def _peft() -> Any:
    try:
        import peft
    except ImportError:
        return None
    return peft

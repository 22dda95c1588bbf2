"""Which way to spread training over devices, and the batch that fits: LLMem's Algorithm 1 (sections 5 and 6) on our estimates.

Data parallelism has the timeline of the graph that averages gradients, and ADP that of one device with what FSDP2 (`fully_shard`
per repeated block) holds on it. The other estimates shard on the timeline of one device what the strategy shards: parameters,
gradients and states as tensor parallelism of `torch.distributed` does. Activations are never sharded here: an upper bound for
tensor parallelism.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from functools import partial

import numpy as np

from graphopt.analysis.allocator import CONTEXT_BYTES
from graphopt.analysis.memory import Block, MemoryProfile, largest_batch
from graphopt.budget import parse_bytes
from graphopt.errors import InputError
from graphopt.planner.sharded_memory import sharded_peak
from graphopt.report.units import in_bytes

MARGIN = 0.05
"""Share of a device's memory that a plan leaves free by default: fragmentation, workspaces, what was not foreseen."""

SEGMENT_SLACK = 20 * 2**20
"""Bytes that the caching allocator may hold in partly used segments, over the sum of live tensors."""

OF_TENSORS = ("gradient", "optimizer state")
"""Categories of what training a tensor holds beside the tensor itself."""

ZERO_3_COMMUNICATION = 1.5
"""What ADP communicates, in units of what CDP does."""


class Method(StrEnum):
    """How training is spread over devices, in the paper's order of preference."""

    CDP = "CDP"  # conventional data parallelism
    ADP = "ADP"  # advanced data parallelism (ZeRO-3)
    TP = "TP"  # tensor parallelism
    DP_TP = "DP+TP"


@dataclass(frozen=True)
class Layout:
    """One way to use the devices.

    Attributes:
        devices: gpu_n.
        tensor_parallel: tp_n, devices that share each matrix: 1 for CDP and ADP, all of them for TP.
    """

    method: Method
    devices: int = 1
    tensor_parallel: int = 1

    @property
    def data_parallel(self) -> int:
        """dp_n: groups of devices that see different samples."""
        return self.devices // self.tensor_parallel


def layouts(devices: int, tensor_parallel: int | None = None) -> tuple[Layout, ...]:
    """CDP, ADP, TP, and DP+TP with the given tensor-parallel size or with every proper divisor of `devices`.

    Raises:
        InputError: no devices, or a tensor-parallel size that does not divide them.
    """
    if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
        raise InputError(f"devices={devices!r} must be a whole number of at least 1.")
    sizes = [size for size in range(2, devices) if devices % size == 0] if tensor_parallel is None else [tensor_parallel]
    if any(not isinstance(size, int) or size < 1 or devices % size for size in sizes):
        raise InputError(f"tensor_parallel={tensor_parallel!r} does not divide devices={devices}: use a whole number that does.")
    simple = (Layout(Method.CDP, devices), Layout(Method.ADP, devices), Layout(Method.TP, devices, devices))
    return simple + tuple(Layout(Method.DP_TP, devices, size) for size in sizes)


@dataclass(frozen=True)
class StrategyRow:
    """One strategy of a plan.

    Attributes:
        strategy: with its degrees, e.g. "DP+TP (2 x 2)".
        batch_size: largest per-device batch that fits; 0 if none does.
        samples: batch over all devices.
        score: LLMem's Algorithm 1: samples per step, in units of a step with ADP's communication.
        peak_bytes: on the fullest device at `batch_size` (at 1 if none fits), context included.
        why: what limits it.
    """

    strategy: str
    batch_size: int
    samples: int
    score: float
    peak_bytes: int
    why: str


@dataclass(frozen=True)
class MemoryPlan:
    """How to train a model on given devices.

    Attributes:
        strategy: "CDP", "ADP", "TP", "DP+TP" or "offload".
        batch_size: samples per device (per tensor-parallel group for TP and DP+TP).
        table: every strategy that was considered.
        capacity_bytes, margin: of one device, and the share of it that was left free.
        assumptions: what the estimates rest on.
    """

    strategy: str
    batch_size: int
    table: tuple[StrategyRow, ...]
    capacity_bytes: int
    margin: float
    assumptions: tuple[str, ...]

    @property
    def verdict(self) -> str:
        """What was chosen, in a few words."""
        if not self.batch_size:
            return "nothing fits, not even one sample with gradients and optimizer states on the host"
        return f"{self.strategy}, batch {self.batch_size} per device"

    def __str__(self) -> str:
        width = max(len(row.strategy) for row in self.table)
        rows = [
            f"  {r.strategy:<{width}}  batch {r.batch_size:>5}  {in_bytes(r.peak_bytes):>10}  {r.why}".rstrip()
            for r in self.table
        ]
        return "\n".join([self.verdict, *rows])


def plan_devices(
    profile: MemoryProfile,
    devices: int,
    device_memory: int | str,
    *,
    averaging: MemoryProfile | None = None,
    tensor_parallel: int | None = None,
    context_bytes: int = CONTEXT_BYTES,
    margin: float = MARGIN,
    allow_within_margin: bool = False,
) -> MemoryPlan:
    """Choose a strategy for `devices` equal devices.

    Args:
        profile: of one device, see `step_memory`.
        averaging: of one of these devices where the backward averages gradients over all; None: they train under DDP.
        device_memory: capacity of one device, in bytes or as a text such as "16GiB".
        tensor_parallel: degree for DP+TP; None tries every divisor of `devices`.
        margin: share of the capacity that must stay free.
        allow_within_margin: accept a batch that uses the margin too.
    Raises:
        BudgetError: `device_memory` is not an amount of memory.
        InputError: no devices, degrees that do not divide, a margin outside [0, 1), or a model with a fixed batch.
    """
    check_devices(devices, device_memory, tensor_parallel, margin)
    capacity = parse_bytes(device_memory)
    if not profile.symbolic:
        raise InputError("the model fixes its batch size, so no batch can be planned for it.")
    limit = capacity if allow_within_margin else math.floor(capacity * (1 - margin))
    overhead = SEGMENT_SLACK + context_bytes
    rows = []
    for layout in layouts(devices, tensor_parallel):
        peak = partial(_peak, profile, partial(strategy_bytes, layout=layout), overhead)
        if layout.method is Method.CDP and averaging is not None:
            peak = partial(_peak, averaging, lambda at: at.peak_bytes, overhead)
        rows.append(_row(layout, peak, limit))
    best = max(rows, key=lambda row: row.score)  # of equals the first, which the paper prefers
    if not best.score:
        peak = partial(_peak, profile, offload_bytes, overhead)
        batch = largest_batch(lambda batch: peak(batch) <= limit)
        why = "gradients and optimizer states live on the host" if batch else "not even this fits one sample"
        best = StrategyRow("offload", batch, batch * devices, float(batch), peak(max(batch, 1)), why)
        rows.append(best)
    assumptions = (
        *profile.assumptions,
        f"CUDA context {context_bytes / 2**20:.0f} MiB, allocator slack {SEGMENT_SLACK / 2**20:.0f} MiB",
        f"{margin:.0%} of each device " + ("may be used too" if allow_within_margin else "stays free"),
        "activations are not sharded by tensor parallelism (an upper bound)",
        "data parallel: " + ("as optimize(mesh=...)" if averaging else "DDP's gradient buckets, as large as the gradients"),
        "ADP: FSDP2 per repeated block, one prefetched",
    )
    return MemoryPlan(best.strategy.partition(" ")[0], best.batch_size, tuple(rows), capacity, margin, assumptions)


def check_devices(devices: int, device_memory: int | str, tensor_parallel: int | None, margin: float) -> None:
    """Raise what `plan_devices` would for these arguments, before anything is analysed."""
    parse_bytes(device_memory)
    if not isinstance(margin, (int, float)) or not 0 <= margin < 1:
        raise InputError(f"margin={margin!r} must be in [0, 1): the share of a device's memory that stays free.")
    layouts(devices, tensor_parallel)


def _peak(profile: MemoryProfile, estimate: Callable[[MemoryProfile], int], overhead: int, batch: int) -> int:
    return estimate(profile.at(batch)) + overhead


def strategy_bytes(profile: MemoryProfile, layout: Layout) -> int:
    """Peak bytes on one device under a strategy, exact by construction on the timeline.

    CDP keeps everything, and DDP's buckets; ADP is `sharded_peak`; TP shards matrices over its group; DP+TP shards matrices over
    the group and gradients and states over all devices (the corrected form: the half-precision share is 1/tp, not 1 - tp/n).
    """
    if layout.method is Method.CDP:
        gradients = sum(s for b, s in zip(profile.blocks, profile.sizes, strict=True) if b.category == "gradient")
        return profile.peak_bytes + (gradients if layout.devices > 1 else 0)
    if layout.method is Method.ADP:
        return sharded_peak(profile, layout.devices)
    matrices = {b.name for b in profile.blocks if b.category == "parameter" and len(b.shape) >= 2}

    def share(block: Block) -> Fraction:
        if layout.method is Method.DP_TP and block.category in OF_TENSORS:
            return Fraction(1, layout.devices)
        of_matrix = block.name.partition(": ")[0].removeprefix("gradient of ") in matrices
        return Fraction(1, layout.tensor_parallel if of_matrix and block.category in ("parameter", *OF_TENSORS) else 1)

    return _scaled_peak(profile, share)


def offload_bytes(profile: MemoryProfile) -> int:
    """Peak bytes on the device when gradients and optimizer states live on the host (as CPU offload does)."""
    gradients = [s for b, s in zip(profile.blocks, profile.sizes, strict=True) if b.category == "gradient"]
    return _scaled_peak(profile, lambda b: Fraction(int(b.category not in OF_TENSORS))) + max(gradients, default=0)


def _scaled_peak(profile: MemoryProfile, share: Callable[[Block], Fraction]) -> int:
    """Peak of the timeline with each block's bytes multiplied by its share, rounded up."""
    sizes = [math.ceil(size * share(block)) for block, size in zip(profile.blocks, profile.sizes, strict=True)]
    return int(profile.alive(np.array(sizes, dtype=np.int64)).max())


def _row(layout: Layout, peak_of: Callable[[int], int], limit: int) -> StrategyRow:
    batch = largest_batch(lambda batch: peak_of(batch) <= limit)
    samples, peak = batch * layout.data_parallel, peak_of(max(batch, 1))
    score = samples * (ZERO_3_COMMUNICATION if layout.method is Method.CDP else 1.0)
    hybrid = f" ({layout.data_parallel} x {layout.tensor_parallel})" if layout.method is Method.DP_TP else ""
    why = "largest batch that fits" if batch else f"one sample takes {in_bytes(peak)} of {in_bytes(limit)}"
    return StrategyRow(layout.method + hybrid, batch, samples, score, peak, why)

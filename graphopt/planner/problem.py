"""The numbers of which `graphopt.planner.solver` makes a program, and what it answers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from graphopt.planner.costs import BackwardCosts


@dataclass(frozen=True)
class TensorBytes:
    """What training one tensor holds on the device, in bytes.

    Attributes:
        gradient, state: of the tensor and of its optimizer's states.
        segment: the first segment of the forward that reads it.
        compressed: bytes that a compressed gradient and its projectors take instead; None if it cannot be compressed.
        compressed_flops: FLOPs that compressing adds to those of its gradient; below 0 if it saves some.
    """

    gradient: int
    state: int
    segment: int
    compressed: int | None = None
    compressed_flops: int = 0


@dataclass(frozen=True)
class Problem:
    """Numbers of one graph at one batch size.

    Attributes:
        costs: FLOPs by class of backward nodes.
        importance: per tensor, as in `costs.names`; none is negative.
        tensors: bytes per tensor.
        segments: (bytes kept for the backward, FLOPs of computing them again) per segment of the forward, in order.
        held: bytes per segment that are kept, computed again or not, where anything trains in it or before it.
        fixed_bytes: parameters, buffers and inputs.
        kept_value: part of a tensor's importance that remains where its gradient is compressed.
        merged: of so many neighbours each segment consists.
        segment_names: by which techniques know them.
    """

    costs: BackwardCosts
    importance: tuple[float, ...]
    tensors: tuple[TensorBytes, ...]
    segments: tuple[tuple[int, int], ...]
    held: tuple[int, ...]
    fixed_bytes: int
    kept_value: float = 1.0
    merged: int = 1
    segment_names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Allocation:
    """A solution.

    Attributes:
        train, compressed: positions of tensors; compressed ones are trained, too.
        recomputed: positions of segments.
        step_flops: of forward, backward and what is computed again.
        peak_bytes: the largest sum over the moments that the program looks at.
    """

    train: tuple[int, ...]
    compressed: tuple[int, ...]
    recomputed: tuple[int, ...]
    step_flops: int
    peak_bytes: int


def evaluate(problem: Problem, train: Iterable[int], compressed: Iterable[int], recomputed: Iterable[int]) -> tuple[int, int]:
    """FLOPs and peak bytes of a choice, as the program counts them."""
    trained, small, recomputed = set(train), set(compressed), set(recomputed)
    tensors = problem.tensors
    flops = problem.costs.forward_flops + problem.costs.cost(trained)
    flops += sum(problem.segments[i][1] for i in recomputed) + sum(tensors[k].compressed_flops for k in small)
    whole = trained - small
    base = problem.fixed_bytes + sum(tensors[k].state for k in whole) + sum(tensors[k].compressed or 0 for k in small)
    first = min((tensors[k].segment for k in trained), default=len(problem.segments))
    peak = base + sum(tensors[k].gradient for k in whole)
    kept = 0
    for j, ((saved, _), held) in enumerate(zip(problem.segments, problem.held, strict=True)):
        if j >= first:
            kept += held
            gradients = sum(tensors[k].gradient for k in whole if tensors[k].segment >= j)
            peak = max(peak, base + kept + saved + gradients)
            kept += 0 if j in recomputed else saved
    return flops, peak

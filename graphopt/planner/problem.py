"""The numbers of which `graphopt.planner.solver` makes a program, and what it answers."""

from __future__ import annotations

import math
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
class KeepLevel:
    """Some terms of a weight's gradient kept, instead of all.

    Attributes:
        ratio: part of the terms that is kept (nu in VCAS), below 1.
        flops_saved: of the product, 2 per multiply-add.
        variance: that leaving out the others adds (VCAS, Eq. 3).
    """

    ratio: float
    flops_saved: int
    variance: float


@dataclass(frozen=True)
class SampledTerms:
    """A product in a weight's gradient, of whose terms some may be left out.

    Attributes:
        site: name of the product.
        tensor: position of the weight.
        levels: to choose one of, or none.
    """

    site: str
    tensor: int
    levels: tuple[KeepLevel, ...]


@dataclass(frozen=True)
class Problem:
    """Numbers of one graph at one batch size.

    Attributes:
        costs: FLOPs by class of backward nodes.
        importance: per tensor, as in `costs.names`; none is negative.
        tensors: bytes per tensor.
        segments: (bytes kept for the backward, FLOPs of computing them again) per segment of the forward, in order.
        fixed_bytes: parameters, buffers and inputs.
        kept_value: part of a tensor's importance that remains where its gradient is compressed.
        samples: products that may be sampled; those of a weight whose gradient is compressed are not.
        batch_variance: of the mini-batch gradient, per tensor; needed where there are `samples`.
    """

    costs: BackwardCosts
    importance: tuple[float, ...]
    tensors: tuple[TensorBytes, ...]
    segments: tuple[tuple[int, int], ...]
    fixed_bytes: int
    kept_value: float = 1.0
    samples: tuple[SampledTerms, ...] = ()
    batch_variance: tuple[float, ...] = ()


Kept = tuple[tuple[int, int], ...]
"""(position of a sampled product, position of its level); products that are not named are kept in full."""


@dataclass(frozen=True)
class Allocation:
    """A solution.

    Attributes:
        train, compressed: positions of tensors; compressed ones are trained, too.
        recomputed: positions of segments.
        step_flops: of forward, backward and what is computed again.
        peak_bytes: the largest sum over the moments that the program looks at.
        gap: how far, relatively, the value may be from the optimum.
        kept: levels of the products that are sampled.
        variance: that these add, as a part of the mini-batch's own of what is trained.
    """

    train: tuple[int, ...]
    compressed: tuple[int, ...]
    recomputed: tuple[int, ...]
    step_flops: int
    peak_bytes: int
    gap: float
    kept: Kept = ()
    variance: float = 0.0


def added_variance(problem: Problem, train: Iterable[int], kept: Kept) -> float:
    """The variance that sampling adds, as a part of the mini-batch's own of what is trained."""
    added = math.fsum(problem.samples[s].levels[level].variance for s, level in kept)
    own = math.fsum(problem.batch_variance[k] for k in train) if added else 0.0
    return added / own if own else (math.inf if added else 0.0)


def evaluate(
    problem: Problem, train: Iterable[int], compressed: Iterable[int], recomputed: Iterable[int], levels: Kept = ()
) -> tuple[int, int]:
    """FLOPs and peak bytes of a choice, as the program counts them."""
    trained, small, again = set(train), set(compressed), set(recomputed)
    tensors = problem.tensors
    flops = problem.costs.forward_flops + problem.costs.cost(trained)
    flops += sum(problem.segments[i][1] for i in again) + sum(tensors[k].compressed_flops for k in small)
    flops -= sum(problem.samples[s].levels[level].flops_saved for s, level in levels)
    whole = trained - small
    base = problem.fixed_bytes + sum(tensors[k].state for k in whole) + sum(tensors[k].compressed or 0 for k in small)
    first = min((tensors[k].segment for k in trained), default=len(problem.segments))
    peak = base + sum(tensors[k].gradient for k in whole)
    kept = 0
    for j, (saved, _) in enumerate(problem.segments):
        if j >= first:
            gradients = sum(tensors[k].gradient for k in whole if tensors[k].segment >= j)
            peak = max(peak, base + kept + saved + gradients)
            kept += 0 if j in again else saved
    return flops, peak

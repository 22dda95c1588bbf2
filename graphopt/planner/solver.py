"""One budget for several techniques: what to train, compress and compute again, as one mixed-integer program.

Per tensor: train it, freeze it, or train it with a compressed gradient. Per segment of the forward: keep its results or compute
them again. Maximise importance within FLOPs and bytes at once; among equals, the fewest FLOPs (HiGHS through SciPy).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from graphopt.planner.problem import Allocation, Problem, evaluate

FEWER_FLOPS = 1e-4
"""Importance, as a part of all, that a full step's FLOPs are worth: it decides among equals."""


def solve(
    problem: Problem,
    flops_limit: int | None = None,
    memory_limit: int | None = None,
    *,
    train_all: bool = False,
    may_recompute: bool = True,
    smallest_memory: bool = False,
    time_limit: float = 5.0,
) -> Allocation | None:
    """The most important choice within all limits.

    Variables: x_k trains tensor k, c_k <= x_k compresses it, r_i computes segment i again (binary); y_c, a_i, w_i in [0, 1]: a
    class of backward nodes runs, a segment's results are needed, they are kept. While the backward of segment j runs, the device
    holds fixed + sum_k state_k (x_k - c_k) + sum_k small_k c_k + sum_{i < j} saved_i w_i + saved_j a_j + sum_{i <= j} held_i a_i
    + sum_{k not read before j} gradient_k (x_k - c_k) bytes; in the optimizer's step all gradients and nothing saved.

    Args:
        flops_limit: FLOPs of a step; None for no limit.
        memory_limit: bytes at every moment; None for no limit.
        train_all: every tensor with an importance above 0 is trained, and no other.
        may_recompute: segments may be computed again.
        smallest_memory: find the choice that needs the fewest bytes and trains anything, whatever its importance.
        time_limit: seconds.
    Returns:
        None if there is no choice that trains anything, or none was found in time.
    """
    costs = problem.costs
    masks = sorted({mask for mask, _ in costs.classes}, key=int.bit_count)
    at = _Positions(len(problem.tensors), len(problem.segments), len(masks))
    rows = [*_structure(problem, at, masks)]
    step = _step_flops(problem, at, masks)
    full = float(max(costs.step_flops, 1))
    if flops_limit is not None:
        rows.append((step, -np.inf, (flops_limit - costs.forward_flops) / full))
    if memory_limit is not None or smallest_memory:
        rows += _within_memory(problem, at, memory_limit, smallest_memory)
    objective = _objective(problem, at, step)
    if smallest_memory:
        objective *= FEWER_FLOPS
        objective[at.peak] = 1.0
    integral = np.zeros(at.peak + 1)
    integral[: at.needed] = 1
    with quiet():
        result = milp(
            c=objective,
            constraints=_constraint(rows, at.peak + 1),
            integrality=integral,
            bounds=_bounds(problem, at, train_all, may_recompute, smallest_memory),
            options={"time_limit": time_limit, "mip_rel_gap": 1e-6},
        )
    if result.x is None:
        return None

    def chosen(start: int, size: int) -> tuple[int, ...]:
        return tuple(i for i in range(size) if result.x[start + i] > 0.5)

    train, compressed = chosen(at.trained, at.tensors), chosen(at.compressed, at.tensors)
    recomputed = chosen(at.recomputed, at.segments)
    most = evaluate(problem, train, compressed, recomputed)[1] if smallest_memory else memory_limit
    recomputed = _needed(problem, train, compressed, recomputed, most)
    step_flops, peak_bytes = evaluate(problem, train, compressed, recomputed)
    if flops_limit is not None and step_flops > flops_limit:  # HiGHS works in floating point; the limits are exact
        return solve(
            problem,
            flops_limit - 2 * (step_flops - flops_limit),
            memory_limit,
            train_all=train_all,
            may_recompute=may_recompute,
            smallest_memory=smallest_memory,
            time_limit=time_limit,
        )
    return Allocation(train, compressed, recomputed, step_flops, peak_bytes)


Row = tuple[Mapping[int, float], float, float]
"""A linear constraint: factors by variable, and the bounds of their sum."""


def _constraint(rows: Sequence[Row], variables: int) -> LinearConstraint:
    found, low, high = zip(*rows, strict=True)
    entries = [(factor, row, variable) for row, factors in enumerate(found) for variable, factor in factors.items()]
    factor, row, variable = zip(*entries, strict=True)
    matrix = coo_array((factor, (row, variable)), shape=(len(rows), variables)).tocsr()
    return LinearConstraint(matrix, np.asarray(low), np.asarray(high))


def _within_memory(problem: Problem, at: _Positions, memory_limit: int | None, smallest_memory: bool) -> Iterator[Row]:
    """Every moment's bytes are at most the limit, or at most the peak that is minimised."""
    unit = float(max(memory_limit or problem.fixed_bytes, 1))
    for moment in _moments(problem, at):
        entries = {v: size / unit for v, size in moment.items()}
        if smallest_memory:
            yield {**entries, at.peak: -1.0}, -np.inf, 0.0
        else:
            yield entries, -np.inf, ((memory_limit or 0) - problem.fixed_bytes) / unit


class _Positions:
    """Where each kind of variable begins, see `solve`: x, c and r (binary), then a, w and y, then the peak."""

    def __init__(self, tensors: int, segments: int, classes: int) -> None:
        self.tensors, self.segments = tensors, segments
        sizes = (tensors, tensors, segments, segments, segments, classes)
        starts = itertools.accumulate(sizes, initial=0)
        self.trained, self.compressed, self.recomputed, self.needed, self.kept, self.running, self.peak = starts


def _structure(problem: Problem, at: _Positions, masks: Sequence[int]) -> Iterator[Row]:
    """What needs what, whatever the limits; something is trained.

    Args:
        masks: tensors that each class of backward nodes serves, as bits, sorted by how many.
    """
    for k, tensor in enumerate(problem.tensors):
        yield {at.trained + k: 1.0, at.compressed + k: -1.0}, 0.0, np.inf
        yield {at.needed + tensor.segment: 1.0, at.trained + k: -1.0}, 0.0, np.inf
    for k in range(at.tensors):  # a tensor's smallest classes run with it, and with a class the smallest above it
        for c in _smallest_above(masks, 1 << k, 0):
            yield {at.running + c: 1.0, at.trained + k: -1.0}, 0.0, np.inf
    for d, mask in enumerate(masks):
        for c in _smallest_above(masks, mask, d + 1):
            yield {at.running + c: 1.0, at.running + d: -1.0}, 0.0, np.inf
    for i in range(at.segments):
        yield {at.kept + i: 1.0, at.recomputed + i: 1.0, at.needed + i: -1.0}, 0.0, np.inf
        if i:
            yield {at.needed + i: 1.0, at.needed + i - 1: -1.0}, 0.0, np.inf
    yield dict.fromkeys(range(at.trained, at.trained + at.tensors), 1.0), 1.0, np.inf


def _smallest_above(masks: Sequence[int], mask: int, start: int) -> list[int]:
    """Positions of the classes that contain `mask` and no smaller such class; `masks` are sorted by size."""
    found: list[int] = []
    for c in range(start, len(masks)):
        other = masks[c]
        if other & mask == mask and other != mask and not any(masks[f] & other == masks[f] for f in found):
            found.append(c)
        elif other == mask:
            return [c]
    return found


def _step_flops(problem: Problem, at: _Positions, masks: Sequence[int]) -> dict[int, float]:
    """FLOPs beyond the forward's by variable, as parts of a full step's."""
    full = float(max(problem.costs.step_flops, 1))
    by_class = dict.fromkeys(masks, 0)
    for mask, flops in problem.costs.classes:
        by_class[mask] += flops
    step = {at.running + i: by_class[mask] / full for i, mask in enumerate(masks)}
    step |= {at.recomputed + i: flops / full for i, (_, flops) in enumerate(problem.segments)}
    return step | {at.compressed + k: t.compressed_flops / full for k, t in enumerate(problem.tensors)}


def _objective(problem: Problem, at: _Positions, step: Mapping[int, float]) -> np.ndarray:
    """What is minimised: importance that is lost, and then FLOPs, and what approximates them."""
    objective = np.zeros(at.peak + 1)
    total = sum(problem.importance) or 1.0
    for k, value in enumerate(problem.importance):
        objective[at.trained + k] -= value / total
        objective[at.compressed + k] += (1 - problem.kept_value) * value / total
    for v, part in step.items():
        objective[v] += FEWER_FLOPS * part
    return objective


def _bounds(problem: Problem, at: _Positions, train_all: bool, may_recompute: bool, smallest_memory: bool) -> Bounds:
    """What is decided beforehand; see `solve`."""
    lower, upper = np.zeros(at.peak + 1), np.ones(at.peak + 1)
    upper[at.peak] = np.inf
    for k, (tensor, value) in enumerate(zip(problem.tensors, problem.importance, strict=True)):
        if tensor.compressed is None:
            upper[at.compressed + k] = 0.0
        if train_all and value > 0:
            lower[at.trained + k] = 1.0
        elif train_all or (not smallest_memory and value <= 0):
            upper[at.trained + k] = 0.0
    if not may_recompute:
        upper[at.recomputed : at.recomputed + at.segments] = 0.0
    return Bounds(lower, upper)


def _needed(
    problem: Problem, train: tuple[int, ...], compressed: tuple[int, ...], recomputed: tuple[int, ...], most: int | None
) -> tuple[int, ...]:
    """Segments to compute again less those without which a step stays within `most` bytes: some cost no FLOPs, but time."""
    for i in recomputed:
        fewer = tuple(j for j in recomputed if j != i)
        if most is None or evaluate(problem, train, compressed, fewer)[1] <= most:
            recomputed = fewer
    return recomputed


def _moments(problem: Problem, at: _Positions) -> Iterator[dict[int, float]]:
    """Bytes beyond the fixed ones at every moment, by variable."""
    base: dict[int, float] = {}
    for k, tensor in enumerate(problem.tensors):
        base[at.trained + k] = tensor.state
        base[at.compressed + k] = (tensor.compressed or 0) - tensor.state
    for j in range(at.segments + 1):  # the last is the optimizer's step
        moment = dict(base)
        for k, tensor in enumerate(problem.tensors):
            if tensor.segment >= j or j == at.segments:
                moment[at.trained + k] += tensor.gradient
                moment[at.compressed + k] -= tensor.gradient
        if j < at.segments:
            moment |= {at.kept + i: problem.segments[i][0] for i in range(j)}
            moment |= {at.needed + i: held for i, held in enumerate(problem.held[:j])}
            moment[at.needed + j] = problem.segments[j][0] + problem.held[j]
        yield moment


_one_at_a_time = threading.Lock()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """HiGHS prints a debugging line to the process's standard output on some problems, which would spoil `--json`."""
    with _one_at_a_time, contextlib.ExitStack() as stack:  # a second thread would leave the null device as the standard output
        with contextlib.suppress(AttributeError, OSError, ValueError):  # it is closed, or there is none, as in a daemon
            sys.stdout.flush()
        with contextlib.suppress(OSError):
            saved = os.dup(1)
            stack.callback(os.close, saved)
            stack.callback(os.dup2, saved, 1)
            with open(os.devnull, "wb") as null:
                os.dup2(null.fileno(), 1)
        yield

"""Exact selection on any graph: a mixed-integer program over the contracted backward nodes (HiGHS through SciPy)."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator, Sequence

import numpy as np
from scipy.optimize import Bounds, milp

from graphopt.planner.costs import BackwardCosts
from graphopt.planner.rows import Rows


def graph_milp(costs: BackwardCosts, importance: Sequence[float], limit: int, time_limit: float) -> list[int]:
    """The most valuable selection whose live backward nodes cost at most `limit`.

    Maximise sum_k I_k x_k with x_k binary, one activity 0 <= y_c <= 1 per class, y_c >= y_d where class c serves all that d
    serves (so only the smallest classes above need a row), y_c >= x_k for the smallest classes that serve k, and
    sum_c flops_c y_c <= limit. With x binary, the smallest y are 0 or 1 by themselves.

    Args:
        importance: I_k; tensors with I_k <= 0 are not chosen.
        limit: backward FLOPs.
        time_limit: seconds.
    Returns:
        Indices; none if nothing was found in time.
    """
    candidates = [i for i, gain in enumerate(importance) if gain > 0]
    if not candidates or limit < 0:
        return []
    wanted = sum(1 << i for i in candidates)
    merged: dict[int, int] = {}
    for mask, flops in costs.masks:
        if mask & wanted:
            merged[mask & wanted] = merged.get(mask & wanted, 0) + flops
    masks = sorted(merged, key=int.bit_count)
    n, m = len(candidates), len(masks)
    rows = Rows(n + m)
    needed_by, needed_with = activities(masks, candidates)
    for k, c in needed_by:
        rows.at_least({n + c: 1.0, k: -1.0}, 0.0)
    for d, c in needed_with:
        rows.at_least({n + c: 1.0, n + d: -1.0}, 0.0)
    scale = float(max(limit, 1))
    rows.at_most({n + c: merged[mask] / scale for c, mask in enumerate(masks)}, limit / scale)
    with quiet():
        result = milp(
            c=np.concatenate([-np.asarray([importance[i] for i in candidates], dtype=float), np.zeros(m)]),
            constraints=rows.constraints(),
            integrality=np.concatenate([np.ones(n), np.zeros(m)]),
            bounds=Bounds(0.0, 1.0),
            options={"time_limit": time_limit, "mip_rel_gap": 1e-6},
        )
    if result.x is None:
        return []
    chosen = [i for k, i in enumerate(candidates) if result.x[k] > 0.5]
    while chosen and costs.cost(chosen) > limit:  # HiGHS works in floating point; FLOPs are exact
        full = costs.cost(chosen)
        chosen.remove(min(chosen, key=lambda i: importance[i] / (1 + full - costs.cost([j for j in chosen if j != i]))))
    return chosen


_one_at_a_time = threading.Lock()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """HiGHS prints a debugging line to the process's standard output on some problems, which would spoil `--json`."""
    with _one_at_a_time:  # a second thread would take the null device for the standard output, and leave it there
        saved = _copy_of_output()
        if saved is None:
            yield
            return
        null = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(null, 1)
            yield
        finally:
            os.dup2(saved, 1)
            os.close(saved)
            os.close(null)


def _copy_of_output() -> int | None:
    """A file descriptor of the standard output, with all that was written; None where there is none, as in a daemon."""
    if sys.stdout is not None:
        with contextlib.suppress(OSError, ValueError):  # it is closed
            sys.stdout.flush()
    try:
        return os.dup(1)
    except OSError:
        return None


def activities(masks: Sequence[int], tensors: Sequence[int]) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Which classes of backward nodes run with which tensors and with which other classes.

    Args:
        masks: tensors that each class serves, as bits, sorted by how many.
        tensors: bits of the tensors to look at.
    Returns:
        (position in `tensors`, position of a class that it needs), and (class, class that runs whenever it does): only the
        smallest classes above each, from which the others follow.
    """
    by_tensor = [(k, c) for k, i in enumerate(tensors) for c in _smallest_above(masks, 1 << i, 0)]
    by_class = [(d, c) for d, mask in enumerate(masks) for c in _smallest_above(masks, mask, d + 1)]
    return by_tensor, by_class


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

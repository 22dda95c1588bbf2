"""Exact selection on any graph: a mixed-integer program over the contracted backward nodes (HiGHS through SciPy)."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from graphopt.planner.costs import BackwardCosts


def graph_milp(costs: BackwardCosts, importance: Sequence[float], limit: int, time_limit: float) -> tuple[list[int], float]:
    """The most valuable selection whose live backward nodes cost at most `limit`.

    Maximise sum_k I_k x_k with x_k binary, one activity 0 <= y_c <= 1 per class, y_c >= y_d where class c serves all that d
    serves (so only the smallest classes above need a row), y_c >= x_k for the smallest classes that serve k, and
    sum_c flops_c y_c <= limit. With x binary, the smallest y are 0 or 1 by themselves.

    Args:
        importance: I_k; tensors with I_k <= 0 are not chosen.
        limit: backward FLOPs.
        time_limit: seconds.
    Returns:
        (indices, relative gap to the proven bound); ([], inf) if nothing was found in time.
    """
    candidates = [i for i, gain in enumerate(importance) if gain > 0]
    if not candidates or limit < 0:
        return [], 0.0
    wanted = sum(1 << i for i in candidates)
    merged: dict[int, int] = {}
    for mask, flops in costs.masks:
        if mask & wanted:
            merged[mask & wanted] = merged.get(mask & wanted, 0) + flops
    masks = sorted(merged, key=int.bit_count)
    n, m = len(candidates), len(masks)
    rows: list[int] = []
    columns: list[int] = []
    entries: list[float] = []
    count = 0

    def require(high: int, low: int) -> None:  # high >= low
        nonlocal count
        rows.extend((count, count))
        columns.extend((high, low))
        entries.extend((1.0, -1.0))
        count += 1

    for k, i in enumerate(candidates):
        for c in smallest_above(masks, 1 << i, 0):
            require(n + c, k)
    for d, mask in enumerate(masks):
        for c in smallest_above(masks, mask, d + 1):
            require(n + c, n + d)
    scale = float(max(limit, 1))
    budget = coo_array(([merged[mask] / scale for mask in masks], ([0] * m, [n + c for c in range(m)])), shape=(1, n + m))
    constraints = [LinearConstraint(budget.tocsr(), -np.inf, limit / scale)]
    if count:
        matrix = coo_array((entries, (rows, columns)), shape=(count, n + m)).tocsr()
        constraints.append(LinearConstraint(matrix, 0.0, np.inf))
    with quiet():
        result = milp(
            c=np.concatenate([-np.asarray([importance[i] for i in candidates], dtype=float), np.zeros(m)]),
            constraints=constraints,
            integrality=np.concatenate([np.ones(n), np.zeros(m)]),
            bounds=Bounds(0.0, 1.0),
            options={"time_limit": time_limit, "mip_rel_gap": 1e-6},
        )
    if result.x is None:
        return [], float("inf")
    chosen = [i for k, i in enumerate(candidates) if result.x[k] > 0.5]
    while chosen and costs.cost(chosen) > limit:  # HiGHS works in floating point; FLOPs are exact
        full = costs.cost(chosen)
        chosen.remove(min(chosen, key=lambda i: importance[i] / (1 + full - costs.cost([j for j in chosen if j != i]))))
    gap = float(result.mip_gap) if result.mip_gap is not None else float("inf")
    return chosen, gap


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """HiGHS prints a debugging line to the process's standard output on some problems, which would spoil `--json`."""
    sys.stdout.flush()
    saved, null = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 1)
        yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)
        os.close(null)


def smallest_above(masks: Sequence[int], mask: int, start: int) -> list[int]:
    """Positions of the classes that contain `mask` and no smaller such class; `masks` are sorted by size."""
    found: list[int] = []
    for c in range(start, len(masks)):
        other = masks[c]
        if other & mask == mask and other != mask and not any(masks[f] & other == masks[f] for f in found):
            found.append(c)
        elif other == mask:
            return [c]
    return found

"""Exact knapsack over depths (GreenTrainer's problem, Eq. 4, solved in O(N * T_q) instead of O(N^2 * T_q))."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from graphopt.planner.costs import BackwardCosts


def chain_knapsack(costs: BackwardCosts, importance: Sequence[float], limit: int, resolution: int) -> list[int]:
    """The most valuable selection under the chain model, never above the limit.

    K_{d+1}(t) = max(K_d(t), K_d(t - c_d) + I_d) is the best value among the tensors 0..d at weight-gradient cost t; with the
    deepest at depth d, what is left for them is `limit` less the chain down to d. Costs are rounded up to 1 / `resolution` of
    the limit, so a selection can waste a little of the budget but not exceed it.

    Args:
        importance: I_k, aligned with `costs.names`; tensors with I_k <= 0 are not chosen.
        limit: backward FLOPs.
        resolution: T_q, number of steps that the limit is divided into.
    Returns:
        Indices into `costs.names`.
    Source: GreenTrainer, section 3.3, with the off-by-one and the rounding of its reference corrected.
    """
    prefix = costs.chain_prefix
    depths = [d for d, chain in enumerate(prefix) if chain <= limit]
    unit = max(limit / resolution, 1e-9)
    weights = [int(np.ceil(costs.weight_grad_flops[d] / unit)) for d in depths]
    room = [min(resolution, int((limit - prefix[d]) / unit)) for d in depths]
    value = np.zeros(resolution + 1)
    taken = np.zeros((len(depths), (resolution + 1 + 7) // 8), dtype=np.uint8)
    best_value, best_depth, best_room = 0.0, -1, 0
    for row, d in enumerate(depths):
        gain, weight = importance[d], weights[row]
        if gain > 0 and weight <= resolution:
            better = np.zeros(resolution + 1, dtype=bool)
            if weight == 0:
                value += gain
                better[:] = True
            else:
                candidate = value[: resolution + 1 - weight] + gain
                np.greater(candidate, value[weight:], out=better[weight:])
                np.maximum(value[weight:], candidate, out=value[weight:])
            taken[row] = np.packbits(better)
        if value[room[row]] > best_value:
            best_value, best_depth, best_room = float(value[room[row]]), row, room[row]
    selection, t = [], best_room
    for row in range(best_depth, -1, -1):
        if taken[row, t >> 3] >> (7 - (t & 7)) & 1:
            selection.append(depths[row])
            t -= weights[row]
    return selection


def fill(costs: BackwardCosts, importance: Sequence[float], limit: int, selection: Sequence[int]) -> list[int]:
    """Add tensors while the exact cost stays within the limit, the most valuable per FLOP first.

    The knapsack's chain model is an upper bound on graphs that branch, and it rounds up; this spends what that left over.
    """
    chosen = set(selection)
    spent, wanted = costs.cost(chosen), sum(1 << i for i in chosen)
    idle = [(mask, flops) for mask, flops in costs.classes if not mask & wanted]
    while True:
        best, best_density, best_cost = -1, 0.0, 0
        for i, gain in enumerate(importance):
            if i in chosen or gain <= 0:
                continue
            extra = sum(flops for mask, flops in idle if mask >> i & 1)
            if spent + extra <= limit and gain / (extra + 1) > best_density:
                best, best_density, best_cost = i, gain / (extra + 1), extra
        if best < 0:
            return sorted(chosen)
        chosen.add(best)
        spent += best_cost
        idle = [(mask, flops) for mask, flops in idle if not mask >> best & 1]

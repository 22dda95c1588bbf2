"""GreenTrainer's own selection, flaws included, for comparison with ours."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def paper_selection(
    input_grad_flops: Sequence[int],
    weight_grad_flops: Sequence[int],
    importance: Sequence[float],
    limit: int,
    resolution: int,
) -> list[int]:
    """The recurrence of Eq. 7 as its authors implemented it.

    Costs are rounded down, so the result may exceed the limit; the last admissible tensor is never considered; a state is
    extended only where selecting was strictly better.

    Args:
        input_grad_flops, weight_grad_flops: t_dy and t_dw, from the output to the input.
        importance: I_k in the same order.
        limit: backward FLOPs.
        resolution: T_q steps for the full backward; 1e3 in the authors' code.
    Returns:
        Selected indices.
    Source: GreenTrainer, section 3.3, and `selection_DP` of its reference implementation.
    """
    count = len(importance)
    total = sum(input_grad_flops) + sum(weight_grad_flops)
    quantised_dy = [int(flops * resolution / total) for flops in input_grad_flops]
    quantised_dw = [int(flops * resolution / total) for flops in weight_grad_flops]
    budget = int(limit / total * (sum(quantised_dy) + sum(quantised_dw)))
    below = np.flatnonzero(np.cumsum(quantised_dy) > budget)
    deepest = int(below[0]) if len(below) else count - 1
    value = np.zeros((deepest + 1, budget + 1))
    chosen = np.zeros((deepest + 1, budget + 1), dtype=bool)
    members = np.zeros((deepest + 1, budget + 1, count), dtype=bool)
    for k in range(1, deepest + 1):
        for t in range(budget + 1):
            value[k, t], members[k, t] = value[k - 1, t], members[k - 1, t]
            rest = t - quantised_dw[k - 1]
            for earlier in range(k - 1, -1, -1):
                rest -= quantised_dy[earlier]
                if rest < 0:
                    break
                if not (chosen[earlier, rest] or earlier == 0):
                    continue
                if value[earlier, rest] + importance[k - 1] > value[k, t]:
                    value[k, t] = value[earlier, rest] + importance[k - 1]
                    members[k, t] = members[earlier, rest]
                    members[k, t, k - 1] = True
                    chosen[k, t] = True
    return [int(i) for i in np.flatnonzero(members[deepest, budget])]

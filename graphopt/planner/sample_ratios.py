"""How many rows a sampler keeps, so that the variance it adds stays a stated part of the mini-batch's own (VCAS, section 5).

Pure functions of what a calibration measured; `graphopt.runtime.sampling` measures it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

LEVELS = 8
"""Ratios are rounded up to multiples of 1 / LEVELS, so that few different steps are compiled."""

SMOOTHING = 0.6
"""How much of a ratio remains when it falls, as in the paper's code; it rises at once, so that too much variance ends soon."""


@dataclass(frozen=True)
class Calibration:
    """What was measured on M batches.

    Attributes:
        norms: per boundary, per batch, the norms of the samples' gradients (exact).
        batch_variance: V_s, of the mini-batch gradient, over all weights measured.
        rows_variance: V_act, that keeping rows adds at the present ratios.
        weight_variance: V_s of each weight by name.
        tokens_variance: V_w, that keeping some terms of each weight's gradient adds at the present ratios.
    """

    norms: Mapping[str, Sequence[Tensor]]
    batch_variance: float
    rows_variance: float
    weight_variance: Mapping[str, float]
    tokens_variance: Mapping[str, float]


@dataclass(frozen=True)
class SampleRatios:
    """The controller's state.

    Attributes:
        preserved: s, the part of the sum of gradient norms that the kept rows must have.
        rows: rho by boundary, from the output to the input.
        tokens: nu by weight.
    """

    preserved: float = 1.0
    rows: Mapping[str, float] = field(default_factory=dict)
    tokens: Mapping[str, float] = field(default_factory=dict)


def kept_fraction(norms: Tensor, preserved: float) -> float:
    """p(s): the smallest part of the rows whose norms add up to the part `preserved` of all (Eq. 4).

    Args:
        norms: (N,) of the samples' gradients.
        preserved: s, between 0 and 1.
    """
    ordered = norms.double().sort(descending=True).values
    total = float(ordered.sum())
    if not math.isfinite(total) or total <= 0:
        return 1.0
    enough = (ordered.cumsum(0) >= preserved * total * (1 - 1e-12)).nonzero()
    return (int(enough[0]) + 1) / norms.numel()


def adapt(
    state: SampleRatios,
    seen: Calibration,
    parents: Mapping[str, str | None],
    tolerance: float,
    step: float = 0.01,
    factor: float = 0.95,
    fewest: float = 0.0,
) -> SampleRatios:
    """The next ratios (Eq. 4, 5 and 7, their signs and schedules corrected).

    Args:
        parents: the boundary above each, None for the first; a boundary keeps no more rows than the one above it.
        tolerance: tau, for rows and for tokens each.
        step: alpha, by which `preserved` changes.
        factor: beta, by which a weight's ratio changes.
        fewest: the smallest ratio of tokens.
    Returns:
        `state` itself where the mini-batch variance is zero or not finite, so that nothing can be compared with it.
    """
    if not (math.isfinite(seen.batch_variance) and seen.batch_variance > 0 and math.isfinite(seen.rows_variance)):
        return state
    too_much = seen.rows_variance > tolerance * seen.batch_variance
    preserved = min(1.0, max(0.0, state.preserved + (step if too_much else -step)))
    fractions = {name: sum(kept_fraction(n, preserved) for n in norms) / max(len(norms), 1) for name, norms in seen.norms.items()}
    wanted = dict(fractions)
    for name in reversed(list(parents)):
        above = parents[name]
        if above is not None:
            wanted[above] = max(wanted[above], wanted[name])
    rows = {n: max(r, SMOOTHING * state.rows.get(n, 1.0) + (1 - SMOOTHING) * r) for n, r in wanted.items()}
    tokens = {}
    for name, variance in seen.tokens_variance.items():
        ratio = state.tokens.get(name, 1.0)
        own = seen.weight_variance.get(name, 0.0)
        if math.isfinite(variance) and math.isfinite(own) and own > 0:
            ratio *= 1 / factor if variance > tolerance * own else factor
        tokens[name] = min(1.0, max(fewest, ratio))
    return replace(state, preserved=preserved, rows=rows, tokens=tokens)


def bucket(ratio: float, levels: int = LEVELS) -> float:
    """The smallest multiple of 1 / `levels` that is not below `ratio`."""
    return min(1.0, max(1, math.ceil(ratio * levels - 1e-9)) / levels)

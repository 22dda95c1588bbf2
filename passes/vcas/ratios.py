"""How many rows a sampler keeps, so that the variance it adds stays a stated part of the mini-batch's own (VCAS, section 5).

Pure functions of what a calibration measured; `controller` measures it. Unlike in the paper, ratios are measured
before they are installed: a calibration proposes fewer rows (`proposed`), measures the variance that those would add, and
takes steps back (`corrected`) until that is within the budget.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

LEVELS = 8
"""Ratios are rounded up to multiples of 1 / LEVELS, so that few different steps are compiled."""

SMOOTHING = 0.6
"""How much of a ratio remains when it falls, as in the paper's code."""


@dataclass(frozen=True)
class Norms:
    """What the exact passes of a calibration found on M batches.

    Attributes:
        rows: per boundary, per batch, the norms of the samples' gradients.
        parents: the boundary above each, None for the first; a boundary keeps no more rows than the one above it.
    """

    rows: Mapping[str, Sequence[Tensor]]
    parents: Mapping[str, str | None]

    def joined(self, of_ranks: Sequence[Mapping[str, Sequence[Tensor]]]) -> Norms:
        """With the batches of all ranks."""
        return Norms({name: [n for rows in of_ranks for n in rows[name]] for name in self.rows}, self.parents)

    def fractions(self, preserved: float) -> dict[str, float]:
        """rho by boundary: mean of p(s) over batches, at least that of every boundary below."""
        found = {name: sum(kept_fraction(n, preserved) for n in norms) / max(len(norms), 1) for name, norms in self.rows.items()}
        for name in reversed(list(self.parents)):
            above = self.parents[name]
            if above is not None:
                found[above] = max(found[above], found[name])
        return found


def weight_of(product: str) -> str:
    """The weight of a product; a weight that is used several times has several, of which all but the first are numbered."""
    return product.split(" #")[0]


@dataclass(frozen=True)
class Calibration:
    """The variances of gradients, measured on M batches with M sampled passes each.

    Attributes:
        batch_variance: V_s, of the mini-batch gradient, over all weights measured.
        rows_variance: V_act, that keeping rows adds.
        weight_variance: V_s of each weight by name.
        tokens_variance: V_w by product, that keeping some terms of it adds to the gradient of its weight; see `weight_of`.
    """

    batch_variance: float
    rows_variance: float
    weight_variance: Mapping[str, float]
    tokens_variance: Mapping[str, float]

    @classmethod
    def mean(cls, found: Sequence[Calibration]) -> Calibration:
        """Of what several ranks have measured, each with its own batches and draws."""

        def each(named: Sequence[Mapping[str, float]]) -> dict[str, float]:
            return {name: sum(values[name] for values in named) / len(named) for name in named[0]}

        return cls(
            sum(seen.batch_variance for seen in found) / len(found),
            sum(seen.rows_variance for seen in found) / len(found),
            each([seen.weight_variance for seen in found]),
            each([seen.tokens_variance for seen in found]),
        )

    @property
    def comparable(self) -> bool:
        """Whether there is a mini-batch variance to compare with."""
        return math.isfinite(self.batch_variance) and self.batch_variance > 0

    def rows_fit(self, tolerance: float) -> bool:
        """Whether keeping rows adds at most the part `tolerance`; not if that is not finite."""
        return self.rows_variance <= tolerance * self.batch_variance

    def too_few_terms(self, tolerance: float) -> list[str]:
        """Weights to which leaving out terms adds more than the part `tolerance`, or a variance that is not finite."""
        added: dict[str, float] = defaultdict(float)  # draws are independent
        for name, variance in self.tokens_variance.items():
            added[weight_of(name)] += variance
        most = {name: tolerance * self.weight_variance.get(name, 0.0) for name in added}
        return [name for name in self.tokens_variance if not added[weight_of(name)] <= most[weight_of(name)]]


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

    @property
    def rounded(self) -> SampleRatios:
        """As they are installed, see `bucket`."""
        return SampleRatios(
            self.preserved, {n: bucket(r) for n, r in self.rows.items()}, {n: bucket(r) for n, r in self.tokens.items()}
        )


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


def proposed(
    state: SampleRatios, norms: Norms, weights: Iterable[str], step: float = 0.01, factor: float = 0.95, fewest: float = 0.0
) -> SampleRatios:
    """The next lower ratios (Eq. 4, 5 and 7 where the variance is within its budget).

    Args:
        weights: names of the products whose terms are sampled.
        step: alpha, by which `preserved` falls.
        factor: beta, by which a weight's ratio falls.
        fewest: the smallest ratio of tokens.
    """
    preserved = max(0.0, state.preserved - step)
    tokens = {name: min(1.0, max(fewest, state.tokens.get(name, 1.0) * factor)) for name in weights}
    return SampleRatios(preserved, _rows(state, norms, preserved), tokens)


def corrected(
    candidate: SampleRatios,
    seen: Calibration,
    state: SampleRatios,
    norms: Norms,
    for_rows: float,
    for_terms: float,
    step: float = 0.01,
    factor: float = 0.95,
) -> SampleRatios:
    """`candidate` with a higher ratio, as installed, wherever it would add too much variance (Eq. 5 and 7, the other way).

    Args:
        seen: measured with `candidate`.
        state: the ratios until now, towards which rows are smoothed.
        for_rows, for_terms: parts of the mini-batch's own variance that rows may add, and terms to each weight's.
    Returns:
        `candidate` itself where all is within the budget.
    """
    preserved, rows = candidate.preserved, candidate.rows
    while rows and step > 0 and not seen.rows_fit(for_rows) and preserved < 1.0:
        preserved = min(1.0, preserved + step)
        rows = _rows(state, norms, preserved)
        if any(bucket(r) > bucket(candidate.rows[n]) for n, r in rows.items()):
            break
    tokens = dict(candidate.tokens)
    for name in seen.too_few_terms(for_terms):
        before = tokens[name]
        while tokens[name] < 1.0 and bucket(tokens[name]) == bucket(before):
            tokens[name] = min(1.0, tokens[name] / factor)
    changed = (preserved, tokens) != (candidate.preserved, dict(candidate.tokens))
    return SampleRatios(preserved, rows, tokens) if changed else candidate


def _rows(state: SampleRatios, norms: Norms, preserved: float) -> dict[str, float]:
    """rho at `preserved`, falling slowly and rising at once; all rows if all is to be preserved."""
    if preserved >= 1.0:
        return dict.fromkeys(norms.rows, 1.0)
    wanted = norms.fractions(preserved)
    return {n: max(r, SMOOTHING * state.rows.get(n, 1.0) + (1 - SMOOTHING) * r) for n, r in wanted.items()}


def bucket(ratio: float) -> float:
    """The smallest multiple of 1 / `LEVELS` that is not below `ratio`."""
    return min(1.0, max(1, math.ceil(ratio * LEVELS - 1e-9)) / LEVELS)


def keeps_as_much(known: Mapping[str, float], wanted: Mapping[str, float]) -> bool:
    """Whether a set of ratios keeps at least what is wanted everywhere."""
    return all(known.get(name, 1.0) >= ratio for name, ratio in wanted.items())

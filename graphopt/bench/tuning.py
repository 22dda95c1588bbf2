"""The search for a learning rate by which benchmarks tune everything alike: doubled or halved until the best lies between two."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def next_rate(tried: Iterable[tuple[float, float]], first: float) -> float | None:
    """The next learning rate to try; None where the best of those tried lies between two others.

    Args:
        tried: (learning rate, accuracy).
        first: where the search begins.
    """
    found = dict(tried)
    if not found:
        return first
    best = best_rate(found)
    if best == min(found):
        return best / 2
    return best * 2 if best == max(found) else None


def best_rate(tried: Mapping[float, float]) -> float:
    """The learning rate that gave the best accuracy; the one tried first of several."""
    return max(tried, key=lambda rate: tried[rate])

"""Simple rules of selection, to compare with: tensors in a stated order, as long as the exact cost allows."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping

from graphopt.planner.costs import BackwardCosts

Shapes = Mapping[str, tuple[int, ...]]


def in_order(costs: BackwardCosts, order: Iterable[int], limit: int) -> list[int]:
    """Tensors in `order`, each unless the exact backward FLOPs would exceed `limit`."""
    chosen: list[int] = []
    for index in order:
        if costs.cost([*chosen, index]) <= limit:
            chosen.append(index)
    return sorted(chosen)


def topmost(costs: BackwardCosts, shapes: Shapes, limit: int) -> list[int]:
    """From the output down."""
    return in_order(costs, range(len(costs.names)), limit)


def small_first(costs: BackwardCosts, shapes: Shapes, limit: int) -> list[int]:
    """Biases and norms as deep as the limit reaches, then from the output down (BitFit, arXiv 2106.10199)."""
    small = [k for k, name in enumerate(costs.names) if is_vector(shapes[name])]
    return in_order(costs, dict.fromkeys([*small, *range(len(costs.names))]), limit)


def shuffled(costs: BackwardCosts, shapes: Shapes, limit: int, seed: int = 0) -> list[int]:
    """In a random order."""
    order = list(range(len(costs.names)))
    random.Random(seed).shuffle(order)
    return in_order(costs, order, limit)


def is_vector(shape: tuple[int, ...]) -> bool:
    """Whether a tensor has one dimension at most, but for sizes of 1: a bias, a norm."""
    return math.prod(shape) <= max(shape, default=1)


SIMPLE_RULES: dict[str, Callable[[BackwardCosts, Shapes, int], list[int]]] = {
    "topmost": topmost,
    "biases and norms first": small_first,
    "random": shuffled,
}
"""Rules that a report rates beside its own."""

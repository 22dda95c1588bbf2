"""Contraction orders under a limit on memory: as much is computed again as the limit needs, where that costs least."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping

import torch
from graphopt.passes.runlora.choose import Choice
from graphopt.passes.runlora.rewrite import reorder
from torch import fx

from graphopt.graph import TrainingGraph
from graphopt.planner.memory_limit import MemoryLimit

ChooseOrders = Callable[[float], dict[str, Choice]]
"""Orders by the price of a byte kept for the backward; see `choose_orders`."""

_peaks: weakref.WeakKeyDictionary[fx.GraphModule, dict[Hashable, int]] = weakref.WeakKeyDictionary()

_LOWEST, _HIGHEST, _STEPS = -18.0, 18.0, 24
"""Decimal exponents between which the price is looked for, and halvings: seconds on a fast device and FLOPs both fit."""


def orders_within(limit: MemoryLimit, graph: TrainingGraph, batch_size: int, choose: ChooseOrders) -> dict[str, Choice]:
    """The cheapest orders with which a step stays within `limit`; if none do, those that keep the fewest bytes.

    Orders are rewritten into the graph and their peak predicted; the excess tells how many bytes fewer must be kept. A graph that
    serves several lengths has no one peak: there orders keep no more than the model's own.
    """
    choices = choose(0.0)
    if any(isinstance(node.meta["val"], torch.SymInt) for node in graph.placeholders):
        before = sum(choice.saved_before for choice in choices.values())
        return choices if _saved(choices) <= before else _cheapest(choose, before)
    least = choose(10.0**_HIGHEST)
    target = _saved(choices)
    while _saved(choices) > _saved(least):
        excess = _peak(limit, graph, batch_size, choices) - limit.peak_bytes
        if excess <= 0:
            break
        target = min(target, _saved(choices)) - excess
        choices = _cheapest(choose, target)
    return choices


def _cheapest(choose: ChooseOrders, saved: int) -> dict[str, Choice]:
    """Orders that keep at most `saved` bytes, at the lowest price that does so; else those of the highest price."""
    low, high = _LOWEST, _HIGHEST
    best = choose(10.0**high)
    for _ in range(_STEPS):
        middle = (low + high) / 2
        found = choose(10.0**middle)
        if _saved(found) <= saved:
            best, high = found, middle
        else:
            low = middle
    return best


def _saved(choices: Mapping[str, Choice]) -> int:
    return sum(choice.saved_after for choice in choices.values())


def _peak(limit: MemoryLimit, graph: TrainingGraph, batch_size: int, choices: Mapping[str, Choice]) -> int:
    """Of a step with these orders, predicted once: plans that differ in what runs later share the graph."""
    known = _peaks.setdefault(graph.module, {})
    key = limit.key, batch_size, tuple((name, choice.order) for name, choice in choices.items())
    if key not in known:
        known[key] = limit.peak_of(_rewritten(graph, choices), batch_size)
    return known[key]


def _rewritten(graph: TrainingGraph, choices: Mapping[str, Choice]) -> TrainingGraph:
    result = graph.clone()
    reorder(result, {name: choice.order for name, choice in choices.items()})
    return result

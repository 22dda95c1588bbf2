"""Contraction orders under a limit on memory: as much is computed again as the limit needs, where that costs least."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from graphopt.analysis.step_memory import step_memory
from graphopt.budget import Budget
from graphopt.graph import TrainingGraph
from graphopt.lower import Backend
from graphopt.passes import RunLora, run_pass
from graphopt.planner.contraction import Choice

ChooseOrders = Callable[[float], dict[str, Choice]]
"""Orders by the price of a byte kept for the backward; see `choose_orders`."""

_LOWEST, _HIGHEST, _STEPS = -18.0, 18.0, 24
"""Decimal exponents between which the price is looked for, and halvings: seconds on a fast device and FLOPs both fit."""


@dataclass(frozen=True)
class MemoryLimit:
    """A limit on the peak of a step, as `graphopt.analyze(...).memory` foretells it.

    Attributes:
        peak_bytes: the most that a step may need.
        backend: "inductor" or "aot_eager".
        optimizer: whose state and temporaries count.
    """

    peak_bytes: int
    backend: str
    optimizer: Any = "adamw"
    _known: dict[Hashable, tuple[TrainingGraph, int]] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, budget: Budget, backend: Backend, optimizer: Any = None) -> MemoryLimit | None:
        """The limit that a budget states, if any; AdamW's memory counts where no optimizer is given."""
        if not isinstance(budget.memory, int):
            return None
        return cls(budget.memory, "inductor" if backend == "inductor" else "aot_eager", optimizer or "adamw")

    def peak_of(self, graph: TrainingGraph, batch_size: int) -> int:
        """Peak bytes of a step of `graph`."""
        memory = step_memory(graph, self.backend, self.optimizer)
        return (memory if batch_size == memory.batch_size else memory.at(batch_size)).peak_bytes

    def peak_once(self, graph: TrainingGraph, key: Hashable, rewritten: Callable[[], TrainingGraph], batch_size: int) -> int:
        """Peak bytes of a step of what `rewritten` makes of `graph`; foretold once for every `key` and batch size."""
        captured, peak = self._known.get((key, batch_size), (None, 0))
        if captured is not graph:
            peak = self.peak_of(rewritten(), batch_size)
            self._known[key, batch_size] = (graph, peak)
        return peak


def orders_within(limit: MemoryLimit, graph: TrainingGraph, batch_size: int, choose: ChooseOrders) -> dict[str, Choice]:
    """The cheapest orders with which a step stays within `limit`; if none do, those that keep the fewest bytes.

    Orders are rewritten into the graph and their peak foretold; the excess tells how many bytes fewer must be kept.
    """
    choices = choose(0.0)
    least = choose(10.0**_HIGHEST)
    target = _saved(choices)
    while _saved(choices) > _saved(least):
        excess = limit.peak_of(_rewritten(graph, choices), batch_size) - limit.peak_bytes
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


def _rewritten(graph: TrainingGraph, choices: Mapping[str, Choice]) -> TrainingGraph:
    return run_pass(RunLora(), graph, {name: choice.order for name, choice in choices.items()})[0]

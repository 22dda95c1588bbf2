"""A limit on the peak of a step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch

from graphopt.analysis.optimizers import optimizer_memory, unwrapped
from graphopt.analysis.step_memory import step_memory
from graphopt.budget import Budget
from graphopt.errors import InputError, first_line
from graphopt.graph import TrainingGraph
from graphopt.lower import Backend

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class MemoryLimit:
    """A limit on the peak of a step, as `graphopt.analyze(...).memory` predicts it.

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
    def of(
        cls, budget: Budget, backend: Backend, optimizer: Any = None, graph: TrainingGraph | None = None
    ) -> MemoryLimit | None:
        """The limit that a budget states, if any; AdamW's memory counts where no optimizer is given.

        Args:
            graph: with the tensors that `optimizer` is tried on; where the trial fails, AdamW's memory counts, too.
        """
        if not isinstance(budget.memory, int):
            return None
        optimizer = unwrapped(optimizer)
        try:
            if graph is not None:
                optimizer_memory(optimizer, graph.trainable, graph.example.device)
        except InputError as error:
            cause, name = first_line(error.__cause__ or error), type(optimizer).__name__
            logger.warning("The memory of %s cannot be predicted (%s): AdamW's counts in its place.", name, cause)
            optimizer = None
        return cls(budget.memory, "inductor" if backend == "inductor" else "aot_eager", optimizer or "adamw")

    @property
    def key(self) -> Hashable:
        """What decisions within it depend on, as text that is the same in every process; a rate of learning takes no memory."""
        optimizer = repr(self.optimizer)
        if isinstance(self.optimizer, torch.optim.Optimizer):
            kind = type(self.optimizer)
            settings = {name: value for name, value in self.optimizer.defaults.items() if name != "lr"}
            optimizer = f"{kind.__module__}.{kind.__qualname__} {settings}"
        return self.peak_bytes, self.backend, optimizer

    def peak_of(self, graph: TrainingGraph, batch_size: int) -> int:
        """Peak bytes of a step of `graph`."""
        memory = step_memory(graph, self.backend, self.optimizer)
        return (memory if batch_size == memory.batch_size else memory.at(batch_size)).peak_bytes

    def peak_once(self, graph: TrainingGraph, key: Hashable, rewritten: Callable[[], TrainingGraph], batch_size: int) -> int:
        """Peak bytes of a step of what `rewritten` makes of `graph`; predicted once for every `key` and batch size."""
        captured, peak = self._known.get((key, batch_size), (None, 0))
        if captured is not graph:
            peak = self.peak_of(rewritten(), batch_size)
            self._known[key, batch_size] = (graph, peak)
        return peak

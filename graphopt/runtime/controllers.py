"""Controllers: what adapts a plan while training runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from graphopt.errors import InputError
from graphopt.runtime.module import OptimizedModule
from graphopt.runtime.plain_values import from_plain, to_plain
from graphopt.runtime.reselection import Reselection


@dataclass(eq=False)
class Every:
    """Counts steps and says when `every` have passed; raises `InputError` unless that is at least 1."""

    every: int
    steps: int = 0

    def __post_init__(self) -> None:
        if self.every < 1:
            raise InputError(f"every={self.every} must be at least 1 step.")

    def after_step(self, count: int = 1) -> bool:
        """Count a step, or several; whether the last of `every` is among them."""
        before, self.steps = self.steps, self.steps + count
        return self.steps // self.every > before // self.every

    @property
    def remaining(self) -> int:
        """Steps until the next that is the last of `every`."""
        return self.every - self.steps % self.every

    def snapshot(self) -> Any:
        """See `Stateful`."""
        return to_plain(self)

    def prepare(self, snapshot: Any) -> Callable[[], None]:
        """See `Stateful`."""
        saved = from_plain(Every, snapshot, "a controller's count")
        if saved.every != self.every:
            raise InputError(f"it was saved with a controller of every={saved.every}, and this model's has every={self.every}.")
        if saved.steps < 0:
            raise InputError(f"a controller's count is {saved.steps} steps.")
        return lambda: setattr(self, "steps", saved.steps)


@dataclass(frozen=True)
class _SelectionState:
    due: Any
    history: tuple[Reselection, ...]


class SelectionController:
    """Selects tensors anew every so many steps, by default to be set to one epoch (GreenTrainer, A.5).

    Example:
        controller = SelectionController(opt, optimizer, every=len(loader))
        for batch in loader:
            ...  # forward, backward, optimizer.step()
            controller.after_step(batch)
    """

    def __init__(
        self, opt: OptimizedModule, optimizer: torch.optim.Optimizer | None, every: int, tolerance: float = 0.05
    ) -> None:
        """Set up a controller.

        Args:
            opt: the optimised model.
            optimizer: the one that trains it.
            every: steps between selections; an epoch is `len(loader)`.
            tolerance: see `OptimizedModule.reselect`.
        Raises:
            InputError: `every` is below 1.
        """
        self.opt = opt
        self.optimizer = optimizer
        self.due = Every(every)
        self.tolerance = tolerance
        self.history: list[Reselection] = []
        opt.controllers.add(self)

    def after_step(self, batch: Any) -> Reselection | None:
        """Count a step; when it is time, select anew from `batch`.

        Returns:
            What the selection did, or None between selections.
        """
        if not self.due.after_step():
            return None
        outcome = self.opt.reselect(batch, self.optimizer, self.tolerance)
        self.history.append(outcome)
        return outcome

    def snapshot(self) -> Any:
        """See `Stateful`."""
        return to_plain(_SelectionState(self.due.snapshot(), tuple(self.history)))

    def prepare(self, snapshot: Any) -> Callable[[], None]:
        """See `Stateful`."""
        saved = from_plain(_SelectionState, snapshot, "SelectionController")
        restore_count = self.due.prepare(saved.due)

        def restore() -> None:
            restore_count()
            self.history = list(saved.history)

        return restore


class MergeController:
    """Looks every so many steps whether adapters have grown enough to be merged with their weights in low precision.

    A merged order computes X(W + cAB). While cAB is small against W, rounding W + cAB loses it, so such layers are computed
    unmerged. In float32 nothing is lost, and this controller changes nothing, unless products calculate in TF32 or bfloat16.

    Example:
        controller = MergeController(opt, every=100)
        for batch in loader:
            ...  # forward, backward, optimizer.step()
            controller.after_step()
    """

    def __init__(self, opt: OptimizedModule, every: int) -> None:
        """Set up a controller.

        Args:
            opt: the optimised model.
            every: steps between looks.
        Raises:
            InputError: `every` is below 1.
        """
        self.opt = opt
        self.due = Every(every)
        opt.controllers.add(self)

    def after_step(self) -> bool:
        """Count a step; when it is time, look. Returns whether a layer's order may change with the next step."""
        return self.due.after_step() and self.opt.recheck_merges()

    def snapshot(self) -> Any:
        """See `Stateful`."""
        return self.due.snapshot()

    def prepare(self, snapshot: Any) -> Callable[[], None]:
        """See `Stateful`."""
        return self.due.prepare(snapshot)

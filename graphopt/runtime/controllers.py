"""Controllers: what adapts a plan while training runs."""

from __future__ import annotations

from typing import Any

import torch

from graphopt.errors import InputError
from graphopt.runtime.module import OptimizedModule, Reselection


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
        if every < 1:
            raise InputError(f"every={every} must be at least 1 step.")
        self.opt = opt
        self.optimizer = optimizer
        self.every = every
        self.tolerance = tolerance
        self.steps = 0
        self.history: list[Reselection] = []

    def after_step(self, batch: Any) -> Reselection | None:
        """Count a step; when it is time, select anew from `batch`.

        Returns:
            What the selection did, or None between selections.
        """
        self.steps += 1
        if self.steps % self.every:
            return None
        outcome = self.opt.reselect(batch, self.optimizer, self.tolerance)
        self.history.append(outcome)
        return outcome

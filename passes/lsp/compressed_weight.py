"""One weight whose gradient is compressed, and the projectors in force for it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from graphopt.passes.lsp.compressor import given_inputs
from graphopt.passes.lsp.learning import GradientMoments
from graphopt.passes.lsp.projectors import Subspace
from torch import Tensor, nn

from graphopt.compat import InputDesc

Changed = Callable[[str, Subspace, Subspace, Tensor], None]
"""Told the name of a weight, its old subspace, its new one, and the energy in it that the old one left out (`unseen_energy`)."""


@dataclass
class CompressedWeight:
    """One weight (m x n) whose gradient is compressed.

    Attributes:
        variable: D (s x s), whose `.grad` is P'GQ; zero, in no memory of its own.
        subspace: P and Q, on the weight's device.
        error: |PP'GQQ' - G| / |G| when last looked at; NaN before.
        fits: how often P and Q were fitted.
        skipped: steps that were left out because the compressed gradient was not finite.
        changed: whom to tell of a new subspace.
        next: fitted, with its `unseen_energy`, but not in force before the step under way is over.
        gathered: sum of the full gradients of a check under way, on the host; None: none yet.
        moments: second moments of the same, by which new projectors are learned; None: none yet.
        batches: how many those are.
        inputs: the projectors as a compiled step reads them.
    """

    name: str
    shape: tuple[int, int]
    variable: nn.Parameter
    subspace: Subspace
    error: float = math.nan
    fits: int = 0
    skipped: int = 0
    changed: Changed | None = None
    next: tuple[Subspace, Tensor] | None = None
    gathered: Tensor | None = None
    moments: GradientMoments | None = None
    batches: int = 0
    inputs: dict[InputDesc, Tensor] = field(default_factory=dict)

    def install(self, subspace: Subspace) -> None:
        """Put a subspace in force."""
        self.subspace, self.next = subspace, None
        self.inputs = given_inputs(self.name, subspace)

    def follow(self, device: torch.device) -> None:
        """Be on the device that the weight was moved to."""
        variable = self.variable
        if variable.device == device:
            return
        gradient, variable.grad = variable.grad, None
        variable.data = torch.zeros((), dtype=variable.dtype, device=device).expand(variable.shape)
        variable.grad = None if gradient is None else gradient.to(device)
        subspace = self.subspace.to(device, variable.dtype)
        if subspace is not self.subspace:
            self.install(subspace)

    def replace(self, subspace: Subspace, unseen: Tensor) -> None:
        """Put a subspace in force, and carry over what is kept in the old one."""
        before = self.subspace
        self.install(subspace)
        if self.changed is not None:
            self.changed(self.name, before, subspace, unseen)


def hooked(weight: Tensor, hook: Callable[[Tensor], None]) -> Any:
    """Register a hook on a weight that may be frozen now: torch takes none then."""
    trained = weight.requires_grad
    weight.requires_grad_(True)
    try:
        return weight.register_post_accumulate_grad_hook(hook)
    finally:
        weight.requires_grad_(trained)

"""One weight whose gradient is compressed, the projectors in force for it, and what a checkpoint keeps of both."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from graphopt.passes.lsp.compressor import given_inputs
from graphopt.passes.lsp.learning import GradientMoments, block_sizes
from graphopt.passes.lsp.projectors import Projector, Subspace, entries_per_column
from graphopt.passes.lsp.technique import Lsp
from torch import Tensor, nn

from graphopt.compat import InputDesc
from graphopt.errors import InputError

Changed = Callable[[str, Subspace, Subspace, Tensor], None]
"""Told the name of a weight, its old subspace, its new one, and the energy in it that the old one left out (`unseen_energy`)."""


@dataclass(kw_only=True)
class WeightState:
    """What a checkpoint keeps of a compressed weight (m x n).

    Attributes:
        subspace: P and Q, on the weight's device.
        error: |PP'GQQ' - G| / |G| when last looked at; NaN before.
        fits: how often P and Q were fitted.
        skipped: steps that were left out because the compressed gradient was not finite.
        next: fitted, with its `unseen_energy`, but not in force before the step under way is over.
        gathered: sum of the full gradients of a check under way, on the host; None: none yet.
        moments: second moments of the same, by which new projectors are learned; None: none yet.
        batches: how many those are.
    """

    subspace: Subspace
    error: float = math.nan
    fits: int = 0
    skipped: int = 0
    next: tuple[Subspace, Tensor] | None = None
    gathered: Tensor | None = None
    moments: GradientMoments | None = None
    batches: int = 0

    def moved(self, device: torch.device, dtype: torch.dtype) -> WeightState:
        """A copy whose projectors are elsewhere."""
        copy = WeightState(**{f.name: getattr(self, f.name) for f in fields(WeightState)})
        copy.subspace = self.subspace.to(device, dtype)
        if self.next is not None:
            copy.next = self.next[0].to(device, dtype), self.next[1].to(device, dtype)
        return copy

    def check(self, weight: CompressedWeight, rewrite: Lsp) -> None:
        """Raise `InputError` unless it is of a weight like this one."""
        for subspace in (self.subspace, *(self.next or ())[:1]):
            _check_projector(subspace.left, weight.subspace.left, f"left projector of {weight.name}")
            _check_projector(subspace.right, weight.subspace.right, f"right projector of {weight.name}")
        if self.next is not None and self.next[1].shape != weight.variable.shape:
            raise InputError(f"the next projectors of {weight.name} lack what those before them left out.")
        fits = self.gathered is None or self.gathered.shape == weight.shape
        sides = () if self.moments is None else (self.moments.left, self.moments.right)
        for side, rows in zip(sides, weight.shape, strict=False):
            count, size, sharing = block_sizes(rows, rewrite.subspace, rewrite.nonzeros)
            numbered = side.rows.dtype == torch.int64 and side.rows.shape == (count, size)
            numbered = numbered and torch.equal(side.rows[side.rows >= 0].sort()[0], torch.arange(rows))
            sums = side.sums.shape == (count, size, size) and side.sums.is_floating_point()
            fits = fits and numbered and sums and side.sharing == sharing and bool(torch.isfinite(side.sums).all())
        if not fits:
            raise InputError(f"the gradients of {weight.name} that a check under way has gathered are not of this weight.")


def _check_projector(found: Projector, like: Projector, what: str) -> None:
    """Raise `InputError` unless a projector can take the place of another."""
    if (found.size, found.values.shape, found.columns.shape) != (like.size, like.values.shape, like.columns.shape):
        raise InputError(
            f"the checkpoint has a {what} with {tuple(found.values.shape)} entries, this model one with "
            f"{tuple(like.values.shape)}: use the same model and Lsp."
        )
    columns = found.columns.flatten().long()
    sparse = found.columns.dtype == torch.int32 and not bool(((columns < 0) | (columns >= found.size)).any())
    most = entries_per_column(len(found.values), found.values.shape[1], found.size)
    if not sparse or int(columns.bincount(minlength=1).max()) > most or not found.values.is_floating_point():
        raise InputError(f"the {what} is no matrix with at most {most} entries in each of {found.size} columns.")


@dataclass(kw_only=True)
class CompressedWeight(WeightState):
    """One weight (m x n) whose gradient is compressed.

    Attributes:
        variable: D (s x s), whose `.grad` is P'GQ; zero, in no memory of its own.
        changed: whom to tell of a new subspace.
        inputs: the projectors as a compiled step reads them.
    """

    name: str
    shape: tuple[int, int]
    variable: nn.Parameter
    changed: Changed | None = None
    inputs: dict[InputDesc, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.install(self.subspace)

    def install(self, subspace: Subspace) -> None:
        """Put a subspace in force."""
        self.subspace, self.next = subspace, None
        self.inputs = given_inputs(self.name, subspace)

    def restore(self, state: WeightState) -> None:
        """Go on from a state."""
        vars(self).update(vars(state))
        self.inputs = given_inputs(self.name, self.subspace)

    def follow(self, device: torch.device) -> None:
        """Be on the device that the weight was moved to."""
        variable = self.variable
        if variable.device == device:
            return
        gradient, variable.grad = variable.grad, None
        variable.data = torch.zeros((), dtype=variable.dtype, device=device).expand(variable.shape)
        variable.grad = None if gradient is None else gradient.to(device)
        self.install(self.subspace.to(device, variable.dtype))

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

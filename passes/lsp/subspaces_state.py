"""The state of `Subspaces` as a checkpoint keeps it, and the projectors that it stands for."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from graphopt.passes.lsp.compressed_weight import CompressedWeight
from graphopt.passes.lsp.learning import GradientMoments, block_sizes
from graphopt.passes.lsp.projectors import Projector, Subspace, entries_per_column
from graphopt.passes.lsp.technique import Lsp
from torch import Tensor

from graphopt.errors import InputError


@dataclass(frozen=True)
class ProjectorState:
    """See `Projector`; on the CPU. A dense one has no columns."""

    columns: Tensor
    values: Tensor

    def check(self, like: Projector, name: str, side: str, size: int) -> None:
        """Raise `InputError` unless it can take the place of `like`."""
        nonzeros = self.values.shape[-1] if self.values.dim() == 2 else 0
        if nonzeros != like.columns.shape[1]:
            raise _other(f"{side} nonzeros", nonzeros, name, like.columns.shape[1])
        entries = self.columns.shape == (self.values.shape if not like.is_dense else (0, 0))
        fits = entries and self.columns.dtype == torch.int32 and self.values.shape == like.values.shape
        if not fits or not self.values.is_floating_point():
            raise InputError(f"the {side} projector of {name} is no sparse matrix with {tuple(like.values.shape)} entries.")
        columns = self.columns.flatten().long()
        if columns.numel() and (int(columns.min()) < 0 or int(columns.max()) >= size):
            raise InputError(f"the {side} projector of {name} has an entry outside its {size} columns.")
        if columns.numel() and int(columns.bincount().max()) > entries_per_column(len(self.columns), nonzeros, size):
            raise InputError(f"the {side} projector of {name} has a column with too many entries.")

    def projector(self, size: int) -> Projector:
        """The projector (m x s)."""
        return Projector(self.columns, self.values, size) if self.columns.numel() else Projector.of_dense(self.values)


@dataclass(frozen=True)
class SidesState:
    """See `Subspace`."""

    left: ProjectorState
    right: ProjectorState

    @classmethod
    def of(cls, subspace: Subspace) -> SidesState:
        """The state of a subspace."""
        sides = (subspace.left, subspace.right)
        left, right = (ProjectorState((p.columns[:0, :0] if p.is_dense else p.columns).cpu(), p.values.cpu()) for p in sides)
        return cls(left, right)

    def subspace(self, name: str, size: int, like: Subspace, variable: Tensor) -> Subspace:
        """The subspace, where `variable` is."""
        self.left.check(like.left, name, "left", size)
        self.right.check(like.right, name, "right", size)
        left, right = (p.projector(size) for p in (self.left, self.right))
        return Subspace(left, right).to(variable.device, variable.dtype)


@dataclass(frozen=True)
class WeightState:
    """See `CompressedWeight`."""

    shape: tuple[int, int]
    now: SidesState
    next: SidesState | None
    unseen: Tensor | None
    error: float
    fits: int
    skipped: int
    gathered: Tensor | None
    moments: GradientMoments | None
    batches: int

    @classmethod
    def of(cls, w: CompressedWeight) -> WeightState:
        """The state of a weight."""
        after, unseen = (None, None) if w.next is None else (SidesState.of(w.next[0]), w.next[1].cpu())
        now = SidesState.of(w.subspace)
        return cls(w.shape, now, after, unseen, w.error, w.fits, w.skipped, w.gathered, w.moments, w.batches)

    def subspaces(
        self, name: str, shape: tuple[int, int], size: int, like: Subspace, variable: Tensor
    ) -> tuple[Subspace, tuple[Subspace, Tensor] | None]:
        """The subspace in force, and the one after the step under way with what the one before left out.

        Raises:
            InputError: they do not fit the weight.
        """
        if self.shape != shape:
            raise _other("shape", self.shape, name, shape)
        if self.gathered is not None and tuple(self.gathered.shape) != shape:
            raise _other("gathered gradients", tuple(self.gathered.shape), name, shape)
        after = None
        if self.next is not None:
            if self.unseen is None or tuple(self.unseen.shape) != (size, size):
                raise InputError(f"the next projectors of {name} lack what those before them left out.")
            after = self.next.subspace(name, size, like, variable), self.unseen.to(variable.device, variable.dtype)
        return self.now.subspace(name, size, like, variable), after

    def checked_moments(self, name: str, rewrite: Lsp) -> GradientMoments | None:
        """The second moments of gradients of a check under way.

        Raises:
            InputError: they do not fit the weight.
        """
        if self.moments is None:
            return None
        for side, rows in zip((self.moments.left, self.moments.right), self.shape, strict=True):
            count, size, sharing = block_sizes(rows, rewrite.subspace, rewrite.nonzeros)
            numbered = side.rows.dtype == torch.int64 and side.rows.shape == (count, size)
            numbered = numbered and torch.equal(side.rows[side.rows >= 0].sort()[0], torch.arange(rows))
            sums = side.sums.shape == (count, size, size) and side.sums.is_floating_point()
            if not numbered or not sums or side.sharing != sharing or not bool(torch.isfinite(side.sums).all()):
                raise InputError(f"the gradients of {name} that a check under way has gathered are not of this weight.")
        return self.moments


@dataclass(frozen=True)
class SubspacesState:
    """See `Subspaces`."""

    size: int
    weights: dict[str, WeightState]
    steps: int
    forwards: int
    checked_at: int
    stepped: tuple[str, ...]
    generator: Tensor

    def check(self, names: Collection[str], size: int) -> None:
        """Raise `InputError` unless it is of these weights, in subspaces of this size."""
        missing = sorted(set(self.weights) ^ set(names) | set(self.stepped) - set(names))
        if missing:
            raise InputError(f"the checkpoint does not compress the same weights: {missing[0]} is in one of both alone.")
        if self.size != size:
            raise _other("subspace", self.size, next(iter(names)), size)


def _other(what: str, theirs: Any, name: str, ours: Any) -> InputError:
    return InputError(f"the checkpoint has {what} {theirs} for {name}, this model {ours}: use the same model and Lsp.")

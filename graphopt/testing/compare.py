"""Whether a rewritten step computes what eager autograd does: tolerances, and the first tensor that differs.

Used by `graphopt.testing`, which holds passes to their contracts, and by `optimize(verify=True)`, which holds a plan to them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from graphopt.errors import PassError

TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Largest difference allowed, relative to the largest gradient entry of the model; of outputs and buffers also absolute."""


@dataclass(frozen=True)
class Agreement:
    """How far two sets of tensors agree.

    Attributes:
        error: the largest difference found, in the unit of the tolerance.
        difference: says which tensor is the first to differ, and by how much; "" if none does.
    """

    error: float
    difference: str = ""

    def held(self) -> float:
        """The error.

        Raises:
            PassError: a tensor differs.
        """
        if self.difference:
            raise PassError(f"{self.difference}.")
        return self.error


def tolerance_of(dtypes: Iterable[torch.dtype]) -> float:
    """The tolerance of a computation in these types: that of the coarsest."""
    return max((TOLERANCE.get(dtype.to_real(), 0.0) for dtype in dtypes), default=0.0) or TOLERANCE[torch.float32]


def compare_values(ours: Mapping[str, Tensor], eager: Mapping[str, Tensor], tolerance: float) -> Agreement:
    """Compare outputs or buffers by name, in order; they must have the same shapes, and be as close as `torch.allclose` asks."""
    missing = [name for name in (*eager, *ours) if name not in ours or name not in eager]
    if missing:
        return Agreement(float("inf"), f"{missing[0]} is there in eager mode or here, not in both")
    return _agreement(((name, ours[name], wanted) for name, wanted in eager.items()), tolerance)


def compare_gradients(
    ours: Mapping[str, Tensor | None],
    eager: Mapping[str, Tensor | None],
    computed: Iterable[str],
    tolerance: float,
    what: str = "the gradient",
) -> Agreement:
    """Compare gradients by name, in order of `ours`.

    Args:
        ours, eager: None where there is no gradient.
        computed: names of those that are to be there; the others must be None in `ours`, or not there.
        tolerance: relative to the largest entry of eager's gradients.
        what: is compared, for the message.
    """
    kept = dict.fromkeys(computed)
    for name, found in ours.items():
        if found is not None and name not in kept:
            return Agreement(float("inf"), f"{name} has a gradient although none is computed for it")
    names = [*(name for name in ours if name in kept), *(name for name in kept if name not in ours)]
    pairs = ((f"{what} of {name}", ours.get(name), eager.get(name)) for name in names)
    return _agreement(pairs, tolerance, largest_entry(g for g in eager.values() if g is not None))


def _agreement(
    pairs: Iterable[tuple[str, Tensor | None, Tensor | None]], tolerance: float, scale: float | None = None
) -> Agreement:
    """Compare (what it is, ours, eager's) up to the first difference.

    Args:
        scale: in which differences are measured; None: in 1 and eager's entry, together.
    """
    worst = 0.0
    for what, found, wanted in pairs:
        if found is None or wanted is None:
            return Agreement(float("inf"), f"{what} is missing")
        if found.shape != wanted.shape:
            return Agreement(float("inf"), f"{what} has shape {list(found.shape)}, eager's has {list(wanted.shape)}")
        mine, theirs = wide(found.detach()), wide(wanted.detach())
        error = _largest((mine - theirs).abs() / (scale or 1 + theirs.abs()), _same(mine, theirs))
        worst = max(worst, error)
        if not error <= tolerance:
            return Agreement(error, f"{what} differs from eager's by {error:.2e}{' of the largest entry' if scale else ''}")
    return Agreement(worst)


def largest_entry(gradients: Iterable[Tensor]) -> float:
    """The largest magnitude among finite entries; 1 if there is none but zero."""
    largest = 0.0
    for gradient in gradients:
        values = wide(gradient.detach()).abs()
        largest = max(largest, _largest(values, ~values.isfinite()))
    return largest or 1.0


def wide(tensor: Tensor) -> Tensor:
    """In float64, dense, a complex number as two; differentiable."""
    value = tensor.to_dense() if tensor.layout != torch.strided else tensor
    return torch.view_as_real(value.resolve_conj()).double() if value.is_complex() else value.double()


def _same(ours: Tensor, eager: Tensor) -> Tensor:
    """Where both are the same, NaN and infinity included: what is not finite in eager mode must not be here."""
    return (ours == eager) | (ours.isnan() & eager.isnan())


def _largest(values: Tensor, left_out: Tensor) -> float:
    """The largest of `values`; NaN if one that is not left out is."""
    return float(values.masked_fill(left_out, 0.0).max()) if values.numel() else 0.0

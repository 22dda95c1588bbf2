"""The subspaces of a model's compressed gradients while it trains: projectors, and when they are fitted anew (LSP, Alg. 2)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from graphopt.compat import InputDesc
from graphopt.errors import InputError
from graphopt.ops.hand_over import forget, new_receiver
from graphopt.passes.lsp import Lsp, given_inputs
from graphopt.projectors import Projector, Subspace, draw_subspace, fit

Changed = Callable[[str, Subspace, Subspace], None]
"""Told the name of a weight, its old subspace and its new one."""


@dataclass
class CompressedWeight:
    """One weight (m x n) whose gradient is compressed.

    Attributes:
        variable: D (s x s), whose `.grad` is P'GQ; zero, in no memory of its own.
        subspace: P and Q, on the weight's device.
        error: |PP'GQQ' - G| / |G| when last looked at; NaN before.
        fits: how often P and Q were fitted.
        inputs: the projectors as a compiled step reads them; changed in place, so that autograd refuses a backward whose forward
            saw others.
    """

    name: str
    shape: tuple[int, int]
    variable: nn.Parameter
    subspace: Subspace
    error: float = math.nan
    fits: int = 0
    inputs: dict[InputDesc, Tensor] = field(default_factory=dict)

    def install(self, subspace: Subspace) -> None:
        """Put a subspace in force."""
        self.subspace = subspace
        for desc, value in given_inputs(self.name, subspace).items():
            if desc in self.inputs and self.inputs[desc].device == value.device:
                self.inputs[desc].copy_(value)
            else:
                self.inputs[desc] = value.clone()


class Subspaces:
    """Every compressed weight of a model, and the receiver to which checking steps hand full gradients, one at a time."""

    def __init__(self, rewrite: Lsp, weights: Mapping[str, Tensor]) -> None:
        """Draw random projectors.

        Args:
            weights: by name, those to compress.
        """
        self.rewrite = rewrite
        self.generator = torch.Generator().manual_seed(rewrite.seed)
        self.weights: dict[str, CompressedWeight] = {}
        self.changed: Changed | None = None
        self.used = False
        self.steps = 0
        self._checked_at = -1
        for name, weight in weights.items():
            exact = torch.float64 if weight.dtype == torch.float64 else torch.float32
            zero = torch.zeros((), dtype=exact, device=weight.device)
            shape = (weight.shape[0], weight.shape[1])
            variable = nn.Parameter(zero.expand(rewrite.subspace, rewrite.subspace))
            compressed = CompressedWeight(name, shape, variable, self._drawn(shape, weight.device, exact))
            compressed.install(compressed.subspace)
            self.weights[name] = compressed
        self.names = tuple(self.weights)
        self.receiver = new_receiver(self._check)

    def __del__(self) -> None:
        if hasattr(self, "receiver"):
            forget(self.receiver)

    def _drawn(self, shape: tuple[int, int], device: torch.device, dtype: torch.dtype) -> Subspace:
        return draw_subspace(shape, self.rewrite.subspace, self.rewrite.nonzeros, self.generator).to(device, dtype)

    def given(self, tensors: Mapping[str, Tensor]) -> dict[InputDesc, Tensor]:
        """What a compiled step reads; follows weights that were moved to another device."""
        found: dict[InputDesc, Tensor] = {}
        for name, compressed in self.weights.items():
            device = tensors[name].device
            if compressed.variable.device != device:
                compressed.variable.data = torch.zeros((), dtype=compressed.variable.dtype, device=device).expand(
                    compressed.variable.shape
                )
                compressed.install(compressed.subspace.to(device, compressed.variable.dtype))
            found |= compressed.inputs
            found[InputDesc("compressed", name)] = compressed.variable
        return found

    def due(self) -> bool:
        """Whether the next step compares the projectors with the gradients, and fits them where need be.

        It does at the first step and every `check_every` steps of the optimizer, but never between two backwards of one step:
        their compressed gradients are summed.
        """
        at = self.steps // self.rewrite.check_every
        return at != self._checked_at and all(w.variable.grad is None for w in self.weights.values())

    def start_check(self) -> None:
        """The step that runs now is one that checks."""
        self._checked_at = self.steps // self.rewrite.check_every

    def _check(self, site: int, gradient: Tensor) -> Tensor:
        """Take the full gradient of a weight in a checking step, fit projectors that represent it badly, and compress it."""
        compressed = self.weights[self.names[site]]
        exact = gradient.detach().to(compressed.variable.dtype)
        if bool(torch.isfinite(exact).all()):
            before = compressed.subspace
            compressed.error = before.error(exact)
            if compressed.error >= self.rewrite.threshold:
                self._fit(compressed, exact)
            if compressed.subspace is not before and self.changed is not None:
                self.changed(compressed.name, before, compressed.subspace)
        return compressed.subspace.compress(exact).contiguous()

    def _fit(self, compressed: CompressedWeight, gradient: Tensor) -> None:
        start = compressed.subspace
        if compressed.error >= 1:
            start = self._drawn(compressed.shape, gradient.device, gradient.dtype)
        outcome = fit(start, [gradient], self.rewrite.threshold, self.rewrite.iterations)
        if outcome.after < compressed.error:
            compressed.install(outcome.subspace)
            compressed.error = outcome.after
            compressed.fits += 1

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs."""
        weights = {}
        for name, w in self.weights.items():
            sides = {"left": w.subspace.left, "right": w.subspace.right}
            arrays = {f"{side}_{what}": getattr(p, what).cpu() for side, p in sides.items() for what in ("columns", "values")}
            weights[name] = {"shape": w.shape, "size": self.rewrite.subspace, **arrays, "error": w.error, "fits": w.fits}
        return {"weights": weights, "steps": self.steps, "checked_at": self._checked_at, "generator": self.generator.get_state()}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise `InputError` unless `state` fits these weights."""
        saved = state["weights"]
        missing = sorted(set(saved) ^ set(self.weights))
        if missing:
            raise InputError(f"the checkpoint does not compress the same weights: {missing[0]} is in one of both alone.")
        for name, w in self.weights.items():
            shape, size = tuple(saved[name]["shape"]), saved[name]["size"]
            if (shape, size) != (w.shape, self.rewrite.subspace):
                raise InputError(
                    f"{name} is {w.shape} with a subspace of {self.rewrite.subspace}, but {shape} with one of {size} in the "
                    "checkpoint: use the same model and the same Lsp(subspace=...)."
                )

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint; see `check_state`."""
        for name, w in self.weights.items():
            found = state["weights"][name]
            device, dtype = w.variable.device, w.variable.dtype
            left, right = (
                Projector(found[f"{side}_columns"], found[f"{side}_values"], self.rewrite.subspace).to(device, dtype)
                for side in ("left", "right")
            )
            w.install(Subspace(left, right))
            w.error, w.fits = found["error"], found["fits"]
        self.steps, self._checked_at = state["steps"], state["checked_at"]
        self.generator.set_state(state["generator"].cpu())

"""What the gradients of a step must be: eager's, their image, or either in the mean over draws."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from graphopt.compat import InputDesc
from graphopt.errors import PassError
from graphopt.graph import TrainingGraph
from graphopt.passes.base import Projected
from graphopt.testing import compare
from graphopt.testing.compare import Agreement

STANDARD_ERRORS = 6.0
"""Distance of the mean over draws from eager's gradient that is refused; by chance it happens once in many million times."""


@dataclass(frozen=True)
class Wanted:
    """What the gradients of a step must be.

    Attributes:
        eager: eager's gradients, by parameter.
        ordinary: parameters whose gradients the graph computes as they are.
        images: gradients of compressed weights.
    """

    eager: dict[str, Tensor]
    ordinary: tuple[str, ...]
    images: dict[InputDesc, Tensor]

    @classmethod
    def of(
        cls, graph: TrainingGraph, reference: nn.Module, projected: Projected | None, given: Mapping[InputDesc, Tensor]
    ) -> Wanted:
        """From the gradients of an eager model."""
        eager = {n: p.grad for n, p in reference.named_parameters(remove_duplicate=False) if p.grad is not None}
        missing = sorted(set(graph.gradients()) - set(eager))
        if missing:
            raise PassError(f"the graph computes a gradient of {missing[0]}, which has none in eager mode.")
        images = {}
        if projected is not None:
            images = {d: projected.image(d.target, given, eager) for d in given if d.kind == "compressed"}
        return cls(eager, tuple(name for name in graph.gradients() if name not in graph.compressed), images)

    def agreement(self, candidate: nn.Module, given: Mapping[InputDesc, Tensor], tolerance: float) -> Agreement:
        """How far the gradients of a step are what they must be, each image in units of its own largest entry."""
        found = {n: p.grad for n, p in candidate.named_parameters()}
        agreements = [compare.compare_gradients(found, self.eager, self.ordinary, tolerance)]
        for desc, wanted in self.images.items():
            name, what = str(desc.target), "the compressed gradient"
            agreements.append(compare.compare_gradients({name: given[desc].grad}, {name: wanted}, [name], tolerance, what))
        return next((a for a in agreements if a.difference), max(agreements, key=lambda a: a.error))

    def pairs(self, candidate: nn.Module, given: Mapping[InputDesc, Tensor]) -> list[tuple[str, Tensor, Tensor, float]]:
        """(name, gradient, what it must be, size against which differences are seen), for every gradient of a step, in float64.

        Raises:
            PassError: one is missing, of another shape, not finite, or there although the graph computes none.
        """
        self.agreement(candidate, given, math.inf).held()
        parameters = dict(candidate.named_parameters(remove_duplicate=False))
        scale = compare.largest_entry(self.eager.values())
        found = [(f"the gradient of {n}", parameters[n].grad, self.eager[n], scale) for n in self.ordinary]
        for desc, wanted in self.images.items():
            found.append((f"the compressed gradient of {desc.target}", given[desc].grad, wanted, compare.largest_entry([wanted])))
        return [(what, compare.wide(g), compare.wide(wanted), size) for what, g, wanted, size in found if g is not None]


def compare_mean(
    wanted: Wanted,
    candidate: nn.Module,
    given: Mapping[InputDesc, Tensor],
    draw: Callable[[], None],
    tolerance: float,
    draws: int,
) -> float:
    """Compare the mean gradient over many draws with what it must be; returns the largest difference in standard errors.

    Each gradient is compared by itself. All ordinary ones together, and all compressed ones, are also compared along the
    direction of what they must be, where a wrong scale shows with fewest draws.
    """
    total: list[Tensor] = []
    squares: list[Tensor] = []
    along: dict[str, list[float]] = {"ordinary gradients": [], "compressed gradients": []}
    ordinary = len(wanted.ordinary)
    for _ in range(draws):
        draw()
        pairs = wanted.pairs(candidate, given)
        drawn = [gradient for _, gradient, _, _ in pairs]
        for values, part in zip(along.values(), (pairs[:ordinary], pairs[ordinary:]), strict=True):
            values.append(sum(float((gradient * exact).sum()) for _, gradient, exact, _ in part))
        if not total:
            total, squares = [torch.zeros_like(g) for g in drawn], [torch.zeros_like(g) for g in drawn]
        for i, gradient in enumerate(drawn):
            total[i] += gradient
            squares[i] += gradient.square()
    worst = 0.0
    for i, (what, _, exact, size) in enumerate(wanted.pairs(candidate, given)):
        mean = total[i] / draws
        variance = float((squares[i] / draws - mean.square()).clamp(min=0).sum()) / draws
        distance = float((mean - exact).norm())
        rounding = tolerance * size * math.sqrt(mean.numel())
        errors = max(0.0, distance - rounding) / math.sqrt(variance) if variance > rounding**2 / draws else 0.0
        worst = max(worst, errors)
        if errors > STANDARD_ERRORS or (errors == 0.0 and distance > rounding + STANDARD_ERRORS * math.sqrt(variance)):
            raise PassError(f"the mean of {what} is {errors:.1f} standard errors from eager's (or its image).")
    pairs = wanted.pairs(candidate, given)
    for (what, values), part in zip(along.items(), (pairs[:ordinary], pairs[ordinary:]), strict=True):
        square = sum(float(exact.square().sum()) for _, _, exact, _ in part)
        if not square:
            continue
        scales = torch.tensor(values, dtype=torch.float64) / square
        off = abs(float(scales.mean()) - 1.0)
        errors = off / max(float(scales.std()) / math.sqrt(draws), tolerance)
        worst = max(worst, errors)
        if errors > STANDARD_ERRORS and off > tolerance:
            raise PassError(
                f"the mean of the {what} is {float(scales.mean()):.3f} times what it must be, {errors:.1f} standard errors off."
            )
    return worst

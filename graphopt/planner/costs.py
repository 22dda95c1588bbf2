"""The selection problem: which gradients cost what (GreenTrainer, Eq. 4, on the graph instead of on a chain)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from graphopt.analysis.flops import FlopProfile


@dataclass(frozen=True)
class BackwardCosts:
    """What each set of gradients costs, in FLOPs (2 per multiply-add), at one batch size.

    Attributes:
        names: trainable parameters, from the output (near the loss) to the input.
        forward_flops: T_fp.
        classes: (bit mask over `names`, FLOPs): backward nodes that run if and only if one of these gradients is wanted.
        weight_grad_flops: t_dw per name, the part of the classes that only this gradient needs.
        saved_flops: of full training's step, what earlier passes leave out of it whatever is trained; below 0 if they add.
    """

    names: tuple[str, ...]
    forward_flops: int
    classes: tuple[tuple[int, int], ...]
    weight_grad_flops: tuple[int, ...]
    saved_flops: int = 0

    def cost(self, selection: Iterable[int]) -> int:
        """Exact backward FLOPs when only these gradients are computed: sum of the classes that one of them needs."""
        wanted = sum(1 << i for i in set(selection))
        return sum(flops for mask, flops in self.classes if mask & wanted)

    @cached_property
    def backward_flops(self) -> int:
        """Backward FLOPs of full training."""
        return sum(flops for _, flops in self.classes)

    @property
    def step_flops(self) -> int:
        """T_full: forward and full backward, of which budgets are parts; as earlier passes find it."""
        return self.forward_flops + self.backward_flops + self.saved_flops

    def part(self, flops: float) -> float:
        """`flops` as a part of full training's; 0 where that takes none, as of embeddings and norms alone."""
        return flops / self.step_flops if self.step_flops else 0.0

    def affordable(self, flops_ratio: float) -> int:
        """Backward FLOPs that a budget leaves: floor(rho * T_full) - T_fp, exact in integers."""
        numerator, denominator = float(flops_ratio).as_integer_ratio()
        return self.step_flops * numerator // denominator - self.forward_flops

    def ratio_of(self, flops: int) -> float:
        """The smallest budget that leaves so many FLOPs for a step, rounded up to 4 digits."""
        units = math.ceil(self.part(flops) * 10_000)
        if self.forward_flops + self.affordable(units / 10_000) < flops:  # the decimal number lies a hair below the fraction
            units += 1
        return units / 10_000

    @cached_property
    def chain_prefix(self) -> tuple[int, ...]:
        """D_d: FLOPs of the dY chain down to depth d, for every d.

        Every class that touches one of the parameters 0..d, less what their own gradients cost. If d is the deepest
        selected, the chain costs at most this, whatever else is selected: exact for a chain, an upper bound for any graph.
        """
        by_depth = [0] * len(self.names)
        for mask, flops in self.classes:
            by_depth[(mask & -mask).bit_length() - 1] += flops  # at the lowest bit
        total, prefix = 0, []
        for depth, own in enumerate(self.weight_grad_flops):
            total += by_depth[depth] - own
            prefix.append(total)
        return tuple(prefix)


def smallest_ratio(costs: BackwardCosts, spare_flops: int = 0) -> float:
    """The smallest budget that trains anything: forward plus the cheapest gradient, rounded up to 4 digits.

    Args:
        spare_flops: that later passes save.
    """
    cheapest = min(costs.cost([i]) for i in range(len(costs.names))) - spare_flops
    return min(1.0, costs.ratio_of(costs.forward_flops + cheapest))


def backward_costs(profile: FlopProfile, full_step: int | None = None) -> BackwardCosts:
    """The selection problem of a FLOP profile.

    Args:
        full_step: FLOPs of the step of which budgets are parts, where earlier passes have rewritten it.
    """
    rows = {row.name: row for row in profile.tensors}
    return BackwardCosts(
        names=profile.order,
        forward_flops=profile.forward,
        classes=profile.classes,
        weight_grad_flops=tuple(rows[name].weight_grad_flops for name in profile.order),
        saved_flops=0 if full_step is None else full_step - profile.step,
    )

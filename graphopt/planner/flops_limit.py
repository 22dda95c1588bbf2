"""Which tensors to train within a limit on FLOPs, when other passes make the same training cheaper or dearer.

The selection's own program counts the captured graph: products in autograd's order, gradients in full. What a step really takes
is counted on the rewritten graph, and the difference is given to the selection (or taken from it) in the next round. So exact
rewrites come first: tensors are left untrained only as far as these do not meet the limit by themselves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from graphopt.analysis.flops import FlopProfile, flop_profile
from graphopt.errors import BudgetError, PassError
from graphopt.graph import TrainingGraph
from graphopt.passes import GreenTrainer
from graphopt.planner.costs import BackwardCosts, backward_costs
from graphopt.planner.importance import Importance
from graphopt.planner.plan import Plan
from graphopt.planner.selection import Selection, infeasible, select

ROUNDS = 6
"""Selections whose step is counted at most."""


@dataclass(frozen=True)
class FlopsLimit:
    """The FLOPs that a budget allows for a step of a graph, at its batch size.

    A limit on memory does not count, for which orders may be chosen that take more FLOPs: see `within_memory`.

    Attributes:
        plan: whose passes rewrite the graph; what it trains does not matter.
    """

    plan: Plan
    graph: TrainingGraph
    profile: FlopProfile

    @cached_property
    def costs(self) -> BackwardCosts:
        """The selection problem on the captured graph."""
        return backward_costs(self.profile)

    @property
    def most(self) -> int:
        """FLOPs that a step may take."""
        assert self.plan.budget.flops is not None
        return self.profile.forward + self.costs.affordable(self.plan.budget.flops)

    def step_flops(self, names: frozenset[str]) -> int:
        """FLOPs of the dearest step of the rewritten graph that trains some tensors."""
        return self.profile.forward + self.profile.cost(names) - self.saved(names)

    def saved(self, names: frozenset[str]) -> int:
        """See `flops_saved`."""
        return flops_saved(replace(self.plan, train=names, memory=None), self.graph, self.profile)

    @cached_property
    def saved_at_most(self) -> int:
        """What is saved where everything is trained."""
        return self.saved(frozenset(self.profile.order))

    @property
    def everything_fits(self) -> bool:
        """Whether all can be trained, since other passes save enough."""
        return self.saved_at_most > 0 and self.profile.step - self.saved_at_most <= self.most

    def reachable(self) -> tuple[str, ...]:
        """Parameters that the limit could afford to train alone (Eq. 8); the importance pass stops at the deepest.

        Raises:
            BudgetError: none; states the smallest feasible fraction.
        """
        most = self.most + max(0, self.saved_at_most)
        within = tuple(name for name in self.profile.order if self.profile.forward + self.profile.cost([name]) <= most)
        if not within:
            raise self._infeasible()
        return within

    def select(self, importance: Importance) -> Selection:
        """The most important tensors whose step keeps to the limit; empty if no importance is positive.

        Raises:
            BudgetError: it allows none; states the smallest feasible fraction.
        """
        assert self.plan.budget.flops is not None
        values = [importance.values.get(name, 0.0) for name in self.profile.order]
        spare, found = self.saved_at_most, None
        for _ in range(ROUNDS):
            try:
                selection = select(self.costs, values, self.plan.budget.flops, spare_flops=spare)
            except BudgetError:
                break
            if not selection.names:
                return selection
            saved = self.saved(frozenset(selection.names))
            flops = self.profile.forward + selection.backward_flops - saved
            if flops <= self.most and (found is None or selection.value > found.value):
                found = replace(selection, flops_ratio=flops / self.profile.step)
            if saved == spare or (found is not None and saved < spare):
                break
            spare = saved
        return found or self._cheapest(values)

    def _cheapest(self, values: Sequence[float]) -> Selection:
        """The tensor alone that takes fewest FLOPs, where no selection was found."""
        name, flops = self._fewest
        if flops > self.most:
            raise self._infeasible()
        value = values[self.profile.order.index(name)]
        return Selection((name,), self.profile.cost([name]), flops / self.profile.step, value, "the cheapest tensor", math.inf)

    @cached_property
    def _fewest(self) -> tuple[str, int]:
        name = min(self.profile.order, key=lambda name: self.profile.cost([name]))
        return name, self.step_flops(frozenset([name]))

    def _infeasible(self) -> BudgetError:
        assert self.plan.budget.flops is not None
        if not self.saved_at_most:
            return infeasible(self.costs, self.plan.budget.flops)
        units = math.ceil(self._fewest[1] / self.profile.step * 10_000)
        if self.profile.forward + self.costs.affordable(units / 10_000) < self._fewest[1]:  # a decimal number a hair too low
            units += 1
        return BudgetError(
            f"flops={self.plan.budget.flops:.4g} leaves too little for any gradient, with the products of adapters reordered and "
            f"gradients compressed as planned. Smallest feasible: {units / 10_000}."
        )


def flops_saved(plan: Plan, graph: TrainingGraph, profile: FlopProfile) -> int:
    """By how much less the dearest step of a plan takes than what it trains takes on the captured graph; below 0 if more.

    What is saved by sampling and compressing does not count: now and then a step leaves that out, to measure variances or to fit
    projectors. What compressing costs does.
    """
    names = frozenset(profile.order) if plan.train is None else plan.train
    whole = profile.forward + profile.cost(names)
    kinds = [p for p in (plan.without_approximations(), plan.without_sampling()) if _rewrites(p)]
    return min((whole - p.rewrite(graph)[1][-1].step_flops_after for p in kinds), default=0)


def _rewrites(plan: Plan) -> bool:
    """Whether any pass but the cut changes what a step takes."""
    return any(not isinstance(p, GreenTrainer) for p in plan.passes)


def check_given(train: Sequence[str], plan: Plan, graph: TrainingGraph) -> None:
    """See that the model has the tensors that the user wants trained, and that training them is within the budget's FLOPs.

    Raises:
        PassError: no such parameter.
        BudgetError: training them needs more FLOPs.
    """
    known = {name: p.name for p in graph.parameters for name in (p.name, *p.aliases)}
    for name in train:
        if known.get(name) != name:
            why = f"it is tied to {known[name]}: use that name" if name in known else "the model has no such parameter"
            raise PassError(f"greentrainer cannot train {name}: {why}.")
    if plan.budget.flops is None:
        return
    limit = FlopsLimit(plan, graph, flop_profile(graph))
    names = frozenset(train) & frozenset(limit.profile.order)
    needed = limit.step_flops(names) if names else limit.profile.forward
    if needed > limit.most:
        raise BudgetError(
            f"flops={plan.budget.flops} is less than training the tensors that were given needs: "
            f"{needed / limit.profile.step:.4f} of a full step. Train fewer, or leave them to be selected: GreenTrainer()."
        )

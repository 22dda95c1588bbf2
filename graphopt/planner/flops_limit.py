"""Which tensors to train within a limit on FLOPs, when other passes make the same training cheaper or dearer.

The selection's own program counts the graph as the passes before it leave it: products in autograd's order, gradients in full.
What a step really takes is counted on the rewritten graph, and the difference is given to the selection (or taken from it) in the
next round. So exact rewrites come first: tensors are left untrained only as far as these do not meet the limit by themselves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from graphopt.analysis.flops import FlopProfile, flop_profile
from graphopt.budget import Budget
from graphopt.errors import BudgetError, PassError
from graphopt.graph import TrainingGraph
from graphopt.passes.technique import technique
from graphopt.planner.costs import BackwardCosts, backward_costs, smallest_ratio
from graphopt.planner.importance import Importance
from graphopt.planner.plan import Plan, resolve_passes
from graphopt.planner.selection import Selection, infeasible, select

ROUNDS = 6
"""Selections whose step is counted at most."""


@dataclass(frozen=True)
class FlopsLimit:
    """The FLOPs that a budget allows for a step of a graph, at its batch size.

    Attributes:
        plan: whose passes rewrite the graph; what it trains does not matter.
        captured: FLOPs of the graph as it was captured, of which the budget is a part.
    """

    plan: Plan
    graph: TrainingGraph
    captured: FlopProfile

    @cached_property
    def profile(self) -> FlopProfile:
        """FLOPs of the graph as it is where tensors are selected."""
        selecting = [technique(p).selecting is not None for p in self.plan.passes]
        before = self.plan.passes[: selecting.index(True)] if True in selecting else ()
        if not before:
            return self.captured
        graph, reports = replace(self.plan, passes=before, train=None).rewrite(self.graph)
        return flop_profile(graph) if reports[-1].step_flops_after != self.captured.step else self.captured

    @cached_property
    def costs(self) -> BackwardCosts:
        """The selection problem."""
        return backward_costs(self.profile, self.captured.step)

    @property
    def most(self) -> int:
        """FLOPs that a step may take."""
        assert self.plan.budget.flops is not None
        return self.costs.forward_flops + self.costs.affordable(self.plan.budget.flops)

    def step_flops(self, names: frozenset[str]) -> int:
        """FLOPs of the dearest step of the rewritten graph that trains some tensors."""
        return dearest_step(replace(self.plan, train=names), self.graph, self.profile)

    def saved(self, names: frozenset[str]) -> int:
        """See `flops_saved`."""
        return flops_saved(replace(self.plan, train=names), self.graph, self.profile)

    @cached_property
    def saved_of_all(self) -> int:
        """What is saved where everything is trained."""
        return self.saved(frozenset(self.profile.order))

    @cached_property
    def likely_saved(self) -> int:
        """What a selection may save: as everything does, or as the cheapest tensor does, whose backward may reach no adapter."""
        return max(self.saved_of_all, self.saved(frozenset([self._cheapest])))

    @property
    def everything_fits(self) -> bool:
        """Whether all can be trained, since the limit is no less, other passes save enough, or the model takes no FLOPs."""
        return not self.profile.step or self.profile.step - self.saved_of_all <= self.most

    def reachable(self) -> tuple[str, ...]:
        """Parameters that the limit could afford to train alone (Eq. 8); the importance pass stops at the deepest.

        Raises:
            BudgetError: none; states the smallest feasible fraction.
        """
        most = self.most + max(0, self.likely_saved)
        within = tuple(name for name in self.profile.order if self.profile.forward + self.profile.cost([name]) <= most)
        if not within:
            raise self._infeasible()
        return within

    def select(self, importance: Importance) -> Selection:
        """The most important tensors whose step keeps to the limit; empty if no importance is positive.

        Raises:
            BudgetError: it allows none; states the smallest feasible fraction.
        """
        selection, missed = self._selected(importance), importance.missed
        if not missed:
            return selection
        flops = self.profile.forward + self.profile.cost([missed]) - max(0, self.likely_saved)
        reaching = math.ceil(100 * self.costs.part(flops)) / 100
        return replace(selection, missed=(missed, reaching))

    def _selected(self, importance: Importance) -> Selection:
        assert self.plan.budget.flops is not None
        values = [importance.values.get(name, 0.0) for name in self.profile.order]
        spare, found = self.likely_saved, None
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
                found = selection
            if saved == spare or (found is not None and saved < spare):
                break
            spare = saved
        return self._with_more(found or self._only_the_cheapest(values), values)

    def _with_more(self, selection: Selection, values: Sequence[float]) -> Selection:
        """With what still fits, the most important first: what is saved differs from set to set."""
        names, tried = frozenset(selection.names), 0
        if not self.likely_saved or not selection.names:
            return selection
        for k in sorted(range(len(values)), key=lambda k: -values[k]):  # of equal ones, the nearest to the output
            value, name = values[k], self.profile.order[k]
            more = names | {name}
            fits = self.profile.forward + self.profile.cost(more) <= self.most + max(0, self.likely_saved)
            if name in names or value <= 0 or not fits or tried == ROUNDS:
                continue
            tried += 1
            if self.step_flops(more) <= self.most:
                names = more
        chosen = [k for k, name in enumerate(self.profile.order) if name in names]
        return replace(
            selection,
            names=tuple(self.profile.order[k] for k in chosen),
            backward_flops=self.profile.cost(names),
            value=math.fsum(values[k] for k in chosen),
        )

    @cached_property
    def _cheapest(self) -> str:
        return min(self.profile.order, key=lambda name: self.profile.cost([name]))

    def _only_the_cheapest(self, values: Sequence[float]) -> Selection:
        """The tensor alone that takes fewest FLOPs, where no selection was found."""
        name, flops = self._cheapest, self.step_flops(frozenset([self._cheapest]))
        if flops > self.most:
            raise self._infeasible()
        value = max(0.0, values[self.profile.order.index(name)])
        names = (name,) if value else ()
        return Selection(names, self.profile.cost(names), value, "the cheapest tensor")

    @cached_property
    def smallest(self) -> float:
        """The smallest budget that trains anything, rounded up to 4 digits."""
        if not self.likely_saved:
            return smallest_ratio(self.costs)
        return self.costs.ratio_of(self.step_flops(frozenset([self._cheapest])))

    @cached_property
    def sensible(self) -> float:
        """The smallest budget that trains something beyond the forward: a quarter of the backward, rounded down to hundredths."""
        quarter = self.captured.forward + (self.captured.step - self.captured.forward) // 4
        return max(self.smallest, math.floor(100 * self.costs.part(quarter)) / 100)

    def _infeasible(self) -> BudgetError:
        assert self.plan.budget.flops is not None
        less = " outputs='loss' leaves out what only other outputs of the model need." if self.graph.refused else ""
        if not self.likely_saved:
            return BudgetError(f"{infeasible(self.costs, self.plan.budget.flops)}{less}")
        return BudgetError(
            f"flops={self.plan.budget.flops:.4g} leaves too little for any gradient, with all that is exact done and "
            f"gradients compressed as planned. Smallest feasible: {self.smallest}.{less}"
        )


def default_limit(graph: TrainingGraph, captured: FlopProfile, flops: float = 0.5) -> FlopsLimit:
    """The limit of a budget on FLOPs alone, with the passes that `optimize` takes by itself.

    Args:
        captured: FLOPs of `graph`.
        flops: the budget, a part of them.
    """
    budget = Budget(flops=flops)
    return FlopsLimit(Plan(budget, resolve_passes("auto", budget)), graph, captured)


def flops_saved(plan: Plan, graph: TrainingGraph, profile: FlopProfile) -> int:
    """By how much less the dearest step of a plan takes than what it trains takes on the captured graph; below 0 if more.

    What is saved by sampling and compressing does not count: now and then a step leaves that out, to measure variances or to fit
    projectors. What compressing costs does.
    """
    names = frozenset(profile.order) if plan.train is None else plan.train
    whole = profile.forward + profile.cost(names)
    exact, compressing = plan.without_approximations(), plan.without_sampling()
    kinds = [exact] if exact.passes == compressing.passes else [exact, compressing]
    return min(whole - _step_flops(kind, graph, whole) for kind in kinds)


def dearest_step(plan: Plan, graph: TrainingGraph, profile: FlopProfile) -> int:
    """FLOPs (2 per multiply-add) of the kind of step of a plan that takes most; see `flops_saved`."""
    names = frozenset(profile.order) if plan.train is None else plan.train
    return profile.forward + profile.cost(names) - flops_saved(plan, graph, profile)


def _step_flops(plan: Plan, graph: TrainingGraph, whole: int) -> int:
    """FLOPs of a step; `whole` where passes do nothing but leave tensors untrained."""
    if all(technique(p).selecting is not None for p in plan.passes):
        return whole
    return plan.rewrite(graph)[1][-1].step_flops_after


def check_given(train: Sequence[str], plan: Plan, graph: TrainingGraph) -> None:
    """See that the model has the tensors that the user wants trained, and that training them is within the budget's FLOPs.

    Raises:
        PassError: no such parameter, or none of them has a gradient.
        BudgetError: training them needs more FLOPs.
    """
    known = {name: p.name for p in graph.parameters for name in (p.name, *p.aliases)}
    for name in train:
        if known.get(name) != name:
            why = f"it is tied to {known[name]}: use that name" if name in known else "the model has no such parameter"
            raise PassError(f"greentrainer cannot train {name}: {why}.")
    if not set(train) & set(flop_profile(graph).order):
        raise PassError(
            f"greentrainer cannot train {', '.join(train) or 'nothing'}: the loss has no gradient of it. Name tensors that "
            "require gradients and that the loss depends on, or leave train= out to have them selected."
        )
    if plan.budget.flops is None:
        return
    limit = FlopsLimit(plan, graph, flop_profile(graph))
    names = frozenset(train) & frozenset(limit.profile.order)
    needed = limit.step_flops(names) if names else limit.profile.forward
    if needed > limit.most:
        raise BudgetError(
            f"flops={plan.budget.flops} is less than training the tensors that were given needs: "
            f"{limit.costs.part(needed):.4f} of a full step. Train fewer, or leave them to be selected: GreenTrainer()."
        )

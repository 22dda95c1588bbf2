"""A plan within a limit on memory: exact means first, then what costs least importance, held to the predicted peak of the step.

The program of `graphopt.planner.solver` adds up bytes at the borders of segments. What it does not see (temporaries, what fusion
saves) is measured as the difference to the predicted peak of the rewritten graph, and allowed for in the next round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from graphopt.analysis.flops import FlopProfile, flop_profile
from graphopt.analysis.optimizers import Trained, optimizer_memory
from graphopt.analysis.row_rules import PRODUCTS
from graphopt.analysis.segments import find_segments
from graphopt.errors import BudgetError
from graphopt.graph import TrainingGraph
from graphopt.passes import BY_NAME
from graphopt.passes.technique import Found, Offers, technique
from graphopt.planner.costs import backward_costs
from graphopt.planner.flops_limit import dearest_step, flops_saved
from graphopt.planner.importance import Importance
from graphopt.planner.memory_limit import MemoryLimit
from graphopt.planner.plan import Plan
from graphopt.planner.problem import Allocation, Problem, TensorBytes, evaluate
from graphopt.planner.selection import Selection
from graphopt.planner.solver import solve
from graphopt.planner.step_time import machine_times

ROUNDS = 8
"""Plans whose peak is predicted at most."""

SLOWER = 0.05
"""Part of a step's time that finer forms may take before coarser ones are tried, which need more recomputation."""

FEWEST = 1e-3
"""Importance that every tensor has at least, as a part of the largest, where nothing limits FLOPs: all training is wanted."""


def within_memory(plan: Plan, graph: TrainingGraph, rate: Callable[[], Importance] | None = None) -> Plan:
    """A plan whose step stays within `plan.memory`, as near to the given one as that allows; the given one without a limit.

    Args:
        rate: measures importance; called where exact means do not do. None: what is trained stays as it is.
    Raises:
        BudgetError: no plan does; states the smallest feasible memory.
        ImportanceError: see `measure_importance`.
    """
    limit = plan.memory
    if limit is None:
        return plan
    plan = adopted(plan, Found((), ()))  # without what was found for another selection
    least = _predicted(plan, graph, limit)
    profile = flop_profile(graph)
    if least <= limit.peak_bytes and _within_flops(plan, graph, profile):
        return plan
    forms = finer_plans(plan, graph)
    finest = _predicted(forms[-1], graph, limit) if len(forms) > 1 else least
    if finest < least:
        plan, least = forms[-1], finest
    if least > limit.peak_bytes or not _within_flops(plan, graph, profile):
        plan = _searched(plan, graph, limit, least, profile, rate)
    return _quicker(_coarsest(plan, forms, graph, limit), forms, graph, limit, profile)


def finer_plans(plan: Plan, graph: TrainingGraph) -> list[Plan]:
    """A plan, and the same with what takes less and less memory for the same gradients, the cheapest first."""
    forms = [plan]
    for rewrite in plan.passes:
        while (form := technique(rewrite).finer(forms[-1], graph)) is not None:
            forms.append(form)
    return forms


def _coarsest(plan: Plan, forms: Sequence[Plan], graph: TrainingGraph, limit: MemoryLimit) -> Plan:
    """A plan within the limit with the cheapest of these forms, as what it does beside has made room."""
    changed = {name for form in forms for name, decision in form.decisions.items() if decision != forms[0].decisions.get(name)}
    for form in forms:
        others = {name: decision for name, decision in plan.decisions.items() if name not in changed}
        own = {name: form.decisions[name] for name in changed if name in form.decisions}
        candidate = replace(plan, decisions={**others, **own})
        if candidate.key == plan.key or _predicted(candidate, graph, limit) <= limit.peak_bytes:
            return candidate
    return plan


def _quicker(plan: Plan, forms: Sequence[Plan], graph: TrainingGraph, limit: MemoryLimit, profile: FlopProfile) -> Plan:
    """The plan, or one that trains as much in less time, with a coarser form and more recomputation."""
    if len(forms) == 1 or plan.train != forms[0].train or plan.without_approximations().passes != plan.passes:
        return plan
    taken = _seconds(plan, graph, profile)
    for form in forms:
        spare = _extra_seconds(plan, graph) - _extra_seconds(form, graph)
        if spare <= SLOWER * taken:
            return plan
        attempt = _Attempt(form, graph, limit, _predicted(form, graph, limit), profile, offers_of(form, graph))
        found = attempt.search(make_problem(form, graph, profile, None, replace(attempt.offers, smaller={})), train_all=True)
        if found is not None:
            return found if _seconds(found, graph, profile) < taken else plan
    return plan


def _seconds(plan: Plan, graph: TrainingGraph, profile: FlopProfile) -> float:
    """Of a step at the rate of a large product, and of what its techniques take beside that; to compare plans by."""
    products = [node.meta["val"] for node in graph.graph.nodes if node.target in PRODUCTS]
    if not products:
        return 0.0
    smallest = min(products, key=lambda value: value.dtype.itemsize)
    return dearest_step(plan, graph, profile) / machine_times(smallest.device, smallest.dtype).peak + _extra_seconds(plan, graph)


def _extra_seconds(plan: Plan, graph: TrainingGraph) -> float:
    return sum(technique(p).extra_seconds(plan, graph) for p in plan.passes)


def _searched(
    plan: Plan, graph: TrainingGraph, limit: MemoryLimit, least: int, profile: FlopProfile, rate: Callable[[], Importance] | None
) -> Plan:
    """See `within_memory`.

    Args:
        least: peak bytes that are predicted of the plan as it is.
    """
    offers = offers_of(plan, graph)
    if rate is None:
        offers = replace(offers, leaves_untrained=False, smaller={})
    attempt = _Attempt(plan, graph, limit, least, profile, offers, flops_saved(plan, graph, profile))
    approximates = offers.leaves_untrained or bool(offers.smaller)
    if not approximates and not offers.recomputes:
        raise _too_little(plan, graph, limit, least)
    exact = attempt.search(make_problem(plan, graph, profile, None, replace(offers, smaller={})), train_all=True)
    if exact is not None:
        return exact
    importance = rate() if plan.importance is None and rate is not None and approximates else plan.importance
    if importance is not None:
        attempt = replace(attempt, importance=importance)
        found = attempt.search(make_problem(plan, graph, profile, importance, offers))
        if found is not None:
            return found
    smallest = attempt.smallest(make_problem(plan, graph, profile, attempt.importance, offers))
    if smallest is not None:
        peak = _predicted(smallest, graph, limit)
        if peak <= limit.peak_bytes and _within_flops(smallest, graph, profile):
            return smallest
        least = min(least, peak)
    raise _too_little(plan, graph, limit, least)


def offers_of(plan: Plan, graph: TrainingGraph) -> Offers:
    """What the techniques of a plan offer together."""
    found = [technique(p).offers(plan, graph) for p in plan.passes]
    smaller = {name: gradient for offers in reversed(found) for name, gradient in offers.smaller.items()}
    return Offers(
        any(offers.leaves_untrained for offers in found),
        any(offers.recomputes for offers in found),
        smaller,
        min((offers.kept_value for offers in found), default=1.0),
        frozenset().union(*(offers.held for offers in found)),
    )


def adopted(plan: Plan, found: Found) -> Plan:
    """The plan with what was found, each technique taking its own."""
    for rewrite in plan.passes:
        plan = technique(rewrite).adopt(plan, found)
    return plan


def _too_little(plan: Plan, graph: TrainingGraph, limit: MemoryLimit, least: int) -> BudgetError:
    flops = "" if plan.budget.flops is None else f" and flops={plan.budget.flops}"
    others = [n for n, kind in BY_NAME.items() if "memory" in kind.serves and all(p.name != n for p in plan.passes)]
    add = f", or add {' or '.join(map(repr, others))} to passes" if others else ""
    return BudgetError(
        f"memory={limit.peak_bytes:,} bytes is less than a step needs with a batch of {graph.batch_size} ({limit.backend}, "
        f"optimizer state included). Smallest feasible with these passes{flops}: {least:,}. Use a smaller batch{add}."
    )


@dataclass(frozen=True)
class _Attempt:
    """The search for one limit.

    Attributes:
        plan_peak: what is predicted of `plan` as it is.
        spare_flops: that its passes save, beyond what the program counts.
    """

    plan: Plan
    graph: TrainingGraph
    limit: MemoryLimit
    plan_peak: int
    profile: FlopProfile
    offers: Offers
    spare_flops: int = 0
    importance: Importance | None = None

    def search(self, problem: Problem, train_all: bool = False) -> Plan | None:
        """The best plan whose predicted peak is within the limit; None if there is none."""
        everything = self._as_planned(problem)
        problem = everything if train_all else problem
        trained = [k for k, value in enumerate(everything.importance) if value]
        start = min(0, self.plan_peak - evaluate(problem, trained, (), ())[1])  # Inductor keeps less than the program counts
        unseen, low, high, spare_flops = start, start - 1, self.limit.peak_bytes, self.spare_flops
        for _ in range(ROUNDS):
            allocation = solve(
                problem,
                self._flops_limit(spare_flops),
                self.limit.peak_bytes - unseen,
                train_all=train_all,
                may_compress=not train_all,
                may_recompute=self.offers.recomputes,
            )
            if allocation is None:
                if unseen == start:
                    return None
                high = unseen
            else:
                plan = self._plan(problem, allocation, train_all)
                peak = _predicted(plan, self.graph, self.limit)
                if peak <= self.limit.peak_bytes:
                    if _within_flops(plan, self.graph, self.profile):
                        return plan
                    spare_flops = allocation.step_flops - dearest_step(plan, self.graph, self.profile)  # less than before
                    continue
                low, unseen = unseen, peak - allocation.peak_bytes  # more than before, as this plan was within what was left
            if not low < unseen < high:
                unseen = (low + high) // 2
            if unseen in (low, high):
                return None
        return None

    def smallest(self, problem: Problem) -> Plan | None:
        """The plan that needs least memory by these means."""
        decided = not self.offers.leaves_untrained
        problem = self._as_planned(problem) if decided else problem
        allocation = solve(
            problem,
            self._flops_limit(self.spare_flops),
            smallest_memory=True,
            train_all=decided,
            may_recompute=self.offers.recomputes,
        )
        return None if allocation is None else self._plan(problem, allocation, decided)

    def _as_planned(self, problem: Problem) -> Problem:
        """The problem with an importance of 1 for what the plan trains, and of 0 for the rest."""
        train = self.plan.train
        return replace(problem, importance=tuple(float(train is None or name in train) for name in problem.costs.names))

    def _plan(self, problem: Problem, allocation: Allocation, keep_selection: bool) -> Plan:
        return planned(self.plan, self.graph, problem, allocation, self.importance, keep_selection)

    def _flops_limit(self, spare_flops: int) -> int | None:
        if self.plan.budget.flops is None:
            return None
        return backward_costs(self.profile).affordable(self.plan.budget.flops) + self.profile.forward + spare_flops


def planned(
    plan: Plan,
    graph: TrainingGraph,
    problem: Problem,
    allocation: Allocation,
    importance: Importance | None,
    keep_selection: bool = False,
) -> Plan:
    """`plan` with a solution's decisions.

    Args:
        keep_selection: what is trained stays as the plan says.
    """
    names = problem.costs.names
    segments = [segment.name for segment in find_segments(graph)]
    recomputed = tuple(segments[i] for i in allocation.recomputed if problem.segments[i][0])
    smaller = () if keep_selection else tuple(sorted(names[k] for k in allocation.compressed))
    trained = tuple(names[k] for k in allocation.train)
    if not keep_selection and (len(trained) < len(names) or plan.train is not None):
        value = math.fsum(problem.importance[k] for k in allocation.train)
        cost = problem.costs.cost(allocation.train)
        ratio = problem.costs.part(problem.costs.forward_flops + cost)
        before = (None, None) if plan.selection is None else (plan.selection.missed, plan.selection.raised)
        selection = Selection(trained, cost, ratio, value, "one program for FLOPs and memory", allocation.gap, *before)
        plan = replace(plan, train=frozenset(trained), selection=selection, importance=importance)
    return adopted(plan, Found(smaller, recomputed))


def _predicted(plan: Plan, graph: TrainingGraph, limit: MemoryLimit) -> int:
    return limit.peak_once(graph, plan.key, lambda: plan.rewrite(graph)[0], graph.batch_size)


def _within_flops(plan: Plan, graph: TrainingGraph, profile: FlopProfile) -> bool:
    """Whether the dearest step keeps to the FLOPs: orders of adapters' products that save memory can cost more of them."""
    return plan.budget.flops is None or dearest_step(plan, graph, profile) <= plan.budget.flops * profile.step


def make_problem(
    plan: Plan, graph: TrainingGraph, profile: FlopProfile, importance: Importance | None, offers: Offers
) -> Problem:
    """The numbers of a graph; see `Problem`.

    Args:
        plan: whose limit says which optimizer is used, and whose budget whether all is to be trained.
        offers: of the plan's techniques.
    """
    assert plan.memory is not None
    costs = backward_costs(profile)
    segments = find_segments(graph)
    segment_of = {name: i for i, segment in enumerate(segments) for name in segment.parameters}
    parameters = {p.name: p for p in graph.parameters}
    device = next(iter(graph.placeholders)).meta["val"].device
    trained = [Trained(n, parameters[n].shape, parameters[n].dtype) for n in costs.names if n not in offers.held]
    states: dict[str, int] = {}
    for name, _, size in optimizer_memory(plan.memory.optimizer, trained, device).states:
        states[name] = states.get(name, 0) + size
    tensors = []
    for name, formed in zip(costs.names, costs.weight_grad_flops, strict=True):
        small = offers.smaller.get(name)
        gradient = 0 if name in offers.held else math.prod(parameters[name].shape) * parameters[name].dtype.itemsize
        more = 0 if small is None else max(0, small.flops - formed)  # now and then a step forms the gradient itself
        bytes_, state = None if small is None else small.bytes, states.get(name, 0)
        tensors.append(TensorBytes(gradient, state, segment_of.get(name, 0), bytes_, more))
    fixed = 0
    for desc, node in zip(graph.inputs, graph.placeholders, strict=True):
        if desc.kind in ("parameter", "buffer", "input"):
            value = node.meta["val"]
            fixed += math.prod(graph.at(size, graph.batch_size) for size in value.shape) * value.element_size()
    values = {} if importance is None else importance.values
    if plan.budget.flops is None:  # all of it is to be trained, unless it does not fit
        largest = max(values.values(), default=1.0) or 1.0
        rated = tuple(max(values.get(n, 0.0), FEWEST * largest) for n in costs.names)
    else:
        rated = tuple(max(values.get(n, 0.0), 0.0) for n in costs.names)
    kinds = tuple((segment.saved_bytes, segment.flops) for segment in segments)
    return Problem(costs, rated, tuple(tensors), kinds, fixed, offers.kept_value)

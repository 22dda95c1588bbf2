"""A plan within a limit on memory: exact means first, then what costs least importance, held to the predicted peak of the step.

The program of `graphopt.planner.solver` adds up bytes at the borders of segments. What it does not see (temporaries, what fusion
saves) is measured as the difference to the peak of the rewritten graph, and allowed for in the next round. Rounds go by estimates
of that peak, as a prediction takes as long as a part of compiling does; what is returned was predicted to be within the limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from graphopt.analysis.flops import FlopProfile, flop_profile
from graphopt.analysis.row_rules import PRODUCTS
from graphopt.analysis.segments import MERGED
from graphopt.errors import BudgetError
from graphopt.graph import TrainingGraph
from graphopt.passes import BY_NAME
from graphopt.passes.technique import Found, Offers, technique
from graphopt.planner.costs import backward_costs
from graphopt.planner.flops_limit import dearest_step, flops_saved
from graphopt.planner.importance import Importance
from graphopt.planner.memory_problem import adopted, make_problem, offers_of, planned
from graphopt.planner.peaks import Peaks
from graphopt.planner.plan import Plan
from graphopt.planner.problem import Allocation, Problem, evaluate
from graphopt.planner.solver import solve
from graphopt.planner.step_time import machine_times

ROUNDS = 8
"""Solutions of the program at most until one is within the limit."""

CORRECTIONS = 3
"""Times that a prediction corrects the estimates."""

SLACK = 0.05
"""Part of the limit that a plan may leave unused before a better one is looked for."""

NOTICED = 0.01
"""Part of a step's time that a coarser form must save to be tried."""

SLOWER = 0.05
"""Part that it must save to be tried with more recomputation."""


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
    peaks = Peaks(graph, limit)
    profile = flop_profile(graph)
    if peaks.within(plan) and _within_flops(plan, graph, profile):
        return plan
    forms = finer_plans(plan, graph)
    if len(forms) > 1 and peaks.estimated(forms[-1]) < peaks.estimated(plan):
        plan = forms[-1]
    if not (peaks.within(plan) and _within_flops(plan, graph, profile)):
        plan = _searched(plan, peaks, profile, rate)
    return _quicker(plan, forms, peaks, profile)


def finer_plans(plan: Plan, graph: TrainingGraph) -> list[Plan]:
    """A plan, and the same with what takes less and less memory for the same gradients, the cheapest first."""
    forms = [plan]
    for rewrite in plan.passes:
        while (form := technique(rewrite).finer(forms[-1], graph)) is not None:
            forms.append(form)
    return forms


def _quicker(plan: Plan, forms: Sequence[Plan], peaks: Peaks, profile: FlopProfile) -> Plan:
    """The plan, or one that trains as much in less time, with a coarser form: what it does beside may have made room, or can."""
    graph = peaks.graph
    taken = _seconds(plan, graph, profile) if len(forms) > 1 else 0.0
    exact = plan.train == forms[0].train and plan.without_approximations().passes == plan.passes
    for form in forms:
        candidate = _in_form(form, plan, forms)
        spared = _extra_seconds(plan, graph) - _extra_seconds(candidate, graph)
        if spared <= NOTICED * taken:
            return plan
        if peaks.within(candidate, unsure=0.0):
            return candidate
        if exact and spared > SLOWER * taken:
            attempt = _Attempt(form, peaks, profile, offers_of(form, graph))
            problem = make_problem(form, graph, profile, None, replace(attempt.offers, smaller={}))
            found = attempt.by_estimates(problem, train_all=True)
            if found is not None:
                return found if _seconds(found, graph, profile) < taken else plan
    return plan


def _in_form(form: Plan, plan: Plan, forms: Sequence[Plan]) -> Plan:
    """A plan with what is decided otherwise in these forms as one of them has it."""
    changed = {name for f in forms for name, decision in f.decisions.items() if decision != forms[0].decisions.get(name)}
    others = {name: decision for name, decision in plan.decisions.items() if name not in changed}
    return replace(plan, decisions={**others, **{name: form.decisions[name] for name in changed if name in form.decisions}})


def _seconds(plan: Plan, graph: TrainingGraph, profile: FlopProfile) -> float:
    """Of a step at the rate of a large product, and of what its techniques take beside that; to compare plans by."""
    products = [node.meta["val"] for node in graph.graph.nodes if node.target in PRODUCTS]
    if not products:
        return 0.0
    smallest = min(products, key=lambda value: value.dtype.itemsize)
    return dearest_step(plan, graph, profile) / machine_times(smallest.device, smallest.dtype).peak + _extra_seconds(plan, graph)


def _extra_seconds(plan: Plan, graph: TrainingGraph) -> float:
    return sum(technique(p).extra_seconds(plan, graph) for p in plan.passes)


def _searched(plan: Plan, peaks: Peaks, profile: FlopProfile, rate: Callable[[], Importance] | None) -> Plan:
    """See `within_memory`."""
    graph = peaks.graph
    offers = offers_of(plan, graph)
    if rate is None:
        offers = replace(offers, leaves_untrained=False, smaller={})
    attempt = _Attempt(plan, peaks, profile, offers, flops_saved(plan, graph, profile))
    approximates = offers.leaves_untrained or bool(offers.smaller)
    if not approximates and not offers.recomputes:
        raise _too_little(plan, peaks, peaks.predicted(plan))
    merged = []
    for exactly in attempt.ever_coarser():
        exact = attempt.search(exactly, train_all=True)
        if exact is not None:
            return exact
        merged.append(exactly.merged)
    importance = rate() if plan.importance is None and rate is not None and approximates else plan.importance
    attempt = replace(attempt, importance=importance)
    problems = [make_problem(plan, graph, profile, importance, offers, m) for m in merged]
    found = None if importance is None else attempt.search(max(problems, key=attempt.worth))
    if found is not None:
        return found
    smallest = attempt.smallest(problems[-1], train_all=not offers.leaves_untrained)
    least = peaks.predicted(plan)
    raise _too_little(plan, peaks, least if smallest is None else min(least, peaks.predicted(smallest)))


def _too_little(plan: Plan, peaks: Peaks, least: int) -> BudgetError:
    flops = "" if plan.budget.flops is None else f" and flops={plan.budget.flops}"
    others = [n for n, kind in BY_NAME.items() if "memory" in kind.serves and all(p.name != n for p in plan.passes)]
    add = f", or add {' or '.join(map(repr, others))} to passes" if others else ""
    limit = peaks.limit
    return BudgetError(
        f"memory={limit.peak_bytes:,} bytes is less than a step needs with a batch of {peaks.graph.batch_size} ({limit.backend}, "
        f"optimizer state included). Smallest feasible with these passes{flops}: {least:,}. Use a smaller batch{add}."
    )


@dataclass(frozen=True)
class _Attempt:
    """The search for one limit.

    Attributes:
        spare_flops: that the plan's passes save, beyond what the program counts.
    """

    plan: Plan
    peaks: Peaks
    profile: FlopProfile
    offers: Offers
    spare_flops: int = 0
    importance: Importance | None = None

    def ever_coarser(self) -> Iterator[Problem]:
        """The problem of training all exactly, with ever more segments merged, as long as a step can then need less memory."""
        least = None
        for merged in MERGED if self.offers.recomputes else MERGED[:1]:
            exact = replace(self.offers, smaller={})
            problem = make_problem(self.plan, self.peaks.graph, self.profile, None, exact, merged)
            allocation = self._least(problem, train_all=True)
            if least is not None and (allocation is None or allocation.peak_bytes >= least):
                return
            least = None if allocation is None else allocation.peak_bytes
            yield problem

    def search(self, problem: Problem, train_all: bool = False) -> Plan | None:
        """The best plan that is predicted to be within the limit, or the one that needs least memory; None if that is above."""
        found = self.by_estimates(problem, train_all)
        if found is not None:
            return found
        smallest = self.smallest(problem, train_all or not self.offers.leaves_untrained)
        if smallest is None or not self.peaks.within(smallest):
            return None
        return smallest if _within_flops(smallest, self.peaks.graph, self.profile) else None

    def worth(self, problem: Problem) -> float:
        """Importance that the program alone has trained within the limit."""
        allocation = solve(problem, self._flops_limit(self.spare_flops), self._limit, may_recompute=self.offers.recomputes)
        return 0.0 if allocation is None else sum(problem.importance[k] for k in allocation.train)

    def by_estimates(self, problem: Problem, train_all: bool = False) -> Plan | None:
        """The same, or None where estimates lead to none. Each plan that they lead to is predicted, which corrects them."""
        best = None
        for _ in range(CORRECTIONS if self.peaks.estimates else 1):
            plan = self._found(problem, train_all)
            if plan is None or (best is not None and plan.key == best.key):
                break
            self.peaks.correct(plan)
            peak = self.peaks.predicted(plan)
            if peak <= self._limit:
                if best is not None or peak >= (1 - SLACK) * self._limit:
                    return plan
                best = plan  # with room left: the corrected estimates may find a better one
        return best

    def _found(self, problem: Problem, train_all: bool) -> Plan | None:
        """The best plan whose estimated peak is within the limit."""
        peak_of = self.peaks.estimated
        everything = self._as_planned(problem)
        problem = everything if train_all else problem
        trained = [k for k, value in enumerate(everything.importance) if value]
        start = min(0, peak_of(self.plan) - evaluate(problem, trained, (), ())[1])  # fusion keeps less than the program counts
        unseen, low, high, spare_flops = start, start - self._limit, self._limit, self.spare_flops
        best = None
        for _ in range(ROUNDS):
            allocation = solve(
                problem,
                self._flops_limit(spare_flops),
                self._limit - unseen,
                train_all=train_all,
                may_compress=not train_all,
                may_recompute=self.offers.recomputes,
            )
            measured = None
            if allocation is None:
                if unseen == start:
                    return None
                high = unseen
            else:
                plan = self._plan(problem, allocation, train_all)
                peak = peak_of(plan)
                if peak > self._limit:
                    low = unseen
                    measured = peak - allocation.peak_bytes  # more than before, as this plan was within what was left
                elif not _within_flops(plan, self.peaks.graph, self.profile):
                    spare_flops = allocation.step_flops - dearest_step(plan, self.peaks.graph, self.profile)  # less than before
                    continue
                elif peak >= (1 - SLACK) * self._limit:
                    return plan
                else:
                    best, high = plan, unseen  # with room left
            unseen = measured if measured is not None and low < measured < high else (low + high) // 2
            if unseen in (low, high):
                break
        return best

    @property
    def _limit(self) -> int:
        return self.peaks.limit.peak_bytes

    def smallest(self, problem: Problem, train_all: bool) -> Plan | None:
        """The plan that needs least memory by these means."""
        allocation = self._least(problem, train_all)
        return None if allocation is None else self._plan(problem, allocation, train_all)

    def _least(self, problem: Problem, train_all: bool) -> Allocation | None:
        return solve(
            self._as_planned(problem) if train_all else problem,
            self._flops_limit(self.spare_flops),
            smallest_memory=True,
            train_all=train_all,
            may_compress=not train_all,
            may_recompute=self.offers.recomputes,
        )

    def _as_planned(self, problem: Problem) -> Problem:
        """The problem with an importance of 1 for what the plan trains, and of 0 for the rest."""
        train = self.plan.train
        return replace(problem, importance=tuple(float(train is None or name in train) for name in problem.costs.names))

    def _plan(self, problem: Problem, allocation: Allocation, keep_selection: bool) -> Plan:
        return planned(self.plan, self.peaks.graph, problem, allocation, self.importance, keep_selection)

    def _flops_limit(self, spare_flops: int) -> int | None:
        if self.plan.budget.flops is None:
            return None
        return backward_costs(self.profile).affordable(self.plan.budget.flops) + self.profile.forward + spare_flops


def _within_flops(plan: Plan, graph: TrainingGraph, profile: FlopProfile) -> bool:
    """Whether the dearest step keeps to the FLOPs: orders of adapters' products that save memory can cost more of them."""
    return plan.budget.flops is None or dearest_step(plan, graph, profile) <= plan.budget.flops * profile.step

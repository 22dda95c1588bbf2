"""The search for a plan within a limit on memory: solutions of a program, held to the predicted peak of the step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from graphopt.analysis.flops import FlopProfile
from graphopt.analysis.segments import MERGED
from graphopt.graph import TrainingGraph
from graphopt.passes.technique import Offers
from graphopt.planner.costs import backward_costs
from graphopt.planner.flops_limit import dearest_step
from graphopt.planner.importance import Importance
from graphopt.planner.memory_problem import make_problem, planned
from graphopt.planner.peaks import Peaks
from graphopt.planner.plan import Plan
from graphopt.planner.problem import Allocation, Problem, evaluate
from graphopt.planner.solver import solve

ROUNDS = 8
"""Solutions of the program at most until one is within the limit."""

CORRECTIONS = 3
"""Times that a prediction corrects the estimates."""

SLACK = 0.05
"""Part of the limit that a plan may leave unused before a better one is looked for."""


@dataclass(frozen=True)
class Attempt:
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
        return smallest if within_flops(smallest, self.peaks.graph, self.profile) else None

    def without_recomputing(self, found: Plan, problem: Problem) -> Plan:
        """The plan that was found, or one that keeps all for the backward and trains more, where that one leaves room.

        What is computed again can need more memory than the program counts: then less and less was trained until that fitted.
        """
        chooses = self.offers.recomputes and self.offers.leaves_untrained
        if not chooses or self.peaks.predicted(found) > (1 - SLACK) * self._limit:
            return found
        other = replace(self, offers=replace(self.offers, recomputes=False)).by_estimates(problem)
        return other if other is not None and self._value(other) > self._value(found) else found

    def worth(self, problem: Problem) -> float:
        """Importance that the program alone has trained within the limit."""
        allocation = solve(problem, self._flops_limit(self.spare_flops), self._limit, may_recompute=self.offers.recomputes)
        return 0.0 if allocation is None else sum(problem.importance[k] for k in allocation.train)

    def by_estimates(self, problem: Problem, train_all: bool = False) -> Plan | None:
        """The best plan within the limit, or None where estimates lead to none.

        Each plan that they lead to is predicted, which corrects them.
        """
        best = None
        for _ in range(CORRECTIONS if self.peaks.estimates else 1):
            found = self._found(problem, train_all)
            if found is None or (best is not None and found[0].key == best.key):
                break
            plan = found[0]
            self.peaks.correct(plan)
            if self.peaks.predicted(plan) > self._limit:
                plan = self._with_less_again(problem, found[1], train_all) or plan
            peak = self.peaks.predicted(plan)
            if peak <= self._limit:
                if best is not None or peak >= (1 - SLACK) * self._limit:
                    return plan if best is None or self._value(plan) >= self._value(best) else best
                best = plan  # with room left: the corrected estimates may find a better one
        return best

    def _with_less_again(self, problem: Problem, allocation: Allocation, train_all: bool) -> Plan | None:
        """A plan within the limit that computes less again, where computing more again needs more memory; None if there is none.

        Fusion can make room for what is computed again in the place of what is kept. Which segments do that is seen by
        predictions alone: halves of them are left out as long as less memory is predicted.
        """
        again = tuple(i for i in allocation.recomputed if problem.segments[i][0])
        plan = self._plan(problem, allocation, train_all)
        while again and self.peaks.out_of_line(plan):
            middle = len(again) // 2
            halves = [again[:middle], again[middle:]] if middle else [()]
            plans = [self._plan(problem, replace(allocation, recomputed=half), train_all) for half in halves]
            peaks = [self.peaks.predicted(less) for less in plans]
            least = peaks.index(min(peaks))
            if peaks[least] >= self.peaks.predicted(plan):
                return None
            again, plan = halves[least], plans[least]
            if peaks[least] <= self._limit:
                return plan
        return None

    def _value(self, plan: Plan) -> float:
        """Importance of what a plan trains."""
        if self.importance is None:
            return 0.0
        return math.inf if plan.train is None else self.importance.of(plan.train)

    def _found(self, problem: Problem, train_all: bool) -> tuple[Plan, Allocation] | None:
        """The best plan whose estimated peak is within the limit, and the solution that it is of."""
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
                elif not within_flops(plan, self.peaks.graph, self.profile):
                    spare_flops = allocation.step_flops - dearest_step(plan, self.peaks.graph, self.profile)  # less than before
                    continue
                elif peak >= (1 - SLACK) * self._limit:
                    return plan, allocation
                else:
                    best, high = (plan, allocation), unseen  # with room left
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


def within_flops(plan: Plan, graph: TrainingGraph, profile: FlopProfile) -> bool:
    """Whether the dearest step keeps to the FLOPs: orders of adapters' products that save memory can cost more of them."""
    return plan.budget.flops is None or dearest_step(plan, graph, profile) <= plan.budget.flops * profile.step

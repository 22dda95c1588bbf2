"""A plan within a limit on memory: exact means first, then what costs least importance, held to the predicted peak of the step.

The program of `graphopt.planner.solver` adds up bytes at the borders of segments. What it does not see (temporaries, what fusion
saves) is measured as the difference to the peak of the rewritten graph, and allowed for in the next round. Rounds go by estimates
of that peak, as a prediction takes as long as a part of compiling does; what is returned was predicted to be within the limit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from graphopt.analysis.flops import FlopProfile, flop_profile
from graphopt.analysis.row_rules import PRODUCTS
from graphopt.errors import BudgetError
from graphopt.graph import TrainingGraph
from graphopt.passes import BY_NAME
from graphopt.passes.technique import Found, technique
from graphopt.planner.flops_limit import dearest_step, flops_saved
from graphopt.planner.importance import Importance
from graphopt.planner.memory_problem import adopted, make_problem, offers_of
from graphopt.planner.memory_search import Attempt, within_flops
from graphopt.planner.peaks import Peaks
from graphopt.planner.plan import Plan
from graphopt.planner.step_time import machine_times

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
    if peaks.within(plan) and within_flops(plan, graph, profile):
        return plan
    forms = [plan]  # and the same with what takes less and less memory for the same gradients, the cheapest first
    for rewrite in plan.passes:
        while (form := technique(rewrite).finer(forms[-1], graph)) is not None:
            forms.append(form)
    if len(forms) > 1 and peaks.estimated(forms[-1]) < peaks.estimated(plan):
        plan = forms[-1]
    if not (peaks.within(plan) and within_flops(plan, graph, profile)):
        plan = _searched(plan, peaks, profile, rate)
    return _quicker(plan, forms, peaks, profile)


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
            attempt = Attempt(form, peaks, profile, offers_of(form, graph))
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
    found, smallest = _by_program(Attempt(plan, peaks, profile, offers, flops_saved(plan, graph, profile)), rate)
    if found is not None:
        return found
    able = [p for p in (plan, smallest) if p is not None and within_flops(p, graph, profile)]
    for candidate in able:  # which was not predicted before, where estimates are too high
        if peaks.predicted(candidate) <= peaks.limit.peak_bytes:
            return candidate
    if not able:
        raise BudgetError(
            f"no plan was found that keeps to flops={plan.budget.flops} and to memory={peaks.limit.peak_bytes:,} bytes at once: "
            "raise one of the two."
        )
    raise _too_little(plan, peaks, min(map(peaks.predicted, able)))


def _by_program(attempt: Attempt, rate: Callable[[], Importance] | None) -> tuple[Plan | None, Plan | None]:
    """The best plan within the limit, or else None and the one that needs least memory as the program has it, if there is one."""
    plan, offers, graph, profile = attempt.plan, attempt.offers, attempt.peaks.graph, attempt.profile
    approximates = offers.leaves_untrained or bool(offers.smaller)
    if not approximates and not offers.recomputes:
        return None, None
    merged = []
    for exactly in attempt.ever_coarser():
        exact = attempt.search(exactly, train_all=True)
        if exact is not None:
            return exact, None
        merged.append(exactly.merged)
    importance = rate() if plan.importance is None and rate is not None and approximates else plan.importance
    attempt = replace(attempt, importance=importance)
    problems = [make_problem(plan, graph, profile, importance, offers, m) for m in merged]
    train_all = not offers.leaves_untrained
    found = None if importance is None else attempt.search(max(problems, key=attempt.worth), train_all)
    if found is not None:
        return attempt.without_recomputing(found, problems[0]), None
    return None, attempt.smallest(problems[-1], train_all)


def _too_little(plan: Plan, peaks: Peaks, least: int) -> BudgetError:
    flops = "" if plan.budget.flops is None else f" and flops={plan.budget.flops}"
    others = [n for n, kind in BY_NAME.items() if "memory" in kind.serves and all(p.name != n for p in plan.passes)]
    add = f", or add {' or '.join(map(repr, others))} to passes" if others else ""
    limit, batch = peaks.limit, peaks.graph.batch_size
    several = f" with a batch of {batch}" if batch > 1 else ""
    return BudgetError(
        f"memory={limit.peak_bytes:,} bytes is less than a step needs{several} ({limit.backend}, optimizer state included). "
        f"Smallest feasible with these passes{flops}: {least:,}. Use a {'smaller batch' if several else 'smaller input'}{add}."
    )

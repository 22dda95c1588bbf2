"""What to train together with how many terms of each weight's gradient to keep, from variances that a calibration measured.

The selection meets the limit on FLOPs with exact gradients; sampling is worth it where what it saves trains more. Both are
variables of one program (`graphopt.planner.solver`). What it counts is held to the FLOPs and the foretold peak of the rewritten
graph, and the difference given to the next round.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from graphopt.analysis.flops import FlopProfile, flop_profile
from graphopt.analysis.segments import find_segments
from graphopt.analysis.weight_products import find_weight_products
from graphopt.graph import TrainingGraph
from graphopt.passes.vcas import TOKENS, Vcas, places
from graphopt.planner.flops_limit import FlopsLimit
from graphopt.planner.joint_plan import make_problem
from graphopt.planner.memory_limit import MemoryLimit
from graphopt.planner.plan import Plan
from graphopt.planner.problem import Allocation, KeepLevel, Problem, SampledTerms, evaluate
from graphopt.planner.sample_ratios import LEVELS
from graphopt.planner.selection import Selection
from graphopt.planner.solver import solve
from graphopt.tangents import for_loss_alone

ROUNDS = 6
"""Programs that are solved at most, each allowing for what the last left out."""


@dataclass(frozen=True)
class Variances:
    """What a calibration measured.

    Attributes:
        own: V_s of the mini-batch gradient by parameter.
        added: by weight's product, the variance of keeping 1 / LEVELS, 2 / LEVELS, ... of its terms (VCAS, Eq. 3).
    """

    own: Mapping[str, float]
    added: Mapping[str, Sequence[float]]

    def part(self, plan: Plan) -> float:
        """The variance that a plan's ratios of terms add, as a part of the mini-batch's own of what it trains."""
        own = sum(value for name, value in self.own.items() if plan.train is None or name in plan.train)
        return sum(self._added(plan).values()) / own if own else 0.0

    def largest_part(self, plan: Plan) -> float:
        """The largest that they add to one product of a weight, as a part of the weight's own; inf if that has none."""
        parts = [0.0]
        for name, added in self._added(plan).items():
            own = self.own.get(name.split(" #")[0], 0.0)
            parts.append(added / own if own else math.inf if added else 0.0)
        return max(parts)

    def _added(self, plan: Plan) -> dict[str, float]:
        ratios = {name.removeprefix(TOKENS): ratio for name, ratio in plan.ratios}
        return {name: self.added[name][round(r * LEVELS) - 1] for name, r in ratios.items() if name in self.added}


def candidates(plan: Plan) -> frozenset[str]:
    """The tensors that may be trained: those whose next step would lower the loss."""
    return frozenset(name for name, value in plan.importance.values.items() if value > 0) if plan.importance else frozenset()


def with_ratios(plan: Plan, graph: TrainingGraph, batch_size: int, seen: Variances, tolerance: float) -> Plan:
    """The plan that trains the most important tensors within all limits of its budget; `exact_selection` where that is best.

    Where all of what the plan trains without sampling is frozen by now, something else is selected for such steps first.

    Args:
        plan: with a selection, and an adaptive sampler among its passes.
        graph, batch_size: for which ratios are chosen.
        tolerance: variance that sampling may add, as a part of the mini-batch's own: to all gradients together and, as in the
            paper (VCAS, Eq. 7), to each weight's.
    Raises:
        BudgetError: the FLOPs leave nothing to train of what is not frozen.
    """
    exact = plan.exact_selection()
    importance = plan.importance
    assert importance is not None
    graph = replace(graph, batch_size=batch_size)
    profile = flop_profile(graph).at(batch_size)
    if not exact.trains_any_of(graph):  # all of it was frozen since
        selection = FlopsLimit(exact, graph, profile).select(importance)
        exact = replace(exact, train=frozenset(selection.names), selection=selection)
    trained = frozenset(profile.order) & (exact.train or frozenset())
    if not trained:
        return plan
    measured = _products(replace(exact, train=candidates(plan)), graph)
    problem = _problem(exact, graph, profile, seen, tolerance, measured)
    limit = FlopsLimit(exact, graph, profile)
    most, spare = limit.most, limit.saved(trained)
    unseen = 0
    if plan.memory is not None:
        now = [k for k, name in enumerate(problem.costs.names) if name in trained]
        unseen = _peak(exact, graph, plan.memory) - evaluate(problem, now, (), ())[1]
    for _ in range(ROUNDS):
        bytes_left = None if plan.memory is None else plan.memory.peak_bytes - unseen
        found = solve(problem, most + spare, bytes_left, tolerance, may_compress=False, may_recompute=False)
        if found is None or not found.kept:
            return exact
        sampled = _planned(exact, problem, profile, found, batch_size)
        if importance.of(sampled.train or ()) <= importance.of(trained):
            return exact
        there = _products(sampled, graph)
        sites = {problem.samples[p].site for p, _ in found.kept}
        others = {site for site in sites if there.get(site) != measured[site]}
        if others:  # where less is trained, adapters' products can have another order, with another variance
            problem = replace(problem, samples=tuple(s for s in problem.samples if s.site not in others))
            continue
        reports = replace(sampled, unsampled=None).rewrite(graph, batch_size)[1]
        flops = reports[-1].step_flops_after
        peak = 0 if plan.memory is None else _peak(sampled, graph, plan.memory) + _other_states(problem, trained, found.train)
        excess = 0 if plan.memory is None else peak - plan.memory.peak_bytes
        if flops <= most and excess <= 0:
            assert sampled.selection is not None
            return replace(sampled, selection=replace(sampled.selection, flops_ratio=problem.costs.part(flops)))
        spare -= max(0, flops - most)
        unseen += max(0, excess)
    return exact


def _products(plan: Plan, graph: TrainingGraph) -> dict[str, tuple[int, int, int]]:
    """The sizes (m, rows, n) of every product that may be sampled, by its site."""
    rewritten = for_loss_alone(plan.before_sampling().rewrite(graph)[0])
    found = {}
    for product in find_weight_products(rewritten):
        left, right = (node.meta["val"].shape for node in product.node.args)  # type: ignore[union-attr]
        outer, terms, inner = (rewritten.at(size, graph.batch_size) for size in (*left, right[1]))
        found[product.name] = (outer, terms, inner)
    return found


def _problem(
    plan: Plan,
    graph: TrainingGraph,
    profile: FlopProfile,
    seen: Variances,
    tolerance: float,
    products: Mapping[str, tuple[int, int, int]],
) -> Problem:
    """The program's numbers; segments that the plan computes again keep nothing, and no others are."""
    limited = plan if plan.memory is not None else replace(plan, memory=MemoryLimit(0, "aot_eager", None))
    problem = make_problem(limited, graph, profile, plan.importance, None)
    names = problem.costs.names
    again = {i for i, segment in enumerate(find_segments(graph)) if segment.name in plan.recompute}
    segments = tuple((0, 0) if i in again else kind for i, kind in enumerate(problem.segments))
    own = tuple(seen.own.get(name, 0.0) for name in names)
    sampler = next(p.sampler for p in plan.passes if isinstance(p, Vcas))
    samples = []
    for site, sizes in products.items():
        weight = site.split(" #")[0]
        if site in seen.added and weight in names:
            most = tolerance * own[names.index(weight)]
            samples.append(SampledTerms(site, names.index(weight), _levels(sizes, sampler, seen.added[site], most)))
    return replace(problem, segments=segments, samples=tuple(s for s in samples if s.levels), batch_variance=own)


def _levels(sizes: tuple[int, int, int], sampler: str, added: Sequence[float], most: float) -> tuple[KeepLevel, ...]:
    """How many terms may be kept, with the variance that leaving out the others adds, at most `most`."""
    outer, terms, inner = sizes
    found = []
    for level, variance in enumerate(added[:-1], start=1):
        kept = places(sampler, max(1, -(-level * terms // LEVELS)), terms)
        if kept < terms and variance <= most:
            found.append(KeepLevel(level / LEVELS, 2 * outer * inner * (terms - kept), variance))
    return tuple(found)


def _planned(plan: Plan, problem: Problem, profile: FlopProfile, found: Allocation, batch_size: int) -> Plan:
    names = tuple(problem.costs.names[k] for k in found.train)
    ratios = {TOKENS + problem.samples[p].site: problem.samples[p].levels[level].ratio for p, level in found.kept}
    cost = profile.cost(names)
    selection = Selection(
        names,
        cost,
        problem.costs.part(profile.forward + cost),
        sum(problem.importance[k] for k in found.train),
        "one program for FLOPs, memory and variance",
        found.gap,
    )
    return replace(
        plan,
        train=frozenset(names),
        selection=selection,
        ratios=tuple(sorted(ratios.items())),
        sampled_batch=batch_size,
        unsampled=plan.selection,
    )


def _other_states(problem: Problem, exact: frozenset[str], trained: Sequence[int]) -> int:
    """Bytes of the optimizer's states of tensors that only steps train which are not sampled."""
    others = [k for k, name in enumerate(problem.costs.names) if name in exact and k not in trained]
    return sum(problem.tensors[k].state for k in others)


def _peak(plan: Plan, graph: TrainingGraph, limit: MemoryLimit) -> int:
    return limit.peak_of(plan.rewrite(graph)[0], graph.batch_size)

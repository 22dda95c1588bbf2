"""A plan within a limit on memory: exact means first, then what costs least importance, held to the foretold peak of the step.

The program of `graphopt.planner.solver` adds up bytes at the borders of segments. What it does not see (temporaries, what fusion
saves) is measured as the difference to the foretold peak of the rewritten graph, and allowed for in the next round.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from graphopt.analysis.flops import FlopProfile, flop_profile
from graphopt.analysis.optimizers import Trained, optimizer_memory
from graphopt.analysis.segments import find_segments
from graphopt.errors import BudgetError
from graphopt.graph import TrainingGraph
from graphopt.passes import GreenTrainer, Lsp, Recompute
from graphopt.passes.lsp import Compressed
from graphopt.passes.lsp.choose import compression_shape
from graphopt.passes.lsp.orders import ORDERS, order_flops
from graphopt.passes.lsp.weight_gradients import find_weight_gradients
from graphopt.passes.recompute import Segments
from graphopt.planner.costs import backward_costs
from graphopt.planner.flops_limit import dearest_step, flops_saved
from graphopt.planner.importance import Importance
from graphopt.planner.memory_limit import MemoryLimit
from graphopt.planner.plan import Plan
from graphopt.planner.problem import Allocation, Problem, TensorBytes, evaluate
from graphopt.planner.selection import Selection
from graphopt.planner.solver import solve

ROUNDS = 8
"""Plans whose peak is foretold at most."""

FEWEST = 1e-3
"""Importance that every tensor has at least, as a part of the largest, where nothing limits FLOPs: all training is wanted."""


@dataclass(frozen=True)
class Means:
    """What a plan may do to need less memory, beside computing segments again where its passes do that.

    Attributes:
        freeze: leave tensors untrained.
        compress: the pass that may be added, and its sizes; None: gradients are not compressed.
    """

    freeze: bool = False
    compress: Lsp | None = None


def within_memory(plan: Plan, graph: TrainingGraph, means: Means, rate: Callable[[], Importance] | None = None) -> Plan:
    """A plan whose step stays within `plan.memory`, as near to the given one as that allows; the given one without a limit.

    Args:
        rate: measures importance; called where exact means do not do and `means` allow others.
    Raises:
        BudgetError: no plan does; states the smallest feasible memory.
        ImportanceError: see `measure_importance`.
    """
    limit = plan.memory
    if limit is None:
        return plan
    if Recompute.name in plan.decisions:  # those of another selection
        plan = plan.decided(Recompute.name, Segments(()))
    least = _foretold(plan, graph, limit)
    profile = flop_profile(graph)
    if least <= limit.peak_bytes and _within_flops(plan, graph, profile):
        return plan
    attempt = _Attempt(plan, graph, limit, least, profile, means, flops_saved(plan, graph, profile))
    if not attempt.may_do_anything:
        raise _too_little(plan, graph, limit, least)
    exact = attempt.search(make_problem(plan, graph, profile, None, None), train_all=True)
    if exact is not None:
        return exact
    importance = plan.importance
    if importance is None and rate is not None and (means.freeze or means.compress is not None):
        importance = rate()
    if importance is not None:
        attempt = replace(attempt, importance=importance)
        found = attempt.search(make_problem(plan, graph, profile, importance, means.compress))
        if found is not None:
            return found
    smallest = attempt.smallest(make_problem(plan, graph, profile, attempt.importance, means.compress))
    if smallest is not None:
        peak = _foretold(smallest, graph, limit)
        if peak <= limit.peak_bytes and _within_flops(smallest, graph, profile):
            return smallest
        least = min(least, peak)
    raise _too_little(plan, graph, limit, least)


def _too_little(plan: Plan, graph: TrainingGraph, limit: MemoryLimit, least: int) -> BudgetError:
    flops = "" if plan.budget.flops is None else f" and flops={plan.budget.flops}"
    recompute = "" if any(isinstance(p, Recompute) for p in plan.passes) else ", or add 'recompute' to passes"
    return BudgetError(
        f"memory={limit.peak_bytes:,} bytes is less than a step needs with a batch of {graph.batch_size} ({limit.backend}, "
        f"optimizer state included). Smallest feasible with these passes{flops}: {least:,}. Use a smaller batch{recompute}."
    )


@dataclass(frozen=True)
class _Attempt:
    """The search for one limit.

    Attributes:
        plan_peak: what is foretold of `plan` as it is.
        spare_flops: that its passes save, beyond what the program counts.
    """

    plan: Plan
    graph: TrainingGraph
    limit: MemoryLimit
    plan_peak: int
    profile: FlopProfile
    means: Means
    spare_flops: int = 0
    importance: Importance | None = None

    def search(self, problem: Problem, train_all: bool = False) -> Plan | None:
        """The best plan whose foretold peak is within the limit; None if there is none."""
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
                may_compress=not train_all and self.means.compress is not None,
                may_recompute=self._may_recompute,
            )
            if allocation is None:
                if unseen == start:
                    return None
                high = unseen
            else:
                plan = self._plan(problem, allocation, train_all)
                peak = _foretold(plan, self.graph, self.limit)
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
        decided = not self.means.freeze
        problem = self._as_planned(problem) if decided else problem
        allocation = solve(
            problem,
            self._flops_limit(self.spare_flops),
            smallest_memory=True,
            train_all=decided,
            may_compress=self.means.compress is not None,
            may_recompute=self._may_recompute,
        )
        return None if allocation is None else self._plan(problem, allocation, decided)

    def _as_planned(self, problem: Problem) -> Problem:
        """The problem with an importance of 1 for what the plan trains, and of 0 for the rest."""
        train = self.plan.train
        return replace(problem, importance=tuple(float(train is None or name in train) for name in problem.costs.names))

    def _plan(self, problem: Problem, allocation: Allocation, keep_selection: bool) -> Plan:
        importance, compress = self.importance, self.means.compress
        return planned(self.plan, self.graph, problem, allocation, importance, compress, keep_selection)

    @property
    def may_do_anything(self) -> bool:
        """Whether there is any choice."""
        return self._may_recompute or self.means.freeze or self.means.compress is not None

    @property
    def _may_recompute(self) -> bool:
        return any(isinstance(p, Recompute) and p.segments is None for p in self.plan.passes)

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
    compress: Lsp | None,
    keep_selection: bool = False,
) -> Plan:
    """`plan` with a solution's decisions.

    Args:
        keep_selection: what is trained stays as the plan says.
    """
    names = problem.costs.names
    segments = [segment.name for segment in find_segments(graph)]
    again = tuple(segments[i] for i in allocation.recomputed if problem.segments[i][0])
    plan = plan.decided(Recompute.name, Segments(again))
    passes = list(plan.passes)
    if keep_selection:
        return plan.with_passes(passes)
    trained = tuple(names[k] for k in allocation.train)
    if len(trained) < len(names) or plan.train is not None:
        if not any(isinstance(p, GreenTrainer) for p in passes):
            passes.append(GreenTrainer())
        value = math.fsum(problem.importance[k] for k in allocation.train)
        cost = problem.costs.cost(allocation.train)
        ratio = problem.costs.part(problem.costs.forward_flops + cost)
        selection = Selection(trained, cost, ratio, value, "one program for FLOPs and memory", allocation.gap)
        plan = replace(plan, train=frozenset(trained), selection=selection, importance=importance)
    if allocation.compressed and compress is not None:
        compressed = tuple(sorted(names[k] for k in allocation.compressed))
        passes.append(replace(compress, weights=compressed))
        plan = plan.decided(Lsp.name, Compressed(compressed))
    return plan.with_passes(passes)


def _foretold(plan: Plan, graph: TrainingGraph, limit: MemoryLimit) -> int:
    return limit.peak_of(plan.rewrite(graph)[0], graph.batch_size)


def _within_flops(plan: Plan, graph: TrainingGraph, profile: FlopProfile) -> bool:
    """Whether the dearest step keeps to the FLOPs: orders of adapters' products that save memory can cost more of them."""
    return plan.budget.flops is None or dearest_step(plan, graph, profile) <= plan.budget.flops * profile.step


def make_problem(
    plan: Plan, graph: TrainingGraph, profile: FlopProfile, importance: Importance | None, compress: Lsp | None
) -> Problem:
    """The numbers of a graph; see `Problem`.

    Args:
        plan: whose limit says which optimizer is used, and whose budget whether all is to be trained.
        compress: how gradients may be compressed; None: they may not.
    """
    assert plan.memory is not None
    costs = backward_costs(profile)
    segments = find_segments(graph)
    segment_of = {name: i for i, segment in enumerate(segments) for name in segment.parameters}
    parameters = {p.name: p for p in graph.parameters}
    device = next(iter(graph.placeholders)).meta["val"].device
    held = set(plan.decisions[Lsp.name].weights) if Lsp.name in plan.decisions else set()
    trained = [Trained(n, parameters[n].shape, parameters[n].dtype) for n in costs.names if n not in held]
    states: dict[str, int] = {}
    for name, _, size in optimizer_memory(plan.memory.optimizer, trained, device).states:
        states[name] = states.get(name, 0) + size
    added = {} if compress is None or held else _compressions(graph, costs.names, costs.weight_grad_flops, compress)
    tensors = []
    for name in costs.names:
        small, flops = added.get(name, (None, 0))
        gradient = 0 if name in held else math.prod(parameters[name].shape) * parameters[name].dtype.itemsize
        tensors.append(TensorBytes(gradient, states.get(name, 0), segment_of.get(name, 0), small, flops))
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
    kept = 1 - compress.threshold**2 if compress is not None else 1.0
    kinds = tuple((segment.saved_bytes, segment.flops) for segment in segments)
    return Problem(costs, rated, tuple(tensors), kinds, fixed, max(kept, 0.05))


def _compressions(
    graph: TrainingGraph, names: tuple[str, ...], formed: tuple[int, ...], rewrite: Lsp
) -> dict[str, tuple[int, int]]:
    """Bytes of a compressed gradient with its projectors, and the FLOPs that it adds, of every tensor that can have one."""
    found = {}
    own = dict(zip(names, formed, strict=True))
    for gradient in find_weight_gradients(graph):
        if gradient.name not in own or rewrite.refusal(gradient):
            continue
        shapes = [compression_shape(gradient, term, rewrite, graph) for term in gradient.terms]
        flops = min(
            sum(int(order_flops(o, s).subs(dict.fromkeys(s.rows.free_symbols, graph.batch_size))) for s in shapes) for o in ORDERS
        )
        width = gradient.node.meta["val"].element_size()
        projectors = sum(gradient.shape) * rewrite.nonzeros * (width + 4) * 2
        added = max(0, flops - own[gradient.name])  # steps that compare projectors form the gradient
        found[gradient.name] = (projectors + rewrite.subspace**2 * width, added)
    return found


def default_compression(graph: TrainingGraph, limits_flops: bool) -> Lsp | None:
    """The compression that a plan may add by itself: a quarter of the widest matrix, at most the paper's 512."""
    widest = max((min(p.shape) for p in graph.trainable if len(p.shape) == 2), default=0)
    if widest < 32:
        return None
    size = min(512, 2 ** int(math.log2(widest / 4)))
    return Lsp(subspace=size, nonzeros=min(16, size // 2), criterion="flops" if limits_flops else "time")

"""The plan: which passes run, with which decisions, so that a step meets the budget."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from graphopt.analysis.kept import kept
from graphopt.budget import Budget
from graphopt.errors import BudgetError, PassError
from graphopt.graph import TrainingGraph
from graphopt.passes import BY_NAME, Pass, PassReport, Preserves, in_order, run_pass
from graphopt.passes.technique import Decision, technique
from graphopt.planner.importance import Importance
from graphopt.planner.memory_limit import MemoryLimit
from graphopt.planner.selection import Selection
from graphopt.runtime.bounded_cache import BoundedCache
from graphopt.transforms.region_products import keep_last_products

PassList = str | Sequence[str | Pass]

REWRITES = 3
"""That are kept per graph, those used last; of each as many again, one pass further on."""

Rewritten = tuple[TrainingGraph, PassReport]


def resolve_passes(passes: PassList, budget: Budget) -> tuple[Pass, ...]:
    """The passes to run, in the order in which they run (see `in_order`), and a check that they serve every field of the budget.

    Args:
        passes: "auto" (those that need no budget, and whatever the budget needs), or names and pass objects.
    Raises:
        PassError: an unknown pass.
        BudgetError: a field of the budget that no pass in use serves.
    """
    chosen: list[Pass] = []
    if isinstance(passes, str) or not isinstance(passes, Iterable):
        if passes != "auto":
            raise PassError(f"passes={passes!r}: use 'auto' or a list of {_known()}.")
        chosen = [make() for make in BY_NAME.values() if make.wanted(budget) is True]
    else:
        for item in passes:
            if isinstance(item, str):
                if item not in BY_NAME:
                    raise PassError(f"unknown pass {item!r}: known are {_known()}.")
                chosen.append(BY_NAME[item]())
            elif isinstance(item, type) or not isinstance(item, Pass):
                raise PassError(f"{item!r} is not a pass: give a name ({_known()}) or an object with the Pass contract.")
            else:
                chosen.append(item)
    twice = {p.name for i, p in enumerate(chosen) if any(p.name == other.name for other in chosen[:i])}
    if twice:
        raise PassError(f"{', '.join(sorted(twice))} stands more than once among the passes: leave one of them.")
    for rewrite in chosen:
        technique(rewrite).check(budget, chosen)
    served = {name for rewrite in chosen for name in rewrite.serves} | {"memory"}  # predicted and checked, whatever the passes
    if passes == "auto":
        served.update(budget.stated())  # a limit that no pass uses up is kept
    for name, value in budget.stated().items():
        if name not in served:
            known = sorted({"memory", *(s for make in BY_NAME.values() for s in make.serves)})
            raise BudgetError(
                f"budget {name}={value} is served by no pass in use; this version serves {', '.join(known)}. "
                "Remove it from the budget."
            )
    return in_order(chosen)


def _known() -> str:
    return ", ".join(sorted(BY_NAME))


@dataclass(frozen=True)
class Plan:
    """Decisions for every pass.

    Attributes:
        budget: as stated by the user.
        passes: in the order in which they run.
        train: parameters to train; None trains all.
        selection: how `train` was found; None where it was given or nothing limits FLOPs.
        importance: what the selection maximised.
        memory: the budget's limit on memory.
        not_separable: why rows of the backward must not be left out, "" if they may; see `inseparable`.
        decisions: of techniques, by their names.
        not_needed: why, by name, of passes that the budget would allow and that were left out.
        measures: its steps measure what others approximate, once in many: they leave out nothing.
    """

    budget: Budget
    passes: tuple[Pass, ...]
    train: frozenset[str] | None = None
    selection: Selection | None = None
    importance: Importance | None = None
    memory: MemoryLimit | None = None
    not_separable: str = ""
    decisions: Mapping[str, Any] = field(default_factory=dict)
    not_needed: Mapping[str, str] = field(default_factory=dict)
    measures: bool = False

    @property
    def key(self) -> Hashable:
        """What compiled steps depend on; plans with equal keys give equal steps. As text it is the same in every process."""
        train = None if self.train is None else tuple(sorted(self.train))
        passes = tuple(p.name for p in self.passes)
        decided = tuple(sorted((name, d.key) for name, d in self.decisions.items() if name in passes and d.key))
        return train, passes, decided, self.measures, self.budget.flops is not None

    def decided(self, name: str, decision: Decision) -> Plan:
        """The plan with a technique's decision."""
        return replace(self, decisions={**self.decisions, name: decision})

    def rewrite(self, graph: TrainingGraph, batch_size: int | None = None) -> tuple[TrainingGraph, list[PassReport]]:
        """Run every pass on `graph`; the graph itself stays as it is.

        Args:
            batch_size: for which decisions are taken that depend on it; by default the captured one.
        """
        batch_size = batch_size or graph.batch_size
        reports = []
        captured = graph = replace(graph, batch_size=batch_size)  # rows and FLOPs are counted for this batch
        for rewrite in self.passes:
            hooks = technique(rewrite)
            decisions, choices = hooks.decide(self, captured, graph)
            graph, report = once(run_pass, rewrite, graph, decisions)
            graph = hooks.finish(self, graph)
            reports.append(replace(report, choices=choices))
        if self.budget.flops is not None:
            graph = keep_last_products(graph)
        return graph, reports

    def trains(self, name: str, planned: Collection[str]) -> bool:
        """Whether a parameter is trained: those that the plan knows nothing of are.

        Args:
            planned: the parameters that the plan knows of.
        """
        return self.train is None or name in self.train or name not in planned

    def rewrite_region(self, graph: TrainingGraph, planned: Collection[str]) -> tuple[TrainingGraph, list[PassReport]]:
        """Run every pass on the joint graph of a part of the model; passes that do not fit are left out.

        Args:
            planned: the parameters that the plan knows of; others in the graph are trained.
        """
        if self.train is None:
            return self.rewrite(graph)
        sites = {p.name for p in graph.trainable}
        kept = {name for name in sites if self.trains(name, planned)}
        if kept:
            return replace(self, train=self.train | kept).rewrite(graph)
        graph = graph.clone()
        for name in sites:
            graph.drop_gradient(name)
        graph.eliminate_dead_code()
        return graph, []

    @cached_property
    def samples(self) -> bool:
        """Whether a step of this plan would leave out rows of the backward."""
        return any(technique(p).leaves_out(self) for p in self.passes)

    def for_batch(self, batch_size: int) -> Plan:
        """The plan of steps of `batch_size` samples."""
        plan = self
        for rewrite in self.passes:
            plan = technique(rewrite).for_batch(plan, batch_size)
        return plan

    def inseparable(self, graph: TrainingGraph, tensors: Mapping[str, Tensor], inputs: Sequence[Tensor]) -> str:
        """Why rows of a graph's backward must not be left out; "" if they may; see `Technique.inseparable`."""
        return next((why for p in self.passes if (why := technique(p).inseparable(graph, tensors, inputs))), "")

    def before_sampling(self) -> Plan:
        """The plan of what runs before rows are left out: they are counted, and variances measured, on ordinary gradients."""
        sampling = [p.preserves is Preserves.UNBIASED for p in self.passes]
        return replace(self, passes=self.passes[: sampling.index(True) if True in sampling else None])

    def without_sampling(self) -> Plan:
        """The plan of steps in which every row is kept."""
        return replace(self, passes=tuple(p for p in self.passes if p.preserves is not Preserves.UNBIASED))

    def without_approximations(self) -> Plan:
        """The plan with the passes alone whose gradients are exact; where others compress them, graphs communicate none."""
        projects = any(p.preserves is Preserves.PROJECTED for p in self.passes)
        exact = [p for p in self.passes if p.preserves is Preserves.EXACT and not (projects and technique(p).communicates)]
        return replace(self, passes=tuple(exact), measures=False)

    def measuring(self) -> Plan:
        """The plan of steps that measure."""
        sampling = {p.name for p in self.passes if p.preserves is Preserves.UNBIASED}
        return replace(self, measures=True, decisions={n: d for n, d in self.decisions.items() if n not in sampling})

    def with_passes(self, passes: Sequence[Pass]) -> Plan:
        """The plan with other passes."""
        return replace(self, passes=in_order(passes))

    def without(self, rewrite: Pass, why: str = "") -> Plan:
        """The plan without a pass, and `why` it was not needed, if that is to be reported."""
        plan = self.with_passes([p for p in self.passes if p is not rewrite])
        return replace(plan, not_needed={**plan.not_needed, rewrite.name: why}) if why else plan

    def sampled_part(self, graph: TrainingGraph, batch_size: int, reports: Sequence[PassReport]) -> float:
        """FLOPs of a step as a part of those with every row kept, all else being equal.

        Args:
            graph, batch_size: see `rewrite`, which returned `reports`.
        """
        sampling = [i for i, r in enumerate(reports) if r.preserves is Preserves.UNBIASED and r.changes.changed]
        if not sampling:
            return 1.0
        whole = reports[sampling[0]].step_flops_before
        if sampling[0] < len(reports) - 1:
            whole = self.without_sampling().rewrite(graph, batch_size)[1][-1].step_flops_after
        return reports[-1].step_flops_after / whole if whole else 1.0


def once(run: Callable[[Pass, TrainingGraph, Any], Rewritten], rewrite: Pass, graph: TrainingGraph, decisions: Any) -> Rewritten:
    """`run(rewrite, graph, decisions)`, or what it gave before for the same pass, graph and decisions.

    Plans that differ in one pass share what runs before it. That relies on a pass being a function of its own fields, the graph
    and the decisions.
    """
    frozen = _frozen(decisions)
    if frozen is None:
        return run(rewrite, graph, decisions)
    made: BoundedCache[Hashable, tuple[Pass, Rewritten]] = kept(graph, "rewrites", None, lambda: BoundedCache(REWRITES))
    key = run, id(rewrite), frozen  # the entry holds the pass, so that no other has its id
    found = made.get(key) or made.put(key, (rewrite, run(rewrite, graph, decisions)))
    return found[1]


def _frozen(decisions: Any) -> Hashable | None:
    """Decisions as a key, their order included where they have one; None where they cannot be one."""
    frozen = tuple(decisions.items()) if isinstance(decisions, Mapping) else decisions
    frozen = frozenset(frozen) if isinstance(frozen, Set) else frozen
    try:
        hash(frozen)
    except TypeError:
        return None
    return type(decisions).__name__, frozen

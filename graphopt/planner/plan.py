"""The plan: which passes run, with which decisions, so that a step meets the budget."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from graphopt.analysis.segments import find_segments
from graphopt.budget import Budget
from graphopt.compressed_gradients import Exchange
from graphopt.errors import BudgetError, PassError
from graphopt.graph import TrainingGraph
from graphopt.offload_nodes import insert_offload
from graphopt.passes import BY_NAME, GreenTrainer, Lsp, Pass, PassReport, Preserves, Recompute, RunLora, Vcas, in_order, run_pass
from graphopt.planner.compression import CompressionChoice, choose_compressions
from graphopt.planner.contraction import ETA, Choice, choose_orders
from graphopt.planner.importance import Importance
from graphopt.planner.memory_limit import MemoryLimit, orders_within
from graphopt.planner.product_times import product_times
from graphopt.planner.rewrites import once
from graphopt.planner.selection import Selection

PassList = str | Sequence[str | Pass]

Ratios = tuple[tuple[str, float], ...]
"""(site, part of its rows kept) where that is less than all, sorted."""


def resolve_passes(passes: PassList, budget: Budget) -> tuple[Pass, ...]:
    """The passes to run, in the order in which they run (see `in_order`), and a check that they serve every field of the budget.

    Args:
        passes: "auto" (those that need no budget, and whatever the budget needs), or names and pass objects.
    Raises:
        PassError: an unknown pass.
        BudgetError: a field of the budget that no pass in use serves.
    """
    chosen: list[Pass] = []
    if isinstance(passes, str):
        if passes != "auto":
            raise PassError(f"passes={passes!r}: use 'auto' or a list of {_known()}.")
        chosen = [make() for make in BY_NAME.values() if _wanted(make, budget)]
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
    fixed = [p for p in chosen if isinstance(p, Vcas) and not p.adaptive]
    if fixed and budget.variance is not None:
        raise BudgetError("vcas has fixed ratios, so that budget variance cannot be met: leave out one of the two.")
    if budget.variance is None and any(isinstance(p, Vcas) and p.adaptive for p in chosen):
        raise PassError("vcas needs keep_rows or keep_tokens, or a Budget(variance=...) to adapt them to.")
    if budget.memory is None and any(isinstance(p, Recompute) and p.segments is None for p in chosen):
        raise PassError("recompute needs the names of segments, or a Budget(memory=...) to choose them for.")
    served = {name for rewrite in chosen for name in rewrite.serves} | {"memory"}  # foretold and checked, whatever the passes
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


def _wanted(kind: type[Pass], budget: Budget) -> bool:
    """Whether "auto" uses a pass: it serves the budget, or it needs none and changes nothing but the cost."""
    if kind is Vcas and budget.flops is not None:
        return False  # see `SAMPLING_LEFT_OUT`
    if kind.serves:
        return bool(set(kind.serves) & set(budget.stated()))
    return kind.preserves is Preserves.EXACT


SAMPLING_LEFT_OUT = "the selection keeps to the FLOPs by itself, and measuring variances would cost more of them"
"""Why "auto" does not sample rows where FLOPs are limited, although the budget allows some variance."""


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
        imprecise: error by name of layers whose weight must not be merged with their adapters; see `merge_errors`.
        memory: the budget's limit on memory.
        ratios: of an adaptive sampler, by site; sites that are not named are kept in full.
        sampled_batch: the batch size that `ratios` were found for; other batches are computed exactly.
        mixing: why rows of the backward must not be left out, "" if they may; see `mixing_reason`.
        compressed: weights whose gradient is compressed; None: those that can be.
        recompute: segments of the forward that the backward computes again, where the planner chooses them.
        not_needed: why, by name, of passes that the budget would allow and that were left out.
        offload: the receivers to which compressed gradients are handed, and of gates; see `insert_offload`.
        checking: the receiver to which the step hands the full gradients of those; None where it compresses them itself.
    """

    budget: Budget
    passes: tuple[Pass, ...]
    train: frozenset[str] | None = None
    selection: Selection | None = None
    importance: Importance | None = None
    imprecise: Mapping[str, float] = field(default_factory=dict)
    memory: MemoryLimit | None = None
    ratios: Ratios = ()
    sampled_batch: int = 0
    mixing: str = ""
    compressed: tuple[str, ...] | None = None
    recompute: tuple[str, ...] = ()
    not_needed: Mapping[str, str] = field(default_factory=dict)
    checking: int | None = None
    offload: tuple[int, int] | None = None

    @property
    def key(self) -> Hashable:
        """What compiled steps depend on; plans with equal keys give equal steps."""
        passes = tuple(p.name for p in self.passes)
        ratios = self.ratios if self.checking is None else ()
        return self.train, self._unmerged, ratios, self.checking, self.offload is not None, passes, self.recompute

    @property
    def _unmerged(self) -> frozenset[str]:
        return frozenset(name for name, error in self.imprecise.items() if error > ETA)

    def rewrite(self, graph: TrainingGraph, batch_size: int | None = None) -> tuple[TrainingGraph, list[PassReport]]:
        """Run every pass on `graph`; the graph itself stays as it is.

        Args:
            batch_size: for which decisions are taken that depend on it; by default the captured one.
        """
        batch_size = batch_size or graph.batch_size
        reports = []
        captured = graph = replace(graph, batch_size=batch_size)  # rows and FLOPs are counted for this batch
        for rewrite in self.passes:
            choices: tuple[Any, ...] = ()
            if isinstance(rewrite, Vcas):
                decisions: Any = self._sample_ratios(rewrite, graph)
            elif isinstance(rewrite, Lsp):
                decisions, choices = self._compressions(captured, graph, rewrite)
            elif isinstance(rewrite, Recompute):
                decisions = self._segments(rewrite, graph)
            elif isinstance(rewrite, RunLora):
                found = self._orders(graph, batch_size, rewrite)
                choices = tuple(found.values())
                decisions = {name: choice.order for name, choice in found.items()}
            else:
                decisions = {site.name for site in rewrite.applicable(graph)}
            if isinstance(rewrite, GreenTrainer) and self.train is not None:
                decisions &= self.train
                if not decisions:
                    raise PassError("every selected tensor is frozen now: call reselect(batch), or unfreeze one of them.")
            graph, report = once(run_pass, rewrite, graph, decisions)
            if isinstance(rewrite, Lsp) and self.offload is not None and self.checking is None and self.compressed:
                gated = rewrite.schedule == "layerwise"
                graph = insert_offload(graph, self.compressed, *self.offload, gated)
            reports.append(replace(report, choices=choices))
        return graph, reports

    def rewrite_region(self, graph: TrainingGraph, planned: Collection[str]) -> tuple[TrainingGraph, list[PassReport]]:
        """Run every pass on the joint graph of a part of the model; passes that do not fit are left out.

        Args:
            planned: the parameters that the plan knows of; others in the graph are trained.
        """
        if self.train is not None:
            sites = {p.name for p in graph.trainable}
            kept = {name for name in sites if name in self.train or name not in planned}
            if not kept:
                graph = graph.clone()
                for name in sites:
                    graph.drop_gradient(name)
                graph.eliminate_dead_code()
                return graph, []
            return replace(self, train=frozenset(kept)).rewrite(graph)
        return self.rewrite(graph)

    @property
    def samples(self) -> bool:
        """Whether a step of this plan would leave out rows of the backward; one that checks projectors never does."""
        return self.checking is None and any(isinstance(p, Vcas) and (not p.adaptive or self.ratios) for p in self.passes)

    def for_batch(self, batch_size: int) -> Plan:
        """The plan of steps of `batch_size` samples: ratios that were measured hold for one size alone."""
        adaptive = any(isinstance(p, Vcas) and p.adaptive for p in self.passes)
        return replace(self, ratios=()) if adaptive and self.samples and batch_size != self.sampled_batch else self

    def before_sampling(self) -> Plan:
        """The plan of what runs before the sampler: rows are counted, and variances measured, on ordinary gradients."""
        kinds = [isinstance(p, Vcas) for p in self.passes]
        return replace(self, passes=self.passes[: kinds.index(True) if True in kinds else None], ratios=())

    def without_sampling(self) -> Plan:
        """The plan of steps in which every row is kept."""
        return replace(self, passes=tuple(p for p in self.passes if not isinstance(p, Vcas)), ratios=())

    def with_passes(self, passes: Sequence[Pass]) -> Plan:
        """The plan with other passes."""
        return replace(self, passes=in_order(passes))

    def _segments(self, rewrite: Recompute, graph: TrainingGraph) -> tuple[str, ...]:
        """The segments to compute again; all of them in a graph that has not the same ones, as for another sequence length."""
        wanted = self.recompute if rewrite.segments is None else rewrite.segments
        known = {segment.name for segment in find_segments(graph)}
        return tuple(wanted) if known.issuperset(wanted) else tuple(site.name for site in rewrite.applicable(graph))

    def sampled_part(self, graph: TrainingGraph, batch_size: int, reports: Sequence[PassReport]) -> float:
        """FLOPs of a step as a part of those with every row kept, all else being equal.

        Args:
            graph, batch_size: see `rewrite`, which returned `reports`.
        """
        sampling = [i for i, report in enumerate(reports) if report.name == Vcas.name and report.changes.changed]
        if not sampling:
            return 1.0
        whole = reports[sampling[0]].step_flops_before
        if sampling[0] < len(reports) - 1:
            whole = self.without_sampling().rewrite(graph, batch_size)[1][-1].step_flops_after
        return reports[-1].step_flops_after / whole if whole else 1.0

    def without_approximations(self) -> Plan:
        """The plan with the passes alone whose gradients are exact."""
        exact = tuple(p for p in self.passes if p.preserves is Preserves.EXACT)
        return replace(self, passes=exact, ratios=(), checking=None)

    def may_replace(self, other: Plan) -> bool:
        """Whether a step of this plan can stand in for one of `other`: it leaves out no more rows, and rounds no more away."""
        wanted = dict(other.ratios)
        keeps = all(ratio >= wanted.get(site, 1.0) for site, ratio in self.ratios)
        return self.checking is None and keeps and self._unmerged >= other._unmerged

    def _sample_ratios(self, rewrite: Vcas, graph: TrainingGraph) -> dict[str, float]:
        if self.mixing or not graph.symbolic or self.checking is not None:
            return {}
        if not rewrite.adaptive:
            return rewrite.ratios(graph)
        if graph.batch_size != self.sampled_batch:
            return {}
        known = {site.name for site in rewrite.applicable(graph)}  # another selection may have fewer sites
        return {name: ratio for name, ratio in self.ratios if name in known}

    def _compressions(
        self, captured: TrainingGraph, graph: TrainingGraph, rewrite: Lsp
    ) -> tuple[dict[str, str | Exchange], tuple[CompressionChoice, ...]]:
        """How gradients are compressed; always those of the same weights, since an optimizer holds their state.

        Args:
            captured: before any pass; it says which weights these are, where the plan does not.
            graph: whose gradients are compressed. One that a pass turned into something else than a sum of products is formed.
        """
        names = [site.name for site in rewrite.applicable(captured)] if self.compressed is None else self.compressed
        computed = graph.gradients()
        wanted = [name for name in names if name in computed]
        if rewrite.schedule == "zero":
            return dict.fromkeys(wanted, "formed"), ()
        if self.checking is not None:
            return {name: Exchange(self.checking, names.index(name)) for name in wanted}, ()
        choices = choose_compressions(graph, graph.batch_size, rewrite, wanted, product_times)
        return {name: choices[name].order for name in wanted}, tuple(choices.values())

    def _orders(self, graph: TrainingGraph, batch_size: int, rewrite: RunLora) -> dict[str, Choice]:
        def choose(price: float) -> dict[str, Choice]:
            return choose_orders(graph, batch_size, rewrite, self.imprecise, product_times, price)

        if self.memory is None or rewrite.fixed_order is not None:
            return choose(0.0)
        return orders_within(self.memory, graph, batch_size, choose)

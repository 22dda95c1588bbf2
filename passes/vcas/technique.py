"""The sampler as a technique: what it refuses, decides and starts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from graphopt.passes.base import Changes, Pass, PassReport, Preserves, Site
from graphopt.passes.fields import require_number, require_seed, require_whole
from graphopt.passes.state import State
from graphopt.passes.technique import Planning, Section, Technique
from graphopt.passes.vcas.boundaries import find_boundaries
from graphopt.passes.vcas.independence import why_not_separable
from graphopt.passes.vcas.products import find_weight_products, linear_products
from graphopt.passes.vcas.rewrite import ROWS, TOKENS, Draws, sample
from torch import Tensor

from graphopt.budget import Budget
from graphopt.errors import BudgetError, InputError, PassError
from graphopt.graph import TrainingGraph
from graphopt.transforms.symbolic_zeros import for_loss_alone

if TYPE_CHECKING:
    from graphopt.planner.plan import Plan
    from graphopt.runtime.module import OptimizedModule

LEFT_OUT = "the selection keeps to the FLOPs by itself, and measuring variances would cost more of them"
"""Why "auto" does not sample rows where FLOPs are limited, although the budget allows some variance."""

NOTHING_COMPARED = (
    "the last calibration of the sampler found nothing to compare with: the gradients of its batches were equal or not finite; "
    "its ratios stay as they are"
)

Ratios = tuple[tuple[str, float], ...]
"""(site, part of its rows kept) where that is less than all, sorted."""


@dataclass(frozen=True)
class SampleSizes:
    """Ratios that a controller has found, for batches of one size; others are computed exactly.

    Attributes:
        ratios: by site; sites that are not named are kept in full.
        batch_size: samples of those batches.
    Raises:
        InputError: a ratio or a size that no batch can have, as a damaged file may.
    """

    ratios: Ratios = ()
    batch_size: int = 0

    def __post_init__(self) -> None:
        if self.batch_size < 0 or not all(0 < ratio <= 1 for _, ratio in self.ratios):
            raise InputError("the ratios of vcas are not all above 0 and at most 1.")

    @property
    def key(self) -> Hashable:
        """See `Decision`. Batches of another size are computed exactly, and so in other steps."""
        return (self.ratios, self.batch_size) if self.ratios else ()


@dataclass(frozen=True)
class Vcas(Technique):
    """The sampler. Where samples are not independent, as with batch norm, it leaves out terms of weights' gradients and no rows.

    Attributes:
        keep_rows: part of the batch kept (rho): for all boundaries, or one number for each from the output to the input. None:
            under `Budget(variance=...)` a controller adapts it, starting from 1.
        keep_tokens: part of the rows kept in each weight's gradient (nu): for all, or by parameter name. None: as `keep_rows`.
        seed: of the generator that rows are drawn with.
        every: steps between adaptations (F); the paper's advice is at most 1/50 of all steps, and no more than 500.
        alpha, beta: how fast an adaptation changes the rows' and the tokens' ratios.
        rows_share: part of `Budget(variance=...)` that is for rows; the rest is for the terms of weights' gradients, which rarely
            use theirs up. 1 leaves out rows alone, 0 terms alone. The paper's tau for each is `Budget(variance=2 * tau)` and 0.5.
        batches: of a calibration (M); each has an exact pass, and a sampled one for every set of ratios that is measured.
    Raises:
        PassError: a ratio outside (0, 1], ratios that increase towards the input, or another bad number.
    """

    keep_rows: float | tuple[float, ...] | None = None
    keep_tokens: float | Mapping[str, float] | None = None
    seed: int = 0
    every: int = 100
    alpha: float = 0.01
    beta: float = 0.95
    rows_share: float = 0.75
    batches: int = 2
    name = "vcas"
    preserves = Preserves.UNBIASED
    serves = ("variance",)
    decides = SampleSizes

    def __post_init__(self) -> None:
        require_whole(self, "every")
        require_whole(self, "batches", 2)
        require_seed(self)
        require_number(self, "rows_share", lambda value: 0 <= value <= 1, "from 0 to 1")
        for rate in ("alpha", "beta"):
            require_number(self, rate, lambda value: 0 < value < 1, "between 0 and 1")
        if isinstance(self.keep_rows, Sequence) and not isinstance(self.keep_rows, str) and self.keep_rows:
            object.__setattr__(self, "keep_rows", tuple(self.keep_rows))
        rows = self.keep_rows if isinstance(self.keep_rows, tuple) else (self.keep_rows,)
        tokens = self.keep_tokens.values() if isinstance(self.keep_tokens, Mapping) else (self.keep_tokens,)
        for name, ratios in (("keep_rows", rows), ("keep_tokens", tokens)):
            if given := [ratio for ratio in ratios if ratio is not None]:
                require_number(self, name, lambda value: 0 < value <= 1, "above 0 and at most 1", *given)
        if isinstance(self.keep_rows, tuple) and list(self.keep_rows) != sorted(self.keep_rows, reverse=True):
            raise PassError(f"{self.name}: keep_rows={self.keep_rows}: ratios must not increase from the output to the input.")

    @property
    def adaptive(self) -> bool:
        """Whether a controller is to find the ratios."""
        return self.keep_rows is None and self.keep_tokens is None

    def check(self, budget: Budget, passes: Sequence[Pass]) -> None:
        """See that either the ratios are given or the variance is."""
        if not self.adaptive and budget.variance is not None:
            raise BudgetError("vcas has fixed ratios, so that budget variance cannot be met: leave out one of the two.")
        if self.adaptive and budget.variance is None:
            raise PassError("vcas needs keep_rows or keep_tokens, or a Budget(variance=...) to adapt them to.")

    @classmethod
    def wanted(cls, budget: Budget) -> bool | str:
        """See `Technique`."""
        return budget.variance is not None and (budget.flops is None or LEFT_OUT)

    def after_selection(self, plan: Plan, planning: Planning) -> Plan:
        """The plan, knowing whether the backward can be sampled.

        Raises:
            PassError: it cannot, although the caller asked for it by stating ratios; or they do not fit the model.
        """
        reason = planning.not_separable(plan)
        if not self.adaptive:
            graph = plan.before_sampling().rewrite(planning.graph)[0]
            sampled = {site for site, ratio in self.ratios(graph).items() if ratio < 1}
            terms = terms_alone(graph) if reason else []
            if reason and (any(site.startswith(ROWS) for site in sampled) or not sampled.intersection(terms)):
                remedy = "Pass an example of at least 2 samples" if graph.batch_size == 1 else "Remove the vcas pass"
                if terms:
                    remedy += ", or keep_rows: terms of weights' gradients (keep_tokens) can be"
                raise PassError(f"rows of this model's backward cannot be sampled: {reason}. {remedy}.")
        return replace(plan, not_separable=reason)

    def found(self, plan: Plan) -> SampleSizes:
        """What a controller has decided."""
        decided: SampleSizes = plan.decisions.get(self.name, SampleSizes())
        return decided

    def decide(self, plan: Plan, captured: TrainingGraph, graph: TrainingGraph) -> tuple[dict[str, float], tuple[()]]:
        """The ratios by site; those of terms alone where samples are not independent."""
        if plan.measures or not graph.symbolic:
            return {}, ()
        found = self.found(plan)
        if self.adaptive and graph.batch_size != found.batch_size:
            return {}, ()
        # Another selection may have fewer sites.
        known = terms_alone(graph) if plan.not_separable else {site.name for site in self.applicable(graph)}
        ratios = dict(found.ratios) if self.adaptive else self.ratios(graph)
        return {name: ratio for name, ratio in ratios.items() if name in known}, ()

    def for_all_outputs(self, plan: Plan) -> Plan:
        """Without itself: its samples are drawn for the loss alone."""
        return plan.with_passes([p for p in plan.passes if p.name != self.name])

    def reselected(self, plan: Plan, graph: TrainingGraph, not_separable: Callable[[Plan], str]) -> Plan:
        """The plan without ratios: another selection has other boundaries. Until the next calibration every row is kept."""
        return replace(
            plan.decided(self.name, SampleSizes()), not_separable=not_separable(plan) if graph.symbolic else plan.not_separable
        )

    def inseparable(self, graph: TrainingGraph, tensors: Mapping[str, Tensor], inputs: Sequence[Tensor]) -> str:
        """See `why_not_separable`."""
        return why_not_separable(graph, tensors, inputs)

    def leaves_out(self, plan: Plan) -> bool:
        """See `Technique`; a step that measures never does."""
        return not plan.measures and (not self.adaptive or bool(self.found(plan).ratios))

    def for_batch(self, plan: Plan, batch_size: int) -> Plan:
        """Ratios that were measured hold for one size alone."""
        found = self.found(plan)
        return plan.decided(self.name, SampleSizes()) if found.ratios and found.batch_size != batch_size else plan

    def start(self, opt: OptimizedModule) -> State | None:
        """Have a controller find the ratios."""
        from graphopt.passes.vcas.controller import SamplingController

        variance = opt.budget.variance
        return SamplingController(opt, self, variance) if self.adaptive and variance is not None else None

    @classmethod
    def stand_in(cls, opt: OptimizedModule) -> State | None:
        """A controller that does nothing, where the budget allows some variance."""
        from graphopt.passes.vcas.controller import IdleController

        return None if opt.budget.variance is None else IdleController()

    def section(
        self, plan: Plan, graph: TrainingGraph, reports: Sequence[PassReport], ran: Sequence[PassReport], state: State | None
    ) -> Section:
        """The part of the rows kept per block ("rows") and of the terms per weight ("tokens").

        Where a controller adapts them also the variance that each added when last measured, as a part of the mini-batch's
        ("rows_variance", "tokens_variance"), and the part of all FLOPs saved so far, calibrations paid for ("flops_saved",
        "calibrations", "seconds"). A calibration that found nothing to compare with leaves them as measured before, with a note.
        """
        from graphopt.passes.vcas.controller import SamplingController

        before, _ = plan.before_sampling().rewrite(graph)
        notes: tuple[str, ...] = ()
        sites = [site.name for site in self.applicable(before)]
        if plan.not_separable:
            sites = terms_alone(before)
            notes = (f"{'rows of ' if sites else ''}the backward {'are' if sites else 'is'} not sampled: {plan.not_separable}",)
            if not sites:
                return Section(notes=notes)
        ratios = dict(self.found(plan).ratios) if self.adaptive else self.ratios(before)
        facts: dict[str, Any] = {
            kind: {s.removeprefix(prefix): ratios.get(s, 1.0) for s in sites if s.startswith(prefix)}
            for kind, prefix in (("rows", ROWS), ("tokens", TOKENS))
        }
        used: dict[str, float] = {}
        if isinstance(state, SamplingController):
            facts |= state.facts()
            used = {"variance": facts["rows_variance"] + facts["tokens_variance"]}
            if state.history and not state.history[-1].compared:
                notes += (NOTHING_COMPARED,)
        return Section(facts, tuple(_lines(facts)), notes, approximation=f"gradients {self.preserves.value}", used=used)

    def applicable(self, graph: TrainingGraph) -> list[Site]:
        """Every boundary and every weight's product; none where the batch is not symbolic."""
        if not graph.symbolic:
            return []
        graph = for_loss_alone(graph)
        boundaries = [Site(ROWS + b.name) for b in find_boundaries(graph)]
        return boundaries + [Site(TOKENS + p.name) for p in find_weight_products(graph)]

    def ratios(self, graph: TrainingGraph) -> dict[str, float]:
        """The ratio of every site, as this pass was given them.

        Raises:
            PassError: not as many ratios as boundaries, or an unknown weight.
        """
        sites = [site.name for site in self.applicable(graph)]
        rows = [name for name in sites if name.startswith(ROWS)]
        tokens = [name for name in sites if name.startswith(TOKENS)]
        given = self.keep_rows if isinstance(self.keep_rows, tuple) else (self.keep_rows or 1.0,) * len(rows)
        if rows and len(given) != len(rows):
            names = ", ".join(name.removeprefix(ROWS) for name in rows)
            raise PassError(f"keep_rows has {len(given)} ratios for {len(rows)} boundaries, from the output: {names}.")
        if isinstance(self.keep_tokens, Mapping):
            unknown = sorted({TOKENS + name for name in self.keep_tokens} - set(tokens))
            if unknown:
                raise PassError(f"keep_tokens names no weight of a linear layer: {', '.join(unknown)}.")
            by_name = self.keep_tokens
            kept = [by_name.get(name.removeprefix(TOKENS), 1.0) for name in tokens]
        else:
            kept = [self.keep_tokens or 1.0] * len(tokens)
        return dict(zip([*rows, *tokens], [*given, *kept], strict=False))

    def apply(self, graph: TrainingGraph, decisions: Mapping[str, float] | Collection[str]) -> Changes:
        """Sample at each site in `decisions` with its ratio there, or, where only names are given, with this pass's own.

        The number of rows follows from `graph.batch_size`: the result holds for that batch alone.

        Raises:
            PassError: an unknown site, or an operator below a boundary that mixes samples.
        """
        own = self.ratios(graph)
        unknown = sorted(set(decisions) - set(own))
        if unknown:
            raise PassError(f"nothing to sample at {', '.join(unknown)}.")
        ratios = dict(decisions) if isinstance(decisions, Mapping) else {name: own[name] for name in decisions}
        return sample(graph, ratios, Draws(graph, self.seed))


def terms_alone(graph: TrainingGraph) -> list[str]:
    """The sites at which terms may be left out though samples are not independent; none where the batch is not symbolic."""
    return [TOKENS + p.name for p in linear_products(for_loss_alone(graph))] if graph.symbolic else []


def _lines(facts: Mapping[str, Any]) -> Iterator[str]:
    """A section for people."""
    for kind, what in (("rows", "rows kept"), ("tokens", "terms kept")):
        kept = ", ".join(f"{name} {ratio:.3g}" for name, ratio in facts[kind].items() if ratio < 1)
        yield f"{what:16} {kept or 'all'}"
    if "flops_saved" in facts:
        yield f"variance added   rows {facts['rows_variance']:.3%}, terms {facts['tokens_variance']:.3%} of the mini-batch's"
        yield (
            f"                 FLOPs saved so far {facts['flops_saved']:.1%} after {facts['calibrations']} calibrations "
            f"({facts['seconds']:.1f} s)"
        )

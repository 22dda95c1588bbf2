"""The controller that adapts how many rows the backward keeps (VCAS, section 5)."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from graphopt.passes.state import State
from graphopt.passes.vcas.adaptation import Adaptation, ControllerState, Counts
from graphopt.passes.vcas.calibration import Call, Measurement
from graphopt.passes.vcas.measuring import MeasuringStep, measuring_step
from graphopt.passes.vcas.ratios import LEVELS, Calibration, SampleRatios, corrected, keeps_as_much, proposed
from graphopt.passes.vcas.rewrite import ROWS, TOKENS
from graphopt.passes.vcas.technique import Ratios, SampleSizes, Vcas, terms_alone
from torch import Tensor

from graphopt.calls import as_call
from graphopt.compat import pytree
from graphopt.errors import InputError, RankError, first_line
from graphopt.runtime.controllers import Every
from graphopt.runtime.plain_values import from_plain, to_plain
from graphopt.runtime.stages import stage
from graphopt.runtime.state_file import holds

if TYPE_CHECKING:
    from graphopt.runtime.module import OptimizedModule

CALIBRATING = "calibrating the sampler"

ATTEMPTS = 3
"""Sets of ratios that one calibration measures at most; if none fits, nothing is left out until the next goes on from there."""

SOONER = 10
"""By how much the next comes sooner then: what two batches show differs far more than training does from one to the next."""

MOST_VARIANTS = 8
"""Different sets of ratios that are ever compiled, the exact step among them."""

WORTH_COMPILING = 0.02
"""Least saving, in FLOPs of the full step, for which ratios are lowered to ones that have not been compiled yet."""


class IdleController(State):
    """Stands for a `SamplingController` where nothing is sampled, so that loops that are written for one run unchanged.

    Every row is kept, nothing is spent and nothing saved.
    """

    adapts = True
    ratios: Ratios = ()
    keep_rows = 1.0
    seconds = 0.0
    flops_saved = 0.0

    def __init__(self) -> None:
        self.history: list[Adaptation] = []


class SamplingController(State):
    """Keeps the variance that sampling adds under `Budget(variance=...)`; `opt.controller` where that is asked for.

    `Vcas.rows_share` of the budget is for rows (V_act), the rest for the terms of weights' gradients (V_w). A calibration runs
    an exact pass of each of the last `Vcas.batches`, proposes lower ratios, and runs as many sampled passes with them. Ratios
    that would add too much variance are raised and measured again, so that none is ever put in force that was measured above the
    budget. It uses a random number generator of its own and changes no `.grad`, no buffer and no global random state. Until the
    first one, training is exact.

    Variances are those of ordinary gradients: a calibration runs neither samplers nor the lsp pass. Where gradients are
    compressed, the variance that sampling adds to P'GQ, as a part of the mini-batch's own, is not measured.

    Example:
        for batch in loader:
            ...  # forward, backward, optimizer.step()
            opt.controller.after_step(batch)
    """

    adapts = True

    def __init__(self, opt: OptimizedModule, rewrite: Vcas, tolerance: float) -> None:
        """Set up a controller; `optimize` does it.

        Args:
            opt: the optimised model.
            rewrite: says how often ratios are adapted, and by how much.
            tolerance: extra variance as a part of the mini-batch's own.
        """
        self.opt = opt
        self.rewrite = rewrite
        self.tolerance = tolerance
        self.state = SampleRatios()
        self.due = Every(rewrite.every)
        self.counts = Counts()
        self._recent: list[Call] = []
        self._known: dict[Ratios, float] = {(): 1.0}
        self._measured = ("", "")
        self._calibrations = 0
        self._late = False
        self._sooner_in = 0  # steps; 0: it comes in its turn
        self._step: MeasuringStep | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Without compiled code."""
        return {**self.__dict__, "_step": None}

    @property
    def overhead(self) -> float:
        """Of calibrations."""
        return self.counts.calibrating

    def facts(self) -> dict[str, Any]:
        """For the report: what was last measured, of the ratios in force, and what was saved so far."""
        last = next((adaptation for adaptation in reversed(self.history) if adaptation.compared), None)
        return {
            "rows_variance": last.rows_variance if last else 0.0,
            "tokens_variance": last.tokens_variance if last else 0.0,
            "flops_saved": self.flops_saved,
            "calibrations": len(self.history),
            "seconds": self.seconds,
        }

    def numbers(self) -> dict[str, float]:
        """See `State`; nothing where the last step was not sampled."""
        reports = self.opt.last_step.reports if self.opt.last_step is not None else ()
        return {"keep_rows": self.keep_rows} if any(r.name == self.rewrite.name for r in reports) else {}

    @property
    def keep_rows(self) -> float:
        """The smallest part of the rows that is kept at a boundary."""
        return min((ratio for name, ratio in self.ratios if name.startswith(ROWS)), default=1.0)

    @property
    def ratios(self) -> Ratios:
        """In force, by site; sites that are not named are kept in full."""
        return self.rewrite.found(self.opt.plan).ratios

    @property
    def history(self) -> list[Adaptation]:
        """Every adaptation so far."""
        return self.counts.history

    @property
    def seconds(self) -> float:
        """Spent on adaptations so far."""
        return self.counts.seconds

    @property
    def flops_saved(self) -> float:
        """Part of the FLOPs of exact training that was saved so far, calibrations paid for."""
        if not self.counts.steps:
            return 0.0
        return 1 - (self.counts.spent + self.counts.calibrating) / self.counts.steps

    def after_step(self, batch: Any) -> Adaptation | None:
        """Count a step; when it is time, calibrate on the last batches and adapt.

        Args:
            batch: what the model was called with: a tuple, or a dict with labels.
        Returns:
            What was done; None between adaptations, where the backward cannot be sampled, and where a calibration failed, such
            as for want of memory (`opt.report` says why): the ratios stay.
        """
        self.counts.steps += 1
        self.counts.spent += self.opt.last_step.sampled_part if self.opt.last_step is not None else 1.0
        self._recent = [*self._recent, as_call(batch)][-self.rewrite.batches :]
        self._late = self.due.after_step() or self._sooner_in == 1 or self._late
        self._sooner_in = max(0, self._sooner_in - 1)
        if not self._late:
            return None
        batches = self._alike()
        if not self.opt.ranks.all(len(batches) == self.rewrite.batches, CALIBRATING):  # one before had another shape
            return None
        self._late = False
        try:
            if self.opt.plan.not_separable:
                pays = self.opt.ranks.together(functools.partial(self._terms_pay, batches[-1]), CALIBRATING)
                if not self.opt.ranks.all(pays, CALIBRATING):
                    return None
            with stage("calibrate"):
                return self._calibrate(batches)
        except (InputError, RankError):
            raise
        except Exception as error:
            self.opt.note(f"a calibration of the sampler failed ({first_line(error)}); its ratios stay as they are")
            return None

    def _calibrate(self, batches: Sequence[Call]) -> Adaptation:
        """Measure on `batches`, adapt, and put in force."""
        start = time.perf_counter()
        for state in self.opt.states.values():
            state.synchronize()  # the step reads the weights
        plan, call = self.opt.plan, batches[-1]
        make = functools.partial(
            measuring_step, self.opt.captures, plan.before_sampling(), *call, self.rewrite.seed + 1, self._step
        )
        self._step = step = self.opt.ranks.together(make, CALIBRATING)
        self.opt.ranks.together(functools.partial(self._know, step, call), CALIBRATING)
        seen, proposal = self._adapt(step, batches)
        if proposal is not None:
            self._install(proposal, call, step.batch_size)
        terms, whole = sum(seen.tokens_variance.values()), sum(seen.weight_variance.values())
        adaptation = Adaptation(
            step=self.counts.steps,
            preserved=self.state.preserved,
            rows_variance=_part(seen.rows_variance, seen.batch_variance),
            tokens_variance=_part(terms, whole) if seen.tokens_variance else 0.0,
            rows={k.removeprefix(ROWS): v for k, v in self.ratios if k.startswith(ROWS)},
            tokens={k.removeprefix(TOKENS): v for k, v in self.ratios if k.startswith(TOKENS)},
            flops_ratio=self._known[self.ratios],
            seconds=time.perf_counter() - start,
            changed=self.opt.plan.key != plan.key,
        )
        self.counts.seconds += adaptation.seconds
        self.counts.history.append(adaptation)
        return adaptation

    def snapshot(self) -> Any:
        """See `Stateful`. Batches are held only where the next calibration will run on them, and a file can hold them."""
        batches = self.rewrite.batches
        remaining = min(self.due.remaining, self._sooner_in or self.due.remaining)
        needed = batches - 1 if self._late else max(0, batches - remaining)
        state = ControllerState(
            ratios=self.state,
            due=self.due.snapshot(),
            counts=self.counts,
            recent=tuple(filter(holds, self._recent[-needed:] if needed else ())),
            known=tuple(self._known.items()),
            measured=self._measured,
            calibrations=self._calibrations,
            late=self._late,
            sooner_in=self._sooner_in,
        )
        return to_plain(state)

    def prepare(self, snapshot: Any) -> Callable[[], None]:
        """See `Stateful`."""
        saved = from_plain(ControllerState, snapshot, "sampling")
        known = dict(saved.known)
        if () not in known:
            raise InputError("sampling.known lacks the exact step.")
        restore_count = self.due.prepare(saved.due)

        def restore() -> None:
            restore_count()
            self.state = saved.ratios
            self.counts = saved.counts
            self._recent, self._known = list(saved.recent), known
            self._measured, self._calibrations, self._late = saved.measured, saved.calibrations, saved.late
            self._sooner_in = saved.sooner_in
            self._step = None  # times of products that were saved, too, may choose other orders

        return restore

    def _alike(self) -> list[Call]:
        """The last batches whose tensors have the shapes of the very last one's, where that is."""

        def tensors(call: Call) -> list[Tensor]:
            return [t for t in pytree.tree_leaves(call) if isinstance(t, Tensor)]

        last = tensors(self._recent[-1])
        found = []
        for call in self._recent:
            if [t.shape for t in tensors(call)] == [t.shape for t in last]:
                leaves, structure = pytree.tree_flatten(call)
                devices = iter([t.device for t in last])  # a batch of a checkpoint is on the CPU
                moved = [leaf.to(next(devices)) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
                found.append(pytree.tree_unflatten(moved, structure))
        return found

    def _adapt(self, step: MeasuringStep, batches: Sequence[Call]) -> tuple[Calibration, SampleRatios | None]:
        """Lower the ratios if their measured variance allows it; returns what was measured, and what is to be in force."""
        probe = step.probe
        share = self.rewrite.rows_share if probe.parents else 0.0
        for_rows, for_terms = share * self.tolerance, (1 - share) * self.tolerance
        self._calibrations += 1
        measurement = Measurement(step, self.opt.tensors(), self.opt.loss_given, batches, self._calibrations)
        ranks = self.opt.ranks
        exact = ranks.together(measurement.exact, CALIBRATING)
        norms = exact.norms.joined([found.rows for found in ranks.gather(exact.norms, CALIBRATING)])
        self.counts.calibrating += len(batches)
        fewest = 1.0 / (step.batch_size * max((tokens for tokens, _ in probe.tokens.values()), default=1))
        alpha = self.rewrite.alpha if for_rows else 0.0  # what may add no variance stays whole
        beta = self.rewrite.beta if for_terms else 1.0
        candidate = proposed(self.state, norms, probe.tokens, alpha, beta, fewest)
        for _ in range(ATTEMPTS):
            sample = functools.partial(measurement.sampled, exact, candidate.rounded)
            seen = Calibration.mean(ranks.gather(ranks.together(sample, CALIBRATING), CALIBRATING))
            self.counts.calibrating += len(batches)
            if not seen.comparable:
                return seen, None
            better = corrected(candidate, seen, self.state, norms, for_rows, for_terms, alpha, beta)
            if better is candidate:
                self.state = candidate
                return seen, candidate
            candidate = better
        self.state = candidate
        if self.ratios:  # else that was the second in vain
            self._sooner_in = max(len(batches), self.rewrite.every // SOONER)
        return replace(seen, rows_variance=0.0, tokens_variance=dict.fromkeys(probe.tokens, 0.0)), SampleRatios()

    def _know(self, step: MeasuringStep, call: Call) -> None:
        """What sets of ratios that are compiled cost in `step`'s place: none are where other things were decided."""
        if step.fingerprints == self._measured:
            return
        compiled = self._known if step.fingerprints[0] == self._measured[0] else (self.ratios,)
        self._known = {(): 1.0} | {key: self._cost(key, call, step.batch_size) for key in compiled if key}
        self._measured = step.fingerprints

    def _terms_pay(self, call: Call) -> bool:
        """Whether leaving out most terms, and no rows, would be worth compiling."""
        graph = self.opt.plan.before_sampling().rewrite(self.opt.captures.graph(*call))[0]
        sites = terms_alone(graph) if self.rewrite.rows_share < 1 else []
        fewest = tuple((site, 1 / LEVELS) for site in sorted(sites))
        return bool(fewest) and 1 - self._cost(fewest, call, graph.batch_size) >= WORTH_COMPILING

    def _cost(self, key: Ratios, call: Call, batch_size: int) -> float:
        """FLOPs of the step with these ratios, as a part of the exact step's."""
        plan = self.opt.plan.decided(self.rewrite.name, SampleSizes(key, batch_size))
        graph = self.opt.captures.graph(*call)
        return plan.sampled_part(graph, batch_size, plan.rewrite(graph, batch_size)[1])

    def _install(self, ratios: SampleRatios, call: Call, batch_size: int) -> None:
        """Put ratios in force, rounded to ones that are compiled or worth it."""
        key = self.opt.ranks.together(functools.partial(self._worth_compiling, ratios, call, batch_size), CALIBRATING)
        sizes = self.opt.ranks.same(SampleSizes(key, batch_size), CALIBRATING)
        self._known.setdefault(sizes.ratios, self._known[key])
        self.opt.decide(self.rewrite.name, sizes)

    def _worth_compiling(self, ratios: SampleRatios, call: Call, batch_size: int) -> Ratios:
        """The set of ratios to put in force for `ratios`: it is compiled, or its saving is worth it."""
        rounded = ratios.rounded
        wanted = {ROWS + n: r for n, r in rounded.rows.items()} | {TOKENS + n: r for n, r in rounded.tokens.items()}
        key: Ratios = tuple(sorted((n, r) for n, r in wanted.items() if r < 1))
        if key not in self._known:
            flops = self._cost(key, call, batch_size)
            allowed = {known: cost for known, cost in self._known.items() if keeps_as_much(dict(known), wanted)}
            cheapest = min(allowed, key=lambda known: allowed[known])
            if len(self._known) >= MOST_VARIANTS or allowed[cheapest] - flops < WORTH_COMPILING:
                key = cheapest
            else:
                self._known[key] = flops
        return key


def _part(value: float, whole: float) -> float:
    """Not a number where there is nothing to compare with; ratios then stay as they were."""
    return value / whole if whole and math.isfinite(whole) else math.nan

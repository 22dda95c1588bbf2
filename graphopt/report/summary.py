"""The report of an optimised model: what was done, for people (`str`) and for machines (`to_dict`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from graphopt.analysis.flops import FlopProfile
from graphopt.frontend.step import RegionStep
from graphopt.graph import TrainingGraph
from graphopt.passes import Preserves, Vcas
from graphopt.passes.lsp.choose import CompressionChoice
from graphopt.passes.runlora.choose import Choice
from graphopt.passes.vcas import ROWS, TOKENS
from graphopt.planner.plan import Plan
from graphopt.report.plan import PlanSummary, StepClock, plan_lines, summarise
from graphopt.report.selection import SelectionSummary, selection_lines, summarise_selection
from graphopt.runtime.captures import Captures

if TYPE_CHECKING:
    from graphopt.passes.lsp.subspaces import Subspaces
    from graphopt.passes.vcas.controller import IdleController, SamplingController


@dataclass(frozen=True)
class Report:
    """What optimisation did, at the batch size of the last step (before the first, of the example); FLOPs are 2 per multiply-add.

    Attributes:
        budget: the limits asked for.
        passes: names of the passes in force.
        approximations: every respect in which a step is not full training; empty if none.
        trained, trainable: number of tensors trained, and that could be.
        selected, cut: their names.
        adapters: per layer with low-rank adapters its order of products, FLOPs, bytes and predicted time before and after.
        sampling: of a sampler, the part of the rows kept per block ("rows") and of the terms per weight ("tokens"); of one that
            adapts itself also the variance that each added when last measured, as a part of the mini-batch's ("rows_variance",
            "tokens_variance"), and the part of all FLOPs saved so far, calibrations paid for ("flops_saved", "calibrations",
            "seconds").
        left_alone: reason by name for what looks like such an adapter and is not reordered.
        plan: what each pass contributed, what was not needed, what remains of the budget, and what was measured.
        notes: what else there is to know about the captured model.
        forward_flops, backward_flops, full_step_flops: of full training.
        step_flops: of the optimised step; `flops_ratio` is its share of the full step.
        importance: what tensors were rated by; "" if none were.
        selection: the rule, what simple rules would have been worth by it, and which budget would buy more; None: no selection.
        batch: "symbolic", or why it is not.
        device: the kernels were chosen for this device.
        captures, compilations: how often the model was traced and a step compiled.
        capture_seconds, compile_seconds, rewrite_seconds, select_seconds: wall-clock of each so far.
    """

    budget: dict[str, float | int]
    passes: list[str]
    approximations: list[str]
    trained: int
    trainable: int
    selected: list[str]
    cut: list[str]
    forward_flops: int
    backward_flops: int
    full_step_flops: int
    step_flops: int
    flops_ratio: float
    batch_size: int
    importance: str
    solver: str
    batch: str
    device: str
    backend: str
    captures: int
    compilations: int
    capture_seconds: float
    compile_seconds: float
    rewrite_seconds: float
    select_seconds: float
    notes: list[str]
    adapters: list[dict[str, Any]] = field(default_factory=list)
    left_alone: dict[str, str] = field(default_factory=dict)
    sampling: dict[str, Any] | None = None
    compressed: list[dict[str, Any]] = field(default_factory=list)
    plan: PlanSummary | None = None
    selection: SelectionSummary | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        limits = ", ".join(f"{k} <= {v}" for k, v in self.budget.items()) or "none"
        lines = [
            f"budget           {limits}",
            f"passes           {', '.join(self.passes) or 'none'}",
            f"trained tensors  {self.trained} of {self.trainable}",
            f"FLOPs per step   {self.full_step_flops:,} -> {self.step_flops:,} ({self.flops_ratio:.1%})",
            f"  at batch       {self.batch_size}",
            f"  forward        {self.forward_flops:,}",
            f"  backward       {self.backward_flops:,} -> {self.step_flops - self.forward_flops:,}",
        ]
        if self.selection is not None:
            lines += selection_lines(self.selection)
        elif self.importance:
            lines.append(f"importance       {self.importance}; selected by {self.solver}")
        lines.append(f"approximations   {'; '.join(self.approximations) or 'none'}")
        lines.append(f"batch size       {self.batch}; kernels as on {self.device}; backend {self.backend}")
        lines.append(
            f"overhead         {self.captures} captures {self.capture_seconds:.1f} s, selection {self.select_seconds:.1f} s, "
            f"{self.compilations} compilations {self.compile_seconds:.1f} s (passes {self.rewrite_seconds:.2f} s)"
        )
        if self.plan is not None:
            lines += plan_lines(self.plan)
        if self.sampling is not None:
            lines += _sampling_lines(self.sampling)
        lines.extend(f"compressed       {weight['text']}" for weight in self.compressed)
        lines.extend(f"adapters         {adapter['text']}" for adapter in self.adapters)
        lines.extend(f"left alone       {name}: {reason}" for name, reason in self.left_alone.items())
        lines.extend(f"note             {note}" for note in self.notes)
        return "\n".join(lines)


def _sampling_lines(sampling: dict[str, Any]) -> list[str]:
    lines = []
    for kind, what in (("rows", "rows kept"), ("tokens", "terms kept")):
        kept = ", ".join(f"{name} {ratio:.3g}" for name, ratio in sampling[kind].items() if ratio < 1)
        lines.append(f"{what:16} {kept or 'all'}")
    if "flops_saved" in sampling:
        lines.append(
            f"variance added   rows {sampling['rows_variance']:.3%}, terms {sampling['tokens_variance']:.3%} of the mini-batch's"
        )
        lines.append(
            f"                 FLOPs saved so far {sampling['flops_saved']:.1%} after {sampling['calibrations']} calibrations "
            f"({sampling['seconds']:.1f} s)"
        )
    return lines


def _sampling(plan: Plan, graph: TrainingGraph, controller: SamplingController | IdleController | None) -> dict[str, Any] | None:
    samplers = [p for p in plan.passes if isinstance(p, Vcas)]
    if not samplers or plan.mixing:
        return None
    before, _ = plan.before_sampling().rewrite(graph)
    sites = [site.name for site in samplers[0].applicable(before)]
    ratios = dict(samplers[0].found(plan).ratios) if samplers[0].adaptive else samplers[0].ratios(before)
    found: dict[str, Any] = {
        kind: {s.removeprefix(prefix): ratios.get(s, 1.0) for s in sites if s.startswith(prefix)}
        for kind, prefix in (("rows", ROWS), ("tokens", TOKENS))
    }
    if controller is not None:
        last = controller.history[-1] if controller.history else None
        found["rows_variance"] = last.rows_variance if last else 0.0
        found["tokens_variance"] = last.tokens_variance if last else 0.0
        found["flops_saved"] = controller.flops_saved
        found["calibrations"] = len(controller.history)
        found["seconds"] = controller.seconds
    return found


def _compressed(choice: CompressionChoice, subspaces: Subspaces | None) -> dict[str, Any]:
    """How a weight's gradient is compressed, and how well its projectors represent it."""
    found = {**asdict(choice), "text": str(choice)}
    if subspaces is not None:
        weight = subspaces.weights[choice.layer]
        found |= {"error": weight.error, "fits": weight.fits, "skipped": weight.skipped}
        found["text"] += f"; projectors' error {weight.error:.2f} when last compared, {weight.fits} fits"
        if weight.skipped:
            found["text"] += f"; {weight.skipped} steps skipped: its gradient was not finite"
    return found


def make_report(
    graph: TrainingGraph,
    flops: FlopProfile,
    plan: Plan,
    captures: Captures,
    step: RegionStep | None,
    select_seconds: float,
    controller: SamplingController | IdleController | None = None,
    subspaces: Subspaces | None = None,
    fallbacks: Sequence[str] = (),
    clock: StepClock | None = None,
) -> Report:
    """Gather a `Report` from what the runtime knows.

    Args:
        step: that ran last; None before the first, and where the model itself ran in its place, as `fallbacks` then say.
    """
    trainable = list(flops.order)
    selected = [n for n in trainable if plan.train is None or n in plan.train]
    cut = [n for n in trainable if n not in set(selected)]
    in_eager_mode = step is None and bool(fallbacks)
    size = step.graph.batch_size if step is not None and flops.symbolic else flops.batch_size
    captured, flops = flops, flops.at(size)  # rows that are left out are counted for one batch size
    reports = () if step is None else step.reports
    other_length = step is not None and reports and reports[0].step_flops_before != flops.step
    if (step is None and not in_eager_mode) or other_length:
        reports = tuple(plan.rewrite(graph, size)[1])
    step_flops = reports[-1].step_flops_after if reports else flops.step
    approximations = []
    inexact = [p for p in plan.passes if p.preserves is not Preserves.EXACT and not (isinstance(p, Vcas) and plan.mixing)]
    if cut:
        rest = "" if inexact else "; the others' gradients are exact"
        approximations.append(f"{len(cut)} tensors are not trained (their gradient is None){rest}")
    approximations.extend(f"{p.name}: gradients {p.preserves.value}" for p in inexact)
    counters = captures.counters
    running = step.reports if step is not None else reports  # batches of another size can take other orders
    choices = [choice for report in running for choice in report.choices]
    reordered = {choice.layer for choice in choices}
    left_alone = {
        name: why
        for r in reports
        if r.name in ("runlora", "lsp")
        for name, why in r.changes.left_alone.items()
        if name not in reordered
    }
    orders = [choice for choice in choices if isinstance(choice, Choice)]
    ratio = step_flops / flops.step if flops.step else 0.0
    peak = None
    if plan.memory is not None and not in_eager_mode:
        peak = plan.memory.peak_once(graph, plan.key, lambda: plan.rewrite(graph, size)[0], size)
    last = controller.history[-1] if controller is not None and controller.history else None
    variance = last.rows_variance + last.tokens_variance if last is not None else 0.0
    summary = summarise(plan, reports, ratio, peak, variance, clock or StepClock(), step, captures.backend == "inductor")
    return Report(
        budget=plan.budget.stated(),
        passes=[p.name for p in plan.passes if p.name not in summary.not_needed],
        plan=summary,
        approximations=approximations,
        trained=len(selected),
        trainable=len(trainable),
        selected=selected,
        cut=cut,
        forward_flops=flops.forward,
        backward_flops=flops.backward,
        full_step_flops=flops.step,
        step_flops=step_flops,
        flops_ratio=ratio,
        batch_size=flops.batch_size,
        importance=plan.importance.source if plan.importance else "",
        solver=plan.selection.solver if plan.selection else "",
        batch="symbolic (any size)" if graph.symbolic else f"as in the example: {graph.static_reason}",
        device=next((str(n.meta["val"].device) for n in graph.placeholders), "cpu"),
        backend=captures.backend if isinstance(captures.backend, str) else getattr(captures.backend, "__name__", "callable"),
        captures=counters.captures,
        compilations=counters.compilations,
        capture_seconds=counters.capture_seconds,
        compile_seconds=counters.compile_seconds,
        rewrite_seconds=counters.rewrite_seconds,
        select_seconds=select_seconds,
        notes=[*graph.notes, *([f"the backward is not sampled: {plan.mixing}"] if plan.mixing else []), *fallbacks],
        adapters=[{**asdict(c), "order": str(c.order), "before": str(c.before), "text": str(c)} for c in orders],
        compressed=[_compressed(c, subspaces) for c in choices if isinstance(c, CompressionChoice)],
        left_alone=left_alone,
        sampling=None if in_eager_mode else _sampling(plan, graph, controller),
        selection=summarise_selection(plan, captured),
    )

"""The report of an optimised model: what was done, for people (`str`) and for machines (`to_dict`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from html import escape
from pathlib import Path
from typing import Any

import torch

from graphopt.analysis.communication import Communication, communication
from graphopt.analysis.flops import FlopProfile
from graphopt.analysis.optimizers import OptimizerFactory, check_optimizer
from graphopt.budget import parse_bytes
from graphopt.errors import GraphoptError
from graphopt.frontend.step import RegionStep
from graphopt.graph import TrainingGraph
from graphopt.passes.state import State
from graphopt.passes.technique import technique
from graphopt.planner.pareto import Point
from graphopt.planner.plan import Plan
from graphopt.report.files import make_folder_of
from graphopt.report.html.details import page
from graphopt.report.plan import PlanSummary, StepClock, summarise
from graphopt.report.progress import stages_told, watched
from graphopt.report.selection import SelectionSummary, summarise_selection
from graphopt.report.source import Source
from graphopt.report.tensors import TensorRow, tensor_rows
from graphopt.report.text import report_text, verdict
from graphopt.runtime.captures import Captures

SCHEMA = 1
"""Version of what `Report.to_dict` returns; docs/report.md has its fields."""

PLANNED = "as planned"
"""The optimizer that a limit on memory was kept for; without one AdamW."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """What optimisation did, at the batch size of the example that the plan was made on (of the last step, where steps are
    sampled); FLOPs are 2 per multiply-add.

    Attributes:
        budget: the limits asked for.
        passes: names of the passes in force.
        approximations: every respect in which a step is not full training, untrained tensors first; empty if none.
        trained, trainable: number of tensors trained, and that could be.
        selected, cut: their names.
        sections: what each technique says of itself, by its name; see its `section`.
        left_alone: reason by name for what looks like a site of a technique and is none.
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
        tensors: a row for every parameter: what its gradient costs, what it is worth, and why it is trained or not.
        communication: bytes that a step hands to other ranks; without a mesh none.
        lines: the sections for people.
        source: what pages and dumps are made from; None where nothing was captured, and after unpickling.
    """

    budget: dict[str, float | int]
    passes: list[str] = field(default_factory=list)
    approximations: list[str] = field(default_factory=list)
    trained: int
    trainable: int
    selected: list[str]
    cut: list[str] = field(default_factory=list)
    forward_flops: int = 0
    backward_flops: int = 0
    full_step_flops: int = 0
    step_flops: int = 0
    flops_ratio: float = 1.0
    batch_size: int = 0
    importance: str = ""
    solver: str = ""
    batch: str
    device: str
    backend: str
    captures: int = 0
    compilations: int = 0
    capture_seconds: float = 0.0
    compile_seconds: float = 0.0
    rewrite_seconds: float = 0.0
    select_seconds: float = 0.0
    notes: list[str]
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)
    left_alone: dict[str, str] = field(default_factory=dict)
    plan: PlanSummary | None = None
    selection: SelectionSummary | None = None
    tensors: list[TensorRow] = field(default_factory=list)
    communication: Communication = field(default_factory=lambda: Communication(()))
    lines: list[str] = field(default_factory=list)
    source: Source | None = field(default=None, repr=False, compare=False)

    @property
    def verdict(self) -> str:
        """One sentence: what is trained, at what cost, and how exact it is."""
        return verdict(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON; docs/report.md describes them."""
        values = asdict(replace(self, lines=[], source=None))
        shown = {name: value for name, value in values.items() if name not in ("lines", "source")}
        return {"schema": SCHEMA, "verdict": self.verdict, **shown}

    def to_html(
        self,
        path: str | Path | None = None,
        *,
        title: str = "",
        optimizer: str | OptimizerFactory | torch.optim.Optimizer | None = PLANNED,
        device_memory: int | str | None = None,
        front: Sequence[Point] = (),
    ) -> str:
        """One page of HTML: blocks, memory over the step, what every budget trains, tensors, techniques with their diffs.

        The page needs no other file and no network. To predict the memory of a step that Inductor compiles, its program is
        generated once more, for full training and for the plan. That takes seconds to minutes; a terminal shows the time.

        Args:
            path: a file to write the page to, as well.
            title: of the page.
            optimizer: whose states count in the memory, see `graphopt.analyze`; by default those of the optimizer that the plan
                keeps to a limit on memory for, and of AdamW where there is no such limit.
            device_memory: of the device, such as "24GiB", to be compared with the peak.
            front: plans over FLOPs, memory and value, by `graphopt.pareto`.
        Raises:
            GraphoptError: nothing was captured, as with GRAPHOPT_DISABLE=1: there is nothing to draw.
            InputError, BudgetError: an argument will not do, or the file cannot be written.
        """
        if self.source is None:
            raise GraphoptError(f"there is no graph to draw a page of: {self.verdict} print(report) says what is known.")
        if optimizer == PLANNED:
            optimizer = self.source.plan.memory.optimizer if self.source.plan.memory is not None else "adamw"
        check_optimizer(optimizer)
        device = None if device_memory is None else parse_bytes(device_memory)
        make_folder_of(None if path is None else Path(path))
        with stages_told(quiet=not watched()):
            text = page(self.source, self.to_dict(), optimizer, device, front, title or "Training step")
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    def _repr_html_(self) -> str:
        """In a notebook: the verdict, and the text of the report to be opened."""
        text = escape(str(self).partition("\n\n")[2])
        return f"<p><strong>{escape(self.verdict)}</strong></p><details><summary>Report</summary><pre>{text}</pre></details>"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "source": None}

    def __str__(self) -> str:
        return report_text(self)

    def __repr__(self) -> str:
        return f"<Report: {self.verdict}>"


def make_report(
    graph: TrainingGraph,
    flops: FlopProfile,
    plan: Plan,
    captures: Captures,
    step: RegionStep | None,
    select_seconds: float,
    states: Mapping[str, State],
    fallbacks: Sequence[str] = (),
    clock: StepClock | None = None,
) -> Report:
    """Gather a `Report` from what the runtime knows.

    Args:
        states: of the techniques, by their names.
        step: that ran last; None before the first, and where the model itself ran in its place, as `fallbacks` then say.
    """
    trainable = list(flops.order)
    selected = [n for n in trainable if plan.train is None or n in plan.train]
    chosen = frozenset(selected)
    cut = [n for n in trainable if n not in chosen]
    in_eager_mode = step is None and bool(fallbacks)
    size = step.graph.batch_size if step is not None and flops.symbolic else flops.batch_size
    captured, flops = flops, flops.at(size)  # rows that are left out are counted for one batch size
    reports = () if step is None else step.reports
    other_length = step is not None and reports and reports[0].step_flops_before != flops.step
    graphs = [] if step is None else step.graphs
    if (step is None and not in_eager_mode) or other_length:
        rewritten, found = plan.rewrite(graph, size)
        reports, graphs = tuple(found), graphs or [rewritten]
    step_flops = reports[-1].step_flops_after if reports else flops.step
    running = step.reports if step is not None else reports  # batches of another size can take other decisions
    sections = {p.name: technique(p).section(plan, graph, reports, running, states.get(p.name)) for p in plan.passes}
    if in_eager_mode:
        sections = {name: replace(section, facts={}, lines=()) for name, section in sections.items()}
    inexact = [f"{name}: {section.approximation}" for name, section in sections.items() if section.approximation]
    cut_by = "" if inexact else "; the others' gradients are exact"
    untrained = [f"{len(cut)} tensors are not trained (their gradient is None){cut_by}"] if cut else []
    counters = captures.counters
    ratio = step_flops / flops.step if flops.step else 0.0
    peak = None
    if plan.memory is not None and not in_eager_mode:
        peak = plan.memory.peak_once(graph, plan.key, lambda: plan.rewrite(graph, size)[0], size)
    used = {"flops": ratio, "variance": 0.0} | ({} if peak is None else {"memory": peak})
    for section in sections.values():
        used |= section.used
    others = [collective for state in states.values() for collective in state.collectives]
    summary = summarise(plan, reports, used, clock or StepClock(), step, captures.backend == "inductor", graph.example.device)
    return Report(
        budget=plan.budget.stated(),
        passes=[p.name for p in plan.passes if p.name not in summary.not_needed],
        plan=summary,
        approximations=[*untrained, *inexact],
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
        device=str(graph.example.device),
        backend=captures.backend if isinstance(captures.backend, str) else getattr(captures.backend, "__name__", "callable"),
        captures=counters.captures,
        compilations=counters.compilations,
        capture_seconds=counters.capture_seconds,
        compile_seconds=counters.compile_seconds,
        rewrite_seconds=counters.rewrite_seconds,
        select_seconds=select_seconds,
        notes=[*(note for section in sections.values() for note in section.notes), *fallbacks],
        sections={name: dict(section.facts) for name, section in sections.items() if section.facts},
        left_alone={name: why for section in sections.values() for name, why in section.left_alone.items()},
        selection=summarise_selection(plan, graph, captured),
        tensors=tensor_rows(plan, graph, captured, flops, ratio),
        communication=Communication((*communication(*graphs).collectives, *others)),
        lines=[line for section in sections.values() for line in section.lines],
        source=Source(
            replace(graph, batch_size=size), plan, flops, "inductor" if captures.backend == "inductor" else "aot_eager"
        ),
    )

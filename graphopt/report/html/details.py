"""What the page shows, gathered from a graph, a plan and a report; and the template filled with it."""

from __future__ import annotations

import datetime
import html
import importlib.metadata
import json
import math
import platform
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import resources
from string import Template
from typing import Any

import torch

from graphopt.analysis.memory import MemoryProfile
from graphopt.analysis.step_memory import step_memory
from graphopt.errors import BudgetError, GraphoptError, first_line
from graphopt.graph import TrainingGraph
from graphopt.passes import PassReport
from graphopt.planner.capacity import capacity
from graphopt.planner.flops_limit import default_limit
from graphopt.planner.pareto import Point
from graphopt.planner.selection import select
from graphopt.report.files import plain
from graphopt.report.html.memory import memory_data
from graphopt.report.picture import blocks
from graphopt.report.provenance import SourceLine, block_name, lines_of_code
from graphopt.report.source import Source
from graphopt.report.units import in_bytes, in_flops, in_percent, in_seconds
from graphopt.runtime.stages import stage

VERSION = importlib.metadata.version("graphopt")

SCRIPTS = ("base", "blocks", "memory", "plans", "tensors", "techniques", "main")
"""In the order in which they run."""

MOST_CHARACTERS = 60_000
"""Of a diff on the page; a dump has all of it."""

STEP = 0.02
"""Distance of the budgets on the slider."""

RESOLUTION = 20_000
"""Of the knapsack, which is solved for each of them."""


def page(
    source: Source, report: Mapping[str, Any], optimizer: Any, device: int | None, front: Sequence[Point], title: str
) -> str:
    """The page of a report.

    Args:
        report: its plain values; see `Report.to_dict`.
        optimizer: whose states count; see `graphopt.analyze`.
        device: bytes of the device, or None.
        front: plans over FLOPs, memory and value; see `graphopt.pareto`.
    """
    plan, graph = source.plan, source.graph
    names = [row["name"] for row in report["tensors"]]
    position = {name: k for k, name in enumerate(names)}
    values = plan.importance.values if plan.importance is not None else capacity(graph, source.flops).values
    told = {row["name"]: row["why"] for row in report["tensors"]}
    found, lines = _structure(source, names)
    profiles, trouble = _profiles(source, optimizer)
    solved = _solved_plans(source, values, report["flops_ratio"])
    plans = [{**p, "trained": [position[name] for name in p["trained"]]} for p in solved]
    asked = plan.budget.stated().get("memory")
    limit = device if device is not None or asked is None else int(asked)
    memory = {"reason": trouble} if not profiles else memory_data(graph, profiles, graph.batch_size, limit, _one_batch(graph))
    data = {
        "figures": _figures(report, profiles, limit),
        "blocks": found,
        "lines": lines,
        "memory": memory,
        "plans": plans,
        "trained_from": [min((p["flops"] for p in plans if k in p["trained"]), default=None) for k in range(len(names))],
        "trainable": len(source.flops.order),
        "pareto": [asdict(point) for point in front],
        "techniques": [{**_told(s.report, told), **_shortened(s.diff)} for s in source.stages],
        "not_needed": list(plan.not_needed.items()),
        "assumptions": _assumptions(profiles),
        "environment": _environment(report),
        "notes": list(report["notes"]),
        "made": f"Made by graphopt {VERSION} on {datetime.date.today():%Y-%m-%d}. This page loads nothing.",
    }
    verdict = report["verdict"] or _of_model(report, profiles, device)
    return _filled(title, verdict, {**data, "report": {**report, "verdict": verdict}})


def _profiles(source: Source, optimizer: Any) -> tuple[list[tuple[str, MemoryProfile]], str]:
    """Memory of full training and, where the passes change anything, of the plan; or why it cannot be predicted."""
    graphs = [("full training", source.graph)]
    if source.plan.passes:
        graphs.append(("this plan", source.rewritten))
    try:
        with stage("memory"):
            return [(label, step_memory(graph, source.backend, optimizer)) for label, graph in graphs], ""
    except GraphoptError as error:
        return [], f"The memory of a step cannot be predicted: {first_line(error)}"


def _of_model(report: Mapping[str, Any], profiles: Sequence[tuple[str, MemoryProfile]], device: int | None) -> str:
    """The verdict on a model that is not optimised yet."""
    told = f"A step of batch {report['batch_size']} takes {in_flops(report['step_flops'])}"
    if not profiles:
        return f"{told} and trains {report['trained']} tensors."
    planned = profiles[-1][1]
    told += f" and {in_bytes(planned.peak_bytes)} at its peak"
    if device is None:
        return f"{told}, to train {report['trained']} tensors."
    fits = "fits" if planned.fits(device) else "does not fit"
    try:
        most = planned.max_batch(device)
    except GraphoptError:  # the batch is fixed, or all fit
        return f"{told}; it {fits} into {in_bytes(device)}."
    return f"{told}; it {fits} into {in_bytes(device)}, where {f'batch {most} is the largest' if most else 'no batch fits'}."


def _one_batch(graph: TrainingGraph) -> str:
    if graph.symbolic:
        return ""
    reason = f": {graph.static_reason}" if graph.static_reason and "batch of" not in graph.static_reason else ""
    return f"Predicted for a batch of {graph.batch_size} alone{reason}. The command graphopt report draws other batch sizes, too."


def _structure(source: Source, names: list[str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Blocks in the order in which the forward meets them, and the lines of code that they refer to by number.

    Args:
        names: of all parameters; a block's tensors are positions among them.
    """
    inside: dict[str, list[int]] = defaultdict(list)
    for k, name in enumerate(names):
        inside[block_name(name)].append(k)
    captured, rewritten = _counted(source.graph), _counted(source.rewritten)
    numbers: dict[SourceLine, int] = {}
    lines_of: dict[str, list[tuple[int, int, int, int]]] = defaultdict(list)
    for (block, line), (forward, backward) in captured.items():
        number = numbers.setdefault(line, len(numbers))
        lines_of[block].append((number, forward, backward, rewritten[block, line][1]))
    found = [
        {
            "name": block.name,
            "forward": block.forward,
            "before": block.backward_before,
            "after": block.backward_after,
            "tensors": inside.pop(block.name, []),
            "lines": lines_of.get(block.name, []),
        }
        for block in blocks(source.graph, source.rewritten)
    ]
    unread = {"forward": 0, "before": 0, "after": 0}  # parameters that the graph does not read
    found += [{"name": name, **unread, "tensors": tensors, "lines": []} for name, tensors in inside.items()]
    return found, [{"file": line.short_file, "number": line.number, "code": line.code} for line in numbers]


def _counted(graph: TrainingGraph) -> dict[tuple[str, SourceLine], list[int]]:
    """By block and line, how many operators of the forward and of the backward come from it."""
    counts: dict[tuple[str, SourceLine], list[int]] = defaultdict(lambda: [0, 0])
    for block, line, _, is_forward in lines_of_code(graph):
        counts[block, line][not is_forward] += 1
    return counts


def _solved_plans(source: Source, values: Mapping[str, float], ratio: float) -> list[dict[str, Any]]:
    """Budgets from the smallest that trains anything to full training, each with the names of what it trains.

    `used` is the part of a full step's FLOPs that the plan takes. What exact passes save before tensors are selected is
    counted; what others save later is not. The plan in force stands at its own budget.

    Args:
        values: by which tensors are selected.
        ratio: FLOPs of the step of the plan in force over full training's.
    """
    costs = default_limit(source.graph, source.flops).costs
    ordered = [max(0.0, values.get(name, 0.0)) for name in costs.names]
    total = math.fsum(ordered) or 1.0

    def solved(budget: float, used: float, chosen: Sequence[str], in_force: bool) -> dict[str, Any]:
        value = math.fsum(max(0.0, values.get(name, 0.0)) for name in chosen) / total
        return {"flops": budget, "used": used, "value": value, "trained": chosen, "in_force": in_force}

    found = []
    for k in range(math.ceil(costs.part(costs.forward_flops) / STEP), round(1 / STEP) + 1):
        budget = round(k * STEP, 4)
        try:
            chosen = select(costs, ordered, budget, quick=True, resolution=RESOLUTION).names
        except BudgetError:  # it leaves too little for any gradient
            continue
        if costs.affordable(budget) >= costs.backward_flops:
            chosen = costs.names
        used = costs.part(costs.forward_flops + costs.cost(map(costs.names.index, chosen)))
        found.append(solved(budget, used, chosen, False))
    asked, train = source.plan.budget.flops, source.plan.train
    if asked is not None and train is not None:
        found = [p for p in found if abs(p["flops"] - asked) > STEP / 4]
        found.append(solved(asked, ratio, [name for name in costs.names if name in train], True))
    return sorted(found, key=lambda p: p["flops"])


def _figures(
    report: Mapping[str, Any], profiles: Sequence[tuple[str, MemoryProfile]], limit: float | None
) -> list[dict[str, str]]:
    """What stands at the top, each with a note."""
    full, step, batch = report["full_step_flops"], report["step_flops"], report["batch_size"]
    note = (
        f"a step of batch {batch}" if step == full else f"{in_percent(report['flops_ratio'])} of full training's {in_flops(full)}"
    )
    found = [{"label": "FLOPs", "value": in_flops(step), "note": note}]
    if profiles:
        (_, whole), (_, planned) = profiles[0], profiles[-1]
        peak, before = planned.peak_bytes, whole.peak_bytes
        note = f"predicted, in the {planned.peak_phase}" if peak == before else f"predicted; full training {in_bytes(before)}"
        found.append({"label": "Peak memory", "value": in_bytes(peak), "note": note})
        if limit is not None:
            fits = f"{in_bytes(limit - peak)} to spare" if peak <= limit else f"{in_bytes(peak - limit)} too much"
            found.append({"label": f"Fits into {in_bytes(limit)}", "value": "yes" if peak <= limit else "no", "note": fits})
    found.append({"label": "Tensors trained", "value": f"{report['trained']} of {report['trainable']}", "note": ""})
    plan = report.get("plan")
    if plan and plan["measured"]["seconds"] is not None:
        predicted = plan["predicted"]["seconds"]
        note = "" if predicted is None else f"measured; forward and backward predicted {in_seconds(predicted)}"
        found.append({"label": "Time of a step", "value": in_seconds(plan["measured"]["seconds"]), "note": note})
    inexact = report["approximations"][bool(report["cut"]) :]
    note = "; ".join(inexact) or ("of the tensors that are trained" if report["cut"] else "")
    found.append({"label": "Gradients", "value": "approximated" if inexact else "exact", "note": note})
    return found


def _assumptions(profiles: Sequence[tuple[str, MemoryProfile]]) -> list[str]:
    counted = ["FLOPs are those of matrix products, convolutions and attention; 2 per multiply-add"]
    solved = ["Plans of the slider: best value by a knapsack over the graph's costs, exact for a chain of layers"]
    return [*counted, *(profiles[-1][1].assumptions if profiles else ()), *solved]


def _environment(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [
        ("graphopt", VERSION),
        ("torch", torch.__version__),
        ("Python", platform.python_version()),
        ("system", f"{platform.system()} {platform.machine()}"),
        ("device", report["device"]),
        ("backend", report["backend"]),
        ("batch", report["batch"]),
    ]


def _told(report: PassReport, reasons: Mapping[str, str]) -> dict[str, Any]:
    """What a pass did; `reasons`, by name, say why a site was changed, where more is known than that."""
    choices = {str(c).partition(": ")[0]: str(c).partition(": ")[2] for c in report.choices}
    return {
        "name": report.name,
        "preserves": report.preserves.value,
        "flops": (report.step_flops_before, report.step_flops_after),
        "saved": (report.saved_bytes_before, report.saved_bytes_after),
        "changed": [(name, choices.get(name) or reasons.get(name, "")) for name in report.changes.changed],
        "left_alone": list(report.changes.left_alone.items()),
    }


def _shortened(diff: str) -> dict[str, Any]:
    lines = diff.splitlines()
    size, kept = 0, 0
    while kept < len(lines) and size + len(lines[kept]) < MOST_CHARACTERS:
        size += len(lines[kept]) + 1
        kept += 1
    changed = lines[2:]  # the first two name the files
    return {
        "diff": "\n".join(lines[:kept]),
        "diff_left_out": len(lines) - kept,
        "added": sum(line.startswith("+") for line in changed),
        "removed": sum(line.startswith("-") for line in changed),
    }


def _filled(title: str, verdict: str, data: dict[str, Any]) -> str:
    """One file, with its style, its program and `data`, which that draws."""
    folder = resources.files(__package__)

    def part(name: str) -> str:
        return folder.joinpath(name).read_text(encoding="utf-8")

    text = json.dumps(plain(data), separators=(",", ":"), ensure_ascii=False)
    return Template(part("page.html")).substitute(
        title=html.escape(title),
        verdict=html.escape(verdict),
        style=part("page.css"),
        data=text.replace("</", "<\\/").replace("<!--", "<\\u0021--"),
        script="\n".join(part(f"{name}.js") for name in SCRIPTS),
    )

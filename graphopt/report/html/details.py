"""What the page shows, gathered from a graph, a plan and a report."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from graphopt.analysis.memory import MemoryProfile
from graphopt.analysis.step_memory import step_memory
from graphopt.errors import GraphoptError, first_line
from graphopt.graph import TrainingGraph
from graphopt.planner.capacity import capacity
from graphopt.planner.pareto import Point
from graphopt.report.html.memory import memory_data
from graphopt.report.html.page import filled
from graphopt.report.html.plans import solved_plans
from graphopt.report.html.structure import structure
from graphopt.report.html.techniques import techniques
from graphopt.report.source import Source
from graphopt.report.units import in_bytes, in_flops, in_percent, in_seconds
from graphopt.runtime.stages import stage

VERSION = importlib.metadata.version("graphopt")


def page(
    source: Source,
    report: Mapping[str, Any],
    optimizer: Any,
    device: int | None = None,
    front: Sequence[Point] = (),
    title: str = "Training step",
) -> str:
    """The page of a report.

    Args:
        report: its plain values; see `Report.to_dict`.
        optimizer: whose states count; see `graphopt.analyze`.
        device: bytes of the device, or None.
        front: plans over FLOPs, memory and value; see `graphopt.pareto`.
    """
    plan, graph = source.plan, source.graph
    rows = report["tensors"]
    names = [row["name"] for row in rows]
    position = {name: k for k, name in enumerate(names)}
    values = plan.importance.values if plan.importance is not None else capacity(graph, source.flops).values
    told = {row["name"]: row["why"] for row in rows}
    found, lines = structure(graph, source.rewritten, names)
    profiles, trouble = _profiles(source, optimizer)
    solved = solved_plans(plan, graph, source.flops, values, report["flops_ratio"])
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
        "techniques": techniques(source.stages, told),
        "not_needed": list(plan.not_needed.items()),
        "assumptions": _assumptions(profiles),
        "environment": _environment(report),
        "notes": list(report["notes"]),
        "made": f"Made by graphopt {VERSION} on {datetime.date.today():%Y-%m-%d}. This page loads nothing.",
    }
    verdict = report["verdict"] or _of_model(report, profiles, device)
    return filled(title, verdict, {**data, "report": {**report, "verdict": verdict}})


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

"""What each technique did, for the page: sites with their reasons, and the diff of the graph, as much of it as is readable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from graphopt.graph import TrainingGraph
from graphopt.passes import PassReport
from graphopt.planner.plan import Plan
from graphopt.report.graph_dump import unified_diff
from graphopt.report.python_text import readable

MOST_CHARACTERS = 60_000
"""Of a diff on the page; a dump has all of it."""


def techniques(plan: Plan, graph: TrainingGraph, reasons: Mapping[str, str]) -> tuple[list[dict[str, Any]], TrainingGraph]:
    """One entry per pass, in the order in which they run, and the graph that they leave.

    Args:
        reasons: by name, why a site was changed, where more is known than that.
    """
    found, before = [], readable(graph)
    for rewrite in plan.passes:
        graph, (report,) = replace(plan, passes=(rewrite,)).rewrite(graph)
        after = readable(graph)
        found.append({**_told(report, reasons), **_shortened(unified_diff(before, after, rewrite.name))})
        before = after
    return found, graph


def _told(report: PassReport, reasons: Mapping[str, str]) -> dict[str, Any]:
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

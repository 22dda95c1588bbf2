"""What each technique did, for the page: sites with their reasons, and the diff of the graph, as much of it as is readable."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from graphopt.passes import PassReport
from graphopt.report.source import Stage

MOST_CHARACTERS = 60_000
"""Of a diff on the page; a dump has all of it."""


def techniques(stages: Iterable[Stage], reasons: Mapping[str, str]) -> list[dict[str, Any]]:
    """One entry per pass.

    Args:
        reasons: by name, why a site was changed, where more is known than that.
    """
    return [{**_told(stage.report, reasons), **_shortened(stage.diff)} for stage in stages]


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

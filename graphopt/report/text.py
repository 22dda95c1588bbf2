"""The report for people: a verdict in one sentence, and what it rests on, line by line."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from graphopt.report.plan import plan_lines
from graphopt.report.selection import selection_lines
from graphopt.report.tensors import counted
from graphopt.report.units import in_bytes, in_flops, in_percent, in_seconds

if TYPE_CHECKING:
    from graphopt.report.summary import Report

WIDTH = 100
"""Columns of the report; a name that is longer than that is not broken."""

NARROW = "\u202f"
"""Stands for a space at which no line is broken."""

INDENT = 17
"""Where the right column begins."""


def verdict(report: Report) -> str:
    """One sentence: what is trained, at what cost, and how exact it is."""
    if not report.full_step_flops and not report.batch_size:
        told = (report.notes or ["the model is trained as it is"])[0]
        return f"{told[0].upper()}{told[1:]}."
    everything = report.trained == report.trainable
    tensors = f"all {report.trainable}" if everything else f"{report.trained} of {report.trainable}"
    parts = [f"Trains {tensors} tensors"]
    if report.full_step_flops:
        parts[0] += f" at {in_percent(report.flops_ratio)} of the FLOPs"
    if report.plan is not None:
        if (measured := report.plan.measured["peak_bytes"]) is not None:
            parts.append(f"peak {in_bytes(measured)} measured")
        elif (predicted := report.plan.predicted["peak_bytes"]) is not None:
            parts.append(f"peak {in_bytes(predicted)} predicted")
    inexact = report.approximations[bool(report.cut) :]
    exact = "no approximation" if everything else "no approximation of their gradients"
    parts.append("approximations: " + ", ".join(inexact) if inexact else exact)
    return "; ".join(parts) + "."


def report_text(report: Report) -> str:
    """The verdict, and a line or more for everything that the report knows."""
    lines = [verdict(report), "", *_figures(report)]
    if report.selection is not None:
        lines += selection_lines(report.selection)
    elif report.importance:
        lines.append(f"importance       {report.importance}; selected by {report.solver}")
    if report.plan is not None:
        lines += plan_lines(report.plan)
    lines += report.lines
    if sent := report.communication.collectives:
        lines.append(f"communication    {len(sent)} collectives of {in_bytes(report.communication.bytes)} per step and rank")
    lines.append(f"approximations   {'; '.join(report.approximations) or 'none'}")
    lines.append(f"batch size       {report.batch}; kernels as on {report.device}; backend {report.backend}")
    lines.append(
        f"overhead         {report.captures} captures {in_seconds(report.capture_seconds)}, selection "
        f"{in_seconds(report.select_seconds)}, {report.compilations} compilations {in_seconds(report.compile_seconds)} "
        f"(passes {in_seconds(report.rewrite_seconds)})"
    )
    lines.extend(f"left alone       {name}: {reason}" for name, reason in report.left_alone.items())
    lines.extend(f"note             {note}" for note in report.notes)
    return "\n".join(map(wrapped, lines))


def _figures(report: Report) -> list[str]:
    limits = {"flops": in_percent, "memory": in_bytes, "variance": in_percent}
    stated = ", ".join(f"{name} at most {limits[name](limit)}" for name, limit in report.budget.items())
    before, after = in_flops(report.full_step_flops), in_flops(report.step_flops)
    forward, backward = in_flops(report.forward_flops), in_flops(report.backward_flops)
    lines = [f"budget           {stated or 'none'}", f"passes           {', '.join(report.passes) or 'none'}"]
    if report.tensors:
        rows = counted(report.tensors).items()
        lines.append("tensors          " + ", ".join(f"{count} {status.replace('does', 'do')}" for status, count in rows))
    else:
        lines.append(f"tensors          {report.trained} of {report.trainable} trained")
    if not report.full_step_flops:
        return lines
    changed = f"{before} -> {after} ({in_percent(report.flops_ratio)})"
    return [
        *lines,
        f"FLOPs per step   {changed} at batch {report.batch_size}",
        f"  in full        forward {forward}, backward {backward}",
    ]


def wrapped(line: str) -> str:
    """A line of the report, broken to its width."""
    line = line.replace(" %", NARROW + "%")
    filled = textwrap.fill(line, WIDTH, subsequent_indent=" " * INDENT, break_long_words=False, break_on_hyphens=False)
    return filled.replace(NARROW, " ")

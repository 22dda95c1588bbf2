"""The model's blocks for the page: their tensors and FLOPs, and the lines of code whose operators run in them."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from graphopt.graph import TrainingGraph
from graphopt.report.picture import blocks
from graphopt.report.provenance import SourceLine, block_name, lines_of_code


def structure(before: TrainingGraph, after: TrainingGraph, names: list[str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Blocks in the order in which the forward meets them, and the lines of code that they refer to by number.

    Args:
        before, after: the captured graph, and as the passes leave it.
        names: of all parameters; a block's tensors are positions among them.
    """
    rest = {name: k for k, name in enumerate(names)}
    inside: dict[str, list[int]] = defaultdict(list)
    for name, k in rest.items():
        inside[block_name(name)].append(k)
    captured, rewritten = _counted(before), _counted(after)
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
        for block in blocks(before, after)
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

"""Rows whose label counts: those of a loss that ignores the labels of all others, as of prompts, padding and unmasked tokens."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from graphopt.passes.dead_rows.of_each import RowAxis, RowsOfEach
from torch import Tensor, fx

from graphopt.analysis.row_axes import Rules
from graphopt.analysis.row_rules import NLL, NLL_BACKWARD, NONE, VIEWS, Axis, arguments, first_value
from graphopt.graph import TrainingGraph, ancestors

STEPS = 8
"""Numbers of rows are multiples of a sample's rows divided by this, so that batches share them."""

ROOM = 0.5
"""Steps that a sample of another batch may have more than those of the example."""

aten = torch.ops.aten


@dataclass(frozen=True)
class Labelled:
    """For how many rows of each sample a step has places.

    Attributes:
        steps: of `STEPS`; all of them: no row is left out.
        names: of the example's tensors, in the order in which the graph takes them.
    """

    steps: int
    names: tuple[str, ...]

    @property
    def key(self) -> str:
        """See `Decision`."""
        return f"labels {self.steps}/{STEPS}"

    @property
    def part(self) -> float | None:
        """Of a sample's rows; None: all."""
        return self.steps / STEPS if self.steps < STEPS else None


def labelled_rows(graph: TrainingGraph, part: float) -> Iterator[tuple[RowsOfEach, Mapping[fx.Node, Axis]]]:
    """Rows whose label counts, with places for a part of each sample's rows; and the losses that read no others."""
    found: dict[tuple[fx.Node, int], list[fx.Node]] = {}
    for node in graph.graph.find_nodes(op="call_function", target=NLL):
        found.setdefault((arguments(node)[1], arguments(node)[4]), []).append(node)
    for (labels, ignored), losses in found.items():
        rows = _rows_of(graph, labels, ignored, part)
        if rows is not None:
            yield rows, {loss: axis_of_labels(rows) for loss in losses if arguments(loss)[3] != NONE}


def _rows_of(graph: TrainingGraph, labels: fx.Node, ignored: int, part: float) -> RowsOfEach | None:
    """The rows of labels (samples x length); None where the length is not known, or there are places for all of it."""
    value = first_value(labels)
    if value is None or value.dim() != 1:
        return None
    if any(node.target is torch.ops.graphopt.rows_with_label.default for node in ancestors([labels])):  # of such rows already
        return None
    length, rest = divmod(graph.at(value.shape[0], graph.batch_size), max(1, graph.batch_size))
    if rest or length < 2:
        return None
    number = value.shape[0] if isinstance(value.shape[0], int) else Rules(graph, length).number(value.shape[0])
    count = places_for(length, part)
    if number % length or count >= length:
        return None
    return RowsOfEach(length, labels, number // length, count, ignored=ignored)


def axis_of_labels(rows: RowsOfEach) -> Axis:
    """Where rows are in what has one row of each sample after the other, and nothing else, in its first dimension."""
    return RowAxis(0, 1, Axis(0, rows.length)) if rows.groups > 1 else Axis(0)


def ignores(rows: RowsOfEach, node: fx.Node) -> bool:
    """Whether a node is the gradient of a loss that ignores all other rows."""
    return node.target is NLL_BACKWARD and arguments(node)[2] is rows.source and arguments(node)[5] == rows.ignored


def counted(graph: TrainingGraph, inputs: Mapping[int, Tensor], samples: int) -> list[tuple[int, int]] | None:
    """By loss, the most rows of a sample whose label counts, and how many rows a sample has; None: not known before the step.

    Args:
        inputs: of the graph, by the number of each.
        samples: in the batch.
    """
    pairs = zip(graph.inputs, graph.placeholders, strict=True)
    known = {n: inputs[d.target] for d, n in pairs if d.kind == "input" and d.target in inputs}
    found = []
    for loss in graph.graph.find_nodes(op="call_function", target=NLL):
        try:
            labels = _value(arguments(loss)[1], known)
        except (RuntimeError, IndexError):  # sizes of the example are among what it is computed by
            return None
        if labels is None or labels.numel() == 0 or samples < 1 or labels.numel() % samples:
            return None
        rows = labels.reshape(samples, -1) != arguments(loss)[4]
        if rows.shape[1] > 1:
            found.append((int(rows.sum(1).max()), rows.shape[1]))
    return found or None


def places_for(length: int, part: float) -> int:
    """Rows of a sample of `length` rows that there are places for."""
    return math.ceil(length * part)


def _value(node: fx.Node, known: dict[fx.Node, Any]) -> Any:
    """What a node computes of inputs alone; None if it needs more than those, or draws numbers."""
    if node in known:
        return known[node]
    if node.op != "call_function" or torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        return None
    values = {n: _value(n, known) for n in node.all_input_nodes}
    if any(value is None for value in values.values()):
        return None
    if node.target in VIEWS:  # with sizes of the example
        known[node] = values[arguments(node)[0]].reshape(-1) if node.meta["val"].dim() == 1 else None
    elif node.target is aten.slice.Tensor and not _is_slice_of_any_length(node, values):
        known[node] = None
    else:
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        known[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    return known[node]


def _is_slice_of_any_length(node: fx.Node, values: Mapping[fx.Node, Any]) -> bool:
    """Whether a slice goes to the end, or is of a dimension that is as long as in the example."""
    source, dim, _, stop, *_ = (*arguments(node), 0, None, None)[:4]
    return stop is None or stop >= sys.maxsize or values[source].shape[dim] == source.meta["val"].shape[dim]

"""Which rows are read: the same ones of every sample, or some of each sample, wherever they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from graphopt.passes.dead_rows.labels import axis_of_labels, ignores, labelled_rows
from graphopt.passes.dead_rows.of_each import BEHIND_SAMPLES, OfEach, RowsOfEach, puts_back, row_of_each
from torch import fx

from graphopt.analysis.row_axes import Rules
from graphopt.analysis.row_rules import Axis, arguments, first_value
from graphopt.compat import expression
from graphopt.graph import TrainingGraph

aten = torch.ops.aten

MOST = 0.5
"""Part of the rows that may be read, for the others to be left out."""


@dataclass(frozen=True)
class Rows:
    """The rows `start` to `stop` (exclusive) of `length`.

    Attributes:
        length: as `Rules.number` has it.
        symbol: the length where it is a symbol of the graph; None: it is a number.
    """

    length: int
    start: int
    stop: int
    symbol: sympy.Expr | None = None

    @property
    def count(self) -> int:
        """How many there are."""
        return self.stop - self.start

    def __str__(self) -> str:
        which = f"row {self.start}" if self.count == 1 else f"rows {self.start} to {self.stop - 1}"
        return f"{which} of {self.symbol or self.length}"


Places = Rows | RowsOfEach


def rules_of(graph: TrainingGraph, rows: Places) -> Rules:
    """What is row by row, for these rows."""
    if isinstance(rows, RowsOfEach) and rows.groups > 1:
        return OfEach(graph, rows.length, rows.groups)
    return Rules(graph, rows.length)


def read_places(graph: TrainingGraph, labelled: float | None) -> Iterator[tuple[Places, Mapping[fx.Node, Axis]]]:
    """Rows that nodes of the forward take of a tensor, few enough for the others to be left out; and these nodes.

    Args:
        labelled: see `find_demands`.
    """
    constant: dict[tuple[fx.Node, int], list[tuple[Rows, fx.Node]]] = {}
    computed: dict[tuple[fx.Node, fx.Node], list[tuple[RowsOfEach, fx.Node]]] = {}
    for node in graph.graph.nodes:
        if node.target in (aten.select.int, aten.slice.Tensor) and (taken := taken_rows(graph, node)) is not None:
            dim, rows = taken
            source = _source(arguments(node)[0])
            if source.op == "call_function" and rows.count < rows.length:
                constant.setdefault((source, dim), []).append((rows, node))
        elif node.target is aten.index.Tensor and (one := row_of_each(graph, node)) is not None:
            computed.setdefault((arguments(node)[0], one.source), []).append((one, node))
    for (_, dim), found in constant.items():
        first = found[0][0]
        rows = Rows(first.length, min(r.start for r, _ in found), max(r.stop for r, _ in found), first.symbol)
        if rows.count <= MOST * traced_length(graph, rows):
            yield rows, {node: Axis(dim) for _, node in found}
    for alike in computed.values():
        yield alike[0][0], {node: BEHIND_SAMPLES for _, node in alike}
    if labelled is not None:
        yield from labelled_rows(graph, labelled)


def traced_length(graph: TrainingGraph, rows: Places) -> int:
    """How many rows there were when the graph was traced."""
    symbol = rows.symbol if isinstance(rows, Rows) else None
    return rows.length if symbol is None else int(graph.sizes[symbol])


def taken_rows(graph: TrainingGraph, node: fx.Node) -> tuple[int, Rows] | None:
    """The dimension and the rows that a `select` or `slice` takes, or that its backward puts among zeros; None: no such node.

    Of as many rows as a symbol says they are counted from the front; Dynamo's guards say that there are as many. Samples are no
    rows where their number is a symbol.
    """
    backward = node.target in (aten.select_backward.default, aten.slice_backward.default)
    if not backward and node.target not in (aten.select.int, aten.slice.Tensor):
        return None
    whole = first_value(node if backward else arguments(node)[0])
    given = arguments(node)[2:] if backward else arguments(node)[1:]
    if whole is None or any(isinstance(argument, fx.Node) for argument in given):
        return None
    dim = (given[0] if given else 0) % whole.dim()
    size = whole.shape[dim]
    if isinstance(size, int):
        return _rows_of_number(node, dim, size, given)
    symbol = expression(size)
    if symbol not in graph.sizes:
        return None
    length = Rules(graph, 1).number(size)
    if node.target in (aten.select.int, aten.select_backward.default):
        index = given[1]
        return (dim, Rows(length, index, index + 1, symbol)) if index >= 0 else None
    start, stop, step = _bounds(given)
    part = first_value(arguments(node)[0] if backward else node)
    taken = 0 if part is None else part.shape[dim]
    if not isinstance(taken, int) or start is None or start < 0 or step != 1 or taken != stop - start:
        return None
    return dim, Rows(length, start, stop, symbol)


def _rows_of_number(node: fx.Node, dim: int, length: int, given: tuple[Any, ...]) -> tuple[int, Rows] | None:
    if node.target in (aten.select.int, aten.select_backward.default):
        index = given[1] % length
        return dim, Rows(length, index, index + 1)
    start, stop, step = _bounds(given)
    start, stop, _ = slice(start, stop).indices(length)
    return (dim, Rows(length, start, stop)) if step == 1 and start < stop else None


def _bounds(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Start, stop and step of a slice, whose arguments behind its dimension may be left out."""
    return (*given[1:], *(None, None, 1)[max(0, len(given) - 1) :])


def put_back_at(graph: TrainingGraph, rows: Places, node: fx.Node) -> Axis | None:
    """Where a node puts some of these rows, and no others, among zeros; None: it does not."""
    if isinstance(rows, RowsOfEach) and rows.ignored is not None:
        return axis_of_labels(rows) if ignores(rows, node) else None
    if isinstance(rows, RowsOfEach):
        return BEHIND_SAMPLES if puts_back(graph, rows, node) else None
    if node.target not in (aten.select_backward.default, aten.slice_backward.default) or (put := taken_rows(graph, node)) is None:
        return None
    dim, these = put
    within = these.length == rows.length and rows.start <= these.start and these.stop <= rows.stop
    return Axis(dim) if within else None


def _source(node: fx.Node) -> fx.Node:
    """What a node has all elements of: `x` of `x[:]`."""
    while node.target is aten.slice.Tensor and node.meta["val"].shape == arguments(node)[0].meta["val"].shape:
        node = arguments(node)[0]
    return node

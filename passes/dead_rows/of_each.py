"""Some rows of each sample, wherever they are: one, as `x[torch.arange(samples), positions]` reads it, or those with a label."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import graphopt.passes.dead_rows.ops  # noqa: F401  registers the operator
import torch
from torch import fx

from graphopt.analysis.row_axes import Rules
from graphopt.analysis.row_rules import PRODUCTS, Axis, Read, arguments, first_value, is_zero
from graphopt.compat import expression
from graphopt.errors import PassError
from graphopt.graph import TrainingGraph, ancestors
from graphopt.transforms.rows import Emit

aten = torch.ops.aten


@dataclass(frozen=True)
class RowsOfEach:
    """`count` rows of `length` of each sample.

    Attributes:
        source: the node that says which: the number of each sample's row, or all rows' labels, one sample's after the other's.
        groups: how many samples, as `Rules.number` has it.
        ignored: the label of rows that do not count; None: the source has no labels.
    """

    length: int
    source: fx.Node
    groups: int
    count: int = 1
    ignored: int | None = None

    def __str__(self) -> str:
        if self.ignored is not None:
            return f"{self.count} rows of {self.length} of each sample, those with a label among them"
        return f"one row of {self.length} of each sample"


@dataclass(frozen=True)
class RowAxis(Axis):
    """Where the rows of a tensor are, and where the samples are that they belong to."""

    samples: Axis = field(default_factory=lambda: Axis(0))


BEHIND_SAMPLES = RowAxis(1, 1, Axis(0))
"""Of a tensor (B, T, ...)."""


@dataclass(frozen=True)
class OfEach(Rules):
    """What is row by row, and sample by sample: rows of different samples are different ones.

    Attributes:
        groups: how many samples; see `RowsOfEach`.
    """

    groups: int = 0

    @functools.cached_property
    def of_rows(self) -> Rules:
        """Of rows alone."""
        return Rules(self.graph, self.length)

    @functools.cached_property
    def of_samples(self) -> Rules:
        """Of samples alone."""
        return Rules(self.graph, self.groups)

    def carries(self, node: fx.Node, axis: Axis) -> bool:
        """See `Rules`. Samples have a dimension of their own, or are just around the rows: so rows can be taken by number."""
        if not self.of_rows.carries(node, _row(axis)) or not self.of_samples.carries(node, _samples(axis)):
            return False
        samples, shape = _samples(axis), self.shape(node)
        if samples.dim == axis.dim:
            return samples.inner == self.length * axis.inner and shape[axis.dim] == self.of_samples.length * samples.inner
        return samples.inner == 1 and shape[samples.dim] == self.of_samples.length and shape[axis.dim] == self.length * axis.inner

    def read(self, node: fx.Node, axis: Axis) -> Read | None:
        """See `Rules`."""
        rows, samples = self.of_rows.read(node, _row(axis)), self.of_samples.read(node, _samples(axis))
        if rows is None or samples is None:
            return None
        if any(there is not None and samples.get(n) is None for n, there in rows.items()):
            return None  # the same rows for all samples
        found = {n: None if there is None else _paired(there, samples[n]) for n, there in rows.items()}
        return found if all(there is None or self.carries(n, there) for n, there in found.items()) else None

    def written(self, node: fx.Node, argument: fx.Node, axis: Axis) -> Axis | None:
        """See `Rules`."""
        row = self.of_rows.written(node, argument, _row(axis))
        sample = self.of_samples.written(node, argument, _samples(axis))
        found = None if row is None or sample is None else _paired(row, sample)
        return found if found is not None and self.carries(node, found) else None

    def summed(self, node: fx.Node, zeros: Mapping[fx.Node, Axis]) -> Read | None:
        """See `Rules`; of products those that sum over samples, too."""
        found = self.of_rows.summed(node, {n: _row(axis) for n, axis in zeros.items()})
        if found is None or node.target not in PRODUCTS:
            return None if found is None else {n: zeros[n] for n in found}
        one = next(n for n in found if n in zeros)
        sample = _samples(zeros[one])
        if sample.dim != zeros[one].dim:
            return None
        pairs = {n: _paired(there, Axis(there.dim, sample.inner)) for n, there in found.items() if there is not None}
        return pairs if all(zeros.get(n, there) == there and self.carries(n, there) for n, there in pairs.items()) else None


def _row(axis: Axis) -> Axis:
    return Axis(axis.dim, axis.inner)


def _samples(axis: Axis) -> Axis:
    assert isinstance(axis, RowAxis)
    return axis.samples


def _paired(row: Axis, sample: Axis | None) -> RowAxis:
    assert sample is not None
    return RowAxis(row.dim, row.inner, sample)


def row_of_each(graph: TrainingGraph, node: fx.Node) -> RowsOfEach | None:
    """The rows that `x[torch.arange(B), positions]` takes of x (B, T, ...), or that its backward puts among zeros.

    Not of a single sample: its dimension of one element could be anywhere.
    """
    if node.target not in (aten.index.Tensor, aten.index_put.default):
        return None
    whole, given = first_value(arguments(node)[0]), list(arguments(node)[1])
    if whole is None or whole.dim() < 2 or len(given) != 2 or not all(isinstance(n, fx.Node) for n in given):
        return None
    samples, positions = given
    size, length, value = whole.shape[0], whole.shape[1], first_value(positions)
    if expression(size) == 1:
        return None
    if samples.target is not aten.arange.default or value is None or value.dim() != 1 or value.dtype != torch.int64:
        return None
    count = arguments(samples)[0]
    counted = expression(count.meta["val"] if isinstance(count, fx.Node) else count)
    if counted != expression(size) or not isinstance(length, int) or length < 2 or expression(value.shape[0]) != counted:
        return None
    groups = size if isinstance(size, int) else Rules(graph, length).number(size)
    return RowsOfEach(length, positions, groups)


def puts_back(graph: TrainingGraph, rows: RowsOfEach, node: fx.Node) -> bool:
    """Whether a node puts these rows, and no others, among zeros; each its own, not one for all samples."""
    if node.target is not aten.index_put.default or not is_zero(arguments(node)[0]) or row_of_each(graph, node) != rows:
        return False
    whole, given = first_value(node), first_value(arguments(node)[2])
    assert whole is not None
    assert given is not None
    sizes = (whole.shape[0], *whole.shape[2:])
    return [expression(size) for size in given.shape] == [expression(size) for size in sizes]


def needed_for(rows: RowsOfEach) -> set[fx.Node]:
    """What the rows' numbers are computed by."""
    return {node for node in ancestors([rows.source]) if node.op in ("call_function", "get_attr")}


def known_before(rows: RowsOfEach, narrow: Collection[fx.Node]) -> bool:
    """Whether which rows are read can be known before anything is computed on these rows alone."""
    random = torch.Tag.nondeterministic_seeded  # numbers would be drawn in another order
    return not any(node in narrow or random in getattr(node.target, "tags", ()) for node in needed_for(rows))


def before_everything(rows: RowsOfEach, narrow: Collection[fx.Node], graph: fx.Graph) -> fx.Node:
    """Move what the rows' numbers are computed by to before all nodes that are computed on these rows alone.

    Returns:
        The first of those.
    """
    order, needed = list(graph.nodes), needed_for(rows)
    first = next(node for node in order if node in narrow)
    for node in order[order.index(first) :]:
        if node in needed:
            first.prepend(node)
    return first


def numbers(rows: RowsOfEach, emit: Emit) -> fx.Node:
    """The numbers of the rows of each sample (samples, count)."""
    if rows.ignored is not None:
        return emit(torch.ops.graphopt.rows_with_label.default, (rows.source, rows.ignored, rows.length, rows.count))
    behind = emit(aten.add.Tensor, (rows.source, rows.length))
    number = emit(aten.where.self, (emit(aten.lt.Scalar, (rows.source, 0)), behind, rows.source))  # from the end
    return emit(aten.reshape.default, (number, [-1, 1]))


def places(found: fx.Node, split: fx.Node, dim: int, axis: Axis, dimensions: int, emit: Emit) -> fx.Node:
    """For each element of some rows of each sample, the number of its row, for `gather` and `scatter`.

    Args:
        found: see `numbers`.
        split: a tensor whose dimension `dim` has the rows, and nothing else; see `split_rows`.
        axis: where the rows were before, in a tensor of so many `dimensions`; no `RowAxis` where there is one sample.
    Raises:
        PassError: a size beside them depends on the batch.
    """
    sizes = list(split.meta["val"].shape)
    count = found.meta["val"].shape[1]
    at = dim - 1 if isinstance(axis, RowAxis) else dim
    if isinstance(axis, RowAxis) and axis.samples.dim != axis.dim:
        at = axis.samples.dim + (len(sizes) - dimensions if axis.samples.dim > axis.dim else 0)
    if not all(isinstance(size, int) for d, size in enumerate(sizes) if d not in (at, dim)):
        raise PassError(f"{split.name} has sizes beside its samples and rows that depend on the batch.")
    ordered = found if at < dim or count == 1 else emit(aten.t.default, (found,))
    shape = [count if d == dim else -1 if d == at else 1 for d in range(len(sizes))]
    view = emit(aten.reshape.default, (ordered, shape))
    return emit(aten.expand.default, (view, [-1 if d in (at, dim) else size for d, size in enumerate(sizes)]))

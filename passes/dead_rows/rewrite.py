"""Computing nodes of a joint graph on some rows alone."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from graphopt.passes.dead_rows.demand import Demand
from graphopt.passes.dead_rows.labels import axis_of_labels
from graphopt.passes.dead_rows.of_each import RowsOfEach, before_everything, numbers, places
from graphopt.passes.dead_rows.places import Rows, put_back_at, rules_of, taken_rows
from torch import fx

from graphopt.analysis.row_rules import ROWS_FIRST, Axis, arguments, first_value
from graphopt.compat import expression
from graphopt.errors import PassError
from graphopt.graph import TrainingGraph
from graphopt.transforms.edit import CHECKPOINTED, ORIGIN, insert_node, simplify_sizes
from graphopt.transforms.rows import Emit, joined_rows, on_some_rows, some_rows, split_rows

aten = torch.ops.aten


class Narrowing:
    """One rewriting.

    Attributes:
        made: by node and place of the rows, the same on the demanded rows alone.
        padded: by node, the same with zeros in all other rows.
        labelled: the rows are those with a label.
        numbers: of the rows, where each sample has others.
        length: how many rows there are, as a size in the graph.
    """

    def __init__(self, graph: TrainingGraph, demand: Demand) -> None:
        self.graph = graph
        self.demand = demand
        self.rows = demand.rows
        self.rules = rules_of(graph, demand.rows)
        self.labelled = isinstance(demand.rows, RowsOfEach) and demand.rows.ignored is not None
        self.made: dict[tuple[fx.Node, Axis], fx.Node] = {}
        self.padded: dict[fx.Node, fx.Node] = {}
        self.drawn: dict[fx.Node, fx.Node] = {}
        self.sizes: dict[Any, fx.Node] = {}
        self.length: int | fx.Node = demand.rows.length
        self.numbers: fx.Node | None = None

    def apply(self) -> None:
        """Compute what the demand says on its rows alone, in place.

        Raises:
            PassError: a size is not known that would have to be; the graph must not be used then.
        """
        simplify_sizes(self.graph.graph)  # no size is read off a tensor that will have fewer rows
        if isinstance(self.rows, RowsOfEach):
            first = before_everything(self.rows, self.demand.narrow, self.graph.graph)
            self.numbers = numbers(self.rows, self._before(first))
        self.sizes = _sizes_of_inputs(self.graph.graph)
        self.length = self._length()
        for node in list(self.graph.graph.nodes):
            if node in self.demand.narrow:
                self._move(node, self.demand.narrow[node])
            elif node in self.demand.takes:
                self._take(node, self.demand.takes[node])
            elif node in self.demand.sums:
                self._replace_inputs(node, self.demand.sums[node])
            elif any(n in self.demand.zeros for n in node.all_input_nodes):
                self._replace_inputs(node, {})
        self.graph.eliminate_dead_code()

    def _length(self) -> int | fx.Node:
        """How many rows there are, as a size in the graph."""
        symbol = self.rows.symbol if isinstance(self.rows, Rows) else None
        if symbol is None:
            return self.rows.length
        if symbol not in self.sizes:
            raise PassError(f"the size {symbol} is computed nowhere.")
        return self.sizes[symbol]

    def _move(self, node: fx.Node, axis: Axis) -> None:
        """Repeat a node on the rows; the node itself dies."""
        if node.target is aten.native_dropout.default:
            return  # its results are computed one by one
        if node.target is operator.getitem and arguments(node)[0].target is aten.native_dropout.default:
            self.made[node, axis] = self._dropped(node, axis)
        elif not self.labelled and put_back_at(self.graph, self.rows, node) == axis:
            self.made[node, axis] = self._put_back(node, axis)
        else:
            read = self.rules.read(node, axis)
            assert read is not None
            inputs = {n: self._input(n, read.get(n), node) for n in node.all_input_nodes}
            args, kwargs = fx.map_arg((arguments(node), node.kwargs), inputs.__getitem__)
            target, args = on_some_rows(self.rules, node, args, axis, self.rows.count)
            self.made[node, axis] = self._emit(target, args, node, kwargs)

    def _replace_inputs(self, node: fx.Node, read: Mapping[fx.Node, Axis | None]) -> None:
        """Have a node that stays read what it needs: some rows of what it sums over, and all rows of everything else."""
        inputs = {n: self._input(n, read.get(n), node) for n in node.all_input_nodes}
        node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), inputs.__getitem__)

    def _input(self, node: fx.Node, axis: Axis | None, anchor: fx.Node) -> fx.Node:
        """A tensor on the rows, or in full where `axis` is None."""
        if axis is not None:
            part = self._narrowed(node, axis, anchor)
            if anchor.target not in ROWS_FIRST or node in self.demand.narrow:
                return part
            return self._emit(aten.clone.default, (part,), anchor, _CONTIGUOUS)  # kernels take statistics to be contiguous
        if node not in self.demand.zeros:
            return node
        if first_value(node) is node.meta.get("val"):
            return self._in_full(node, anchor)
        return self.made[node, self.demand.narrow[node]]  # results that are sums over rows

    def _narrowed(self, node: fx.Node, axis: Axis, anchor: fx.Node) -> fx.Node:
        if (node, axis) not in self.made:
            if node in self.demand.narrow:
                raise PassError(f"{node.name} has its rows in two places.")
            self.made[node, axis] = self._part(node, axis, anchor)
        return self.made[node, axis]

    def _in_full(self, node: fx.Node, anchor: fx.Node) -> fx.Node:
        if node not in self.padded:
            axis = self.demand.narrow[node]
            split, dim = split_rows(self.rules, self.made[node, axis], axis, self.rows.count, self._before(anchor))
            if isinstance(self.rows, RowsOfEach):
                whole = self._scattered(split, dim, axis, node, anchor)
            else:
                whole = self._among_zeros(split, dim, self.length, self.rows.start, anchor)
            self.padded[node] = joined_rows(whole, node, axis, self._before(anchor))
        return self.padded[node]

    def _take(self, node: fx.Node, axis: Axis) -> None:
        source = self._narrowed(arguments(node)[0], axis, node)
        if isinstance(self.rows, RowsOfEach):
            if self.labelled:
                node.args = (source, self._narrowed(self.rows.source, axis_of_labels(self.rows), node), *arguments(node)[2:])
                return
            node.replace_all_uses_with(self._emit(aten.select.int, (source, axis.dim, 0), node))
            return
        found = taken_rows(self.graph, node)
        assert found is not None
        start, stop = found[1].start - self.rows.start, found[1].stop - self.rows.start
        if node.target is aten.select.int:
            replaced = self._emit(aten.select.int, (source, axis.dim, start), node)
        elif stop - start == self.rows.count:
            replaced = source
        else:
            replaced = self._emit(aten.slice.Tensor, (source, axis.dim, start, stop), node)
        node.replace_all_uses_with(replaced)

    def _put_back(self, node: fx.Node, axis: Axis) -> fx.Node:
        """Rows of a gradient among those zeros that are left."""
        if isinstance(self.rows, RowsOfEach):
            return self._emit(aten.unsqueeze.default, (self._input(arguments(node)[2], None, node), axis.dim), node)
        found = taken_rows(self.graph, node)
        assert found is not None
        gradient, rows = self._input(arguments(node)[0], None, node), found[1]
        if node.target is aten.select_backward.default:
            gradient = self._emit(aten.unsqueeze.default, (gradient, axis.dim), node)
        if rows.count == self.rows.count:
            return gradient
        return self._among_zeros(gradient, axis.dim, self.rows.count, rows.start - self.rows.start, node)

    def _among_zeros(self, node: fx.Node, dim: int, length: int | fx.Node, start: int, anchor: fx.Node) -> fx.Node:
        """A tensor as some of the `length` rows of another, from `start`."""
        stop = start + node.meta["val"].shape[dim]
        return self._emit(aten.slice_backward.default, (node, self._sizes(node, dim, length), dim, start, stop, 1), anchor)

    def _sizes(self, node: fx.Node, dim: int, length: int | fx.Node) -> list[Any]:
        """Of a tensor, as sizes in the graph, but for one."""
        shape = node.meta["val"].shape
        sizes: list[Any] = [size if isinstance(size, int) else self.sizes.get(expression(size)) for size in shape]
        sizes[dim] = length
        if None in sizes:
            raise PassError(f"{node.name} has a size that is computed nowhere.")
        return sizes

    def _dropped(self, node: fx.Node, axis: Axis) -> fx.Node:
        """One result of a dropout, by the numbers that would have been drawn for these rows, had all been drawn."""
        dropout: fx.Node = arguments(node)[0]
        source, *rest = arguments(dropout)
        part = self._narrowed(source, axis, dropout)
        if dropout not in self.drawn:
            split, dim = split_rows(self.rules, part, axis, self.rows.count, self._before(dropout))
            one = self._emit(aten.full_like.default, (self._emit(aten.slice.Tensor, (split, dim, 0, 1), dropout), 1), dropout)
            sizes = [self.length if d == dim else -1 for d in range(split.meta["val"].dim())]
            ones = joined_rows(self._emit(aten.expand.default, (one, sizes), dropout), dropout, axis, self._before(dropout))
            self.drawn[dropout] = self._emit(aten.native_dropout.default, (self._laid_out(ones, dropout), *rest), dropout)
        result = self._emit(operator.getitem, (self.drawn[dropout], arguments(node)[1]), node)
        drawn = self._part(result, axis, node)
        return drawn if arguments(node)[1] else self._emit(aten.mul.Tensor, (part, drawn), node)

    def _laid_out(self, ones: fx.Node, dropout: fx.Node) -> fx.Node:
        """A tensor in memory as a dropout's mask, in whose order numbers are drawn."""
        strides = [self.rules.number(stride) for stride in dropout.meta["val"][1].stride()]
        order = sorted(range(len(strides)), key=lambda dim: -strides[dim])
        if order == sorted(order):
            return ones
        turned = self._emit(aten.permute.default, (ones, order), dropout)
        copied = self._emit(aten.clone.default, (turned,), dropout, _CONTIGUOUS)
        return self._emit(aten.permute.default, (copied, [order.index(dim) for dim in range(len(order))]), dropout)

    def _part(self, node: fx.Node, axis: Axis, anchor: fx.Node) -> fx.Node:
        emit = self._before(anchor)
        if isinstance(self.rows, Rows):
            return some_rows(self.rules, node, axis, self.rows.start, self.rows.stop, emit, self.length)
        assert self.numbers is not None
        split, dim = split_rows(self.rules, node, axis, self.rows.length, emit)
        where = places(self.numbers, split, dim, axis, len(self.rules.shape(node)), emit)
        return joined_rows(emit(aten.gather.default, (split, dim, where)), node, axis, emit)

    def _scattered(self, part: fx.Node, dim: int, axis: Axis, like: fx.Node, anchor: fx.Node) -> fx.Node:
        """Some rows of each sample among zeros."""
        assert self.numbers is not None
        emit = self._before(anchor)
        zeros = emit(aten.new_zeros.default, (part, self._sizes(part, dim, self.rows.length)))
        where = places(self.numbers, part, dim, axis, len(self.rules.shape(like)), emit)
        return emit(aten.scatter.src, (zeros, dim, where, part))

    def _before(self, anchor: fx.Node) -> Emit:
        return lambda target, args: self._emit(target, args, anchor)

    def _emit(self, target: Any, args: tuple[Any, ...], anchor: fx.Node, kwargs: dict[str, Any] | None = None) -> fx.Node:
        return insert_node(self.graph.graph, target, args, anchor, kwargs, (*ORIGIN, *CHECKPOINTED))


_CONTIGUOUS = {"memory_format": torch.contiguous_format}


def _sizes_of_inputs(graph: fx.Graph) -> dict[Any, fx.Node]:
    """Nodes of sizes by their formula, but for those that are read off tensors that are computed."""
    known: dict[Any, fx.Node] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        read_off_input = node.target is aten.sym_size.int and arguments(node)[0].op == "placeholder"
        if isinstance(value, torch.SymInt) and (read_off_input or all(n in known.values() for n in node.all_input_nodes)):
            known.setdefault(expression(value), node)
    return known

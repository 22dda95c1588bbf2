"""Run part of a backward on fewer rows: below a boundary, the batch size is a smaller number.

Below a boundary every tensor that has a batch dimension has only the rows that were kept: gradients because they are computed
from kept rows, activations of the forward because those rows are gathered. Boundaries nest: each keeps rows of those that are
left above it. Where gradients of different levels meet (the output of an encoder that several decoder blocks read), the fewer
rows are put back among zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from graphopt.passes.vcas.own_rows import with_own_rows
from torch import SymInt, Tensor, fx

from graphopt.analysis.batch_dims import BatchDim, NoRows, batch_dim, carries_batch, elements_before, gradient_cone
from graphopt.analysis.row_rules import VIEWS
from graphopt.compat import run_on_metadata
from graphopt.errors import PassError
from graphopt.graph import TrainingGraph
from graphopt.transforms.edit import insert_node, simplify_sizes

aten = torch.ops.aten

Draw = Callable[["RowLevels", fx.Node, int, fx.Node], tuple[fx.Node, fx.Node]]
"""(levels, importance of each row, how many are kept, anchor) -> nodes of the kept rows' positions and of their scale."""


@dataclass(frozen=True)
class Cut:
    """A boundary at which rows are kept.

    Attributes:
        node: the gradient whose rows are sampled.
        count: rows on which everything below runs.
        parent: position of the cut above it; None for the full batch.
    """

    node: fx.Node
    count: int
    parent: int | None


_RUN_AGAIN = frozenset({
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.t.default, aten.transpose.int, aten.permute.default,
    aten.expand.default, aten.unsqueeze.default, aten.alias.default, aten.detach.default, aten.full.default, aten.zeros.default,
    aten.ones.default,
})  # fmt: skip
"""Forward operators that are repeated on fewer rows, not gathered: they move nothing, or make the same value everywhere."""

_ARITHMETIC = frozenset({
    aten.mul.Tensor, aten.div.Tensor, aten.add.Tensor, aten.sub.Tensor, aten.mul.Scalar, aten.div.Scalar, aten.add.Scalar,
    aten.sub.Scalar, aten.pow.Tensor_Scalar, aten.rsub.Scalar,
})  # fmt: skip
"""Operators to which a size is a number to calculate with: the batch size there stays the whole batch's."""


class RowLevels:
    """Carries out cuts on one joint graph; see the module's docstring.

    The graph's shapes above all cuts stay formulas of the batch; below a cut they are numbers.
    """

    def __init__(self, graph: TrainingGraph, cuts: Sequence[Cut], draw: Draw) -> None:
        self.graph = graph
        self.cuts = list(cuts)
        self.draw = draw
        self.cone = gradient_cone(graph)
        self.value = {node: node.meta.get("val") for node in graph.graph.nodes}
        self.of_node = {cut.node: i for i, cut in enumerate(cuts)}
        self.level: dict[fx.Node, int | None] = {}
        self.rows: dict[int, fx.Node] = {}
        self.positions: dict[int, fx.Node] = {}
        self.sampled: dict[fx.Node, fx.Node] = {}
        self.original_args: dict[fx.Node, tuple[Any, ...]] = {}
        self.gathered: dict[tuple[fx.Node, int, bool], fx.Node] = {}
        self.scattered: dict[tuple[fx.Node, int | None], fx.Node] = {}

    def apply(self, product: Callable[[RowLevels, fx.Node, int | None], None]) -> None:
        """Rewrite the graph in place.

        Args:
            product: called for each node of the backward once it runs on its level's rows, with that level.
        Raises:
            PassError: an operator below a cut that is not separable by sample; names it.
        """
        simplify_sizes(self.graph.graph)  # no size is read off a tensor that will have fewer rows
        for node in list(self.graph.graph.nodes):
            if node.op == "output":
                node.args = (self._inputs(node.args[0], None, node),)
            if node not in self.cone or node.op != "call_function":
                continue
            level = self.level[node] = self._level_of(node)
            try:
                self._move(node, level)
            except NoRows as error:
                raise PassError(f"{node.target} is not separable by sample: {error}.") from error
            except (RuntimeError, ValueError, TypeError) as error:
                raise PassError(f"{node.target} cannot run on some rows of the batch alone: {error}") from error
            product(self, node, level)
            if node in self.of_node:
                self._cut(node)
        self.graph.eliminate_dead_code()

    def _move(self, node: fx.Node, level: int | None) -> None:
        """Have a node run on the rows of its level, or on all of them, the others' gradients being zero, and take those."""
        self.original_args[node] = node.args
        everywhere = draws_by_place(node)
        if level is not None and not everywhere:
            node.args = with_own_rows(self.graph, node, self.value, lambda n: self._gather(n, level, node, again=True))
        node.args = self._inputs(node.args, None if everywhere else level, node)
        node.kwargs = self._inputs(node.kwargs, None if everywhere else level, node)
        if level is None or everywhere:
            return
        node.target = _of_any_layout(node.target)
        node.meta["val"] = run_on_metadata(node.target, node.args, node.kwargs)
        if any(draws_by_place(source) for source in node.all_input_nodes) and carries_batch(self.graph, self.value[node]):
            self.sampled[node] = self.take(node, self.rows_of(node), self.rows[level], node.next)

    def _inputs(self, arguments: Any, level: int | None, anchor: fx.Node) -> Any:
        return fx.map_arg(arguments, lambda node: self._input(node, level, anchor))

    def count(self, level: int | None) -> int:
        """Rows that are left at a level."""
        return self.graph.batch_size if level is None else self.cuts[level].count

    def emit(self, target: Any, args: tuple[Any, ...], anchor: fx.Node, kwargs: dict[str, Any] | None = None) -> fx.Node:
        """A new node just before `anchor`."""
        return insert_node(self.graph.graph, target, args, anchor, kwargs)

    def row_norms(self, node: fx.Node, rows: BatchDim, anchor: fx.Node, dtype: torch.dtype = torch.float64) -> fx.Node:
        """Euclidean norm of each sample, by default in float64 so that neither large nor small gradients are lost."""
        wide = self.emit(aten.abs.default, (node,), anchor) if node.meta["val"].is_complex() else node
        if wide.meta["val"].dtype != dtype:
            wide = self.emit(aten._to_copy.default, (wide,), anchor, {"dtype": dtype})
        squares = self._split(self.emit(aten.mul.Tensor, (wide, wide), anchor), rows, anchor)
        others = [i for i in range(squares.meta["val"].dim()) if i != rows.dim]
        total = self.emit(aten.sum.dim_IntList, (squares, others), anchor) if others else squares
        return self.emit(aten.sqrt.default, (total,), anchor)

    def take(self, node: fx.Node, rows: BatchDim, positions: fx.Node, anchor: fx.Node) -> fx.Node:
        """The samples of `node` at `positions`."""
        split = self._split(node, rows, anchor)
        taken = self.emit(aten.index_select.default, (split, rows.dim, positions), anchor)
        return self._join(taken, rows, anchor)

    def _split(self, node: fx.Node, rows: BatchDim, anchor: fx.Node) -> fx.Node:
        """A tensor with a dimension of its own for samples."""
        if rows.inner == 1:
            return node
        shape = list(node.meta["val"].shape)
        return self.emit(aten.reshape.default, (node, [*shape[: rows.dim], -1, rows.inner, *shape[rows.dim + 1 :]]), anchor)

    def _join(self, node: fx.Node, rows: BatchDim, anchor: fx.Node) -> fx.Node:
        """The inverse of `_split`."""
        if rows.inner == 1:
            return node
        shape = list(node.meta["val"].shape)
        return self.emit(aten.reshape.default, (node, [*shape[: rows.dim], -1, *shape[rows.dim + 2 :]]), anchor)

    def by_sample(self, node: fx.Node) -> bool:
        """Whether a forward value, as it is gathered, has one sample's rows after the other's: not where tokens came first."""
        while node.target in _RUN_AGAIN and isinstance(source := node.args[0], fx.Node):
            if not carries_batch(self.graph, self.value[source]):
                break
            if node.target in VIEWS and len({elements_before(self.graph, self.value[n]) for n in (source, node)}) > 1:
                return False
            node = source
        return True

    def rows_of(self, node: fx.Node) -> BatchDim:
        """Where the samples of a node's tensor are.

        Raises:
            PassError: nowhere.
        """
        found = batch_dim(self.graph, self.value[node])
        if found is None:
            raise PassError(f"{node.name} has no batch dimension.")
        return found

    def _level_of(self, node: fx.Node) -> int | None:
        """The deepest level above those of all gradients that a node reads."""
        levels = [self._after(n) for n in node.all_input_nodes if n in self.cone and carries_batch(self.graph, self.value[n])]
        if not levels:
            return None
        chains = [self._chain(level) for level in levels]
        shared = [level for level in chains[0] if all(level in chain for chain in chains)]
        return shared[0]

    def _chain(self, level: int | None) -> list[int | None]:
        """A level and those above it."""
        chain: list[int | None] = [level]
        while level is not None:
            level = self.cuts[level].parent
            chain.append(level)
        return chain

    def _after(self, node: fx.Node) -> int | None:
        """The level at which the users of a node see it."""
        return self.of_node.get(node, self.level.get(node))

    def _input(self, node: fx.Node, level: int | None, anchor: fx.Node) -> Any:
        """What a node of `level` reads in the place of `node`."""
        value = self.value.get(node)
        if node in self.cone:
            current = self.sampled.get(node, node)
            if not isinstance(value, Tensor) or not carries_batch(self.graph, value):
                return current
            return self._up(node, current, self._after(node), level, anchor)
        if level is None:
            return node
        if isinstance(value, SymInt):
            return node if anchor.target in _ARITHMETIC else self.graph.at(value, self.count(level))
        return self._gather(node, level, anchor) if carries_batch(self.graph, value) else node

    def _gather(self, node: fx.Node, level: int, anchor: fx.Node, again: bool = False) -> fx.Node:
        """A forward value on the rows of a level; `again`: as if those were the whole batch, which numbers of samples need."""
        key = (node, level, again)
        if key not in self.gathered:
            if again or node.target in _RUN_AGAIN:
                args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: self._again(n, level, anchor, again))
                self.gathered[key] = self.emit(_of_any_layout(node.target), args, anchor, kwargs)
            else:
                self.gathered[key] = self.take(node, self.rows_of(node), self.rows[level], anchor)
        return self.gathered[key]

    def _again(self, node: fx.Node, level: int, anchor: fx.Node, again: bool) -> Any:
        value = self.value.get(node)
        if isinstance(value, SymInt):
            return self.graph.at(value, self.count(level))
        return self._gather(node, level, anchor, again) if carries_batch(self.graph, value) else node

    def _up(self, key: fx.Node, node: fx.Node, level: int | None, target: int | None, anchor: fx.Node) -> fx.Node:
        """A gradient on the rows of `level`, among zeros on those of `target` above it."""
        rows = batch_dim(self.graph, self.value[key])
        assert rows is not None
        while level != target:
            assert level is not None
            parent = self.cuts[level].parent
            if (key, parent) not in self.scattered:
                self.scattered[key, parent] = self._put_back(node, rows, level, parent, anchor)
            node, level = self.scattered[key, parent], parent
        return node

    def _put_back(self, node: fx.Node, rows: BatchDim, level: int, parent: int | None, anchor: fx.Node) -> fx.Node:
        value = node.meta["val"]
        split = self._split(node, rows, anchor)
        shape: list[Any] = list(split.meta["val"].shape)
        shape[rows.dim] = self._batch() if parent is None else self.cuts[parent].count
        options = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
        zeros = self.emit(aten.full.default, (shape, 0), anchor, options)
        whole = self.emit(aten.index_copy.default, (zeros, rows.dim, self.positions[level], split), anchor)
        return self._join(whole, rows, anchor)

    def _batch(self) -> fx.Node:
        """The whole batch's size."""
        for desc, node in zip(self.graph.inputs, self.graph.placeholders, strict=True):
            value = self.value[node]
            if desc.kind != "input" or not isinstance(value, Tensor):  # a number, such as the batch's size
                continue
            if (rows := batch_dim(self.graph, value)) is not None and rows.inner == 1:
                first = next(n for n in self.graph.graph.nodes if n.op != "placeholder")
                return self.emit(aten.sym_size.int, (node, rows.dim), first)
        raise PassError("no input has the batch as a dimension of its own.")

    def _cut(self, node: fx.Node) -> None:
        """Keep some rows of a boundary's gradient, scaled."""
        level = self.of_node[node]
        # Where something above put the rows back among all (a mean over the batch does), they are drawn from those.
        cut = self.cuts[level] = replace(self.cuts[level], parent=self.level[node])
        rows = self.rows_of(node)
        node, key = self.sampled.get(node, node), node
        anchor = node.next
        positions, scale = self.draw(self, self.row_norms(node, rows, anchor), cut.count, anchor)
        self.positions[level] = self.rows[level] = positions
        if cut.parent is not None:
            self.rows[level] = self.emit(aten.index_select.default, (self.rows[cut.parent], 0, positions), anchor)
        self.sampled[key] = self.scale_rows(self.take(node, rows, positions, anchor), rows, scale, anchor)

    def scale_rows(self, node: fx.Node, rows: BatchDim, scale: fx.Node, anchor: fx.Node) -> fx.Node:
        """A tensor with each sample multiplied by its entry of `scale`, in single precision where the tensor has less."""
        split = self._split(node, rows, anchor)
        value = split.meta["val"]
        dtype = value.dtype if value.dtype.itemsize >= 4 else torch.float32
        factor = self.emit(aten._to_copy.default, (scale,), anchor, {"dtype": dtype})
        factor = self.emit(aten.view.default, (factor, [-1, *[1] * (value.dim() - rows.dim - 1)]), anchor)
        scaled = self.emit(aten.mul.Tensor, (split, factor), anchor)
        if dtype != value.dtype:
            scaled = self.emit(aten._to_copy.default, (scaled,), anchor, {"dtype": value.dtype})
        return self._join(scaled, rows, anchor)


def draws_by_place(node: fx.Node) -> bool:
    """Whether a backward draws the numbers of its forward again, each by its row's place in the batch.

    Attention with dropout does, as fused kernels of GPUs have it.
    """
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.name.startswith("aten::_scaled_dot_product") or not schema.name.endswith("_backward"):
        return False
    places = [i for i, argument in enumerate(schema.arguments) if argument.name == "dropout_p"]
    return any(i < len(node.args) and node.args[i] for i in places)


def _of_any_layout(target: Any) -> Any:
    """Gathered rows may lie in memory in another way than all rows do, so that a view of them would need a copy."""
    return aten.reshape.default if target in (aten.view.default, aten._unsafe_view.default) else target

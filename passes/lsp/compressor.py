"""Putting compressed gradients into a joint graph: P'GQ in place of the gradient G of a weight (m x n).

P and Q are inputs of the rewritten graph, and so is a variable D (s x s) whose gradient P'GQ is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from graphopt.passes.lsp.projectors import Subspace, entries_per_column
from graphopt.passes.lsp.weight_gradients import WeightGradient
from torch import Tensor, fx

import graphopt.ops.host_callback  # noqa: F401  registers the operators
from graphopt.analysis.products import Matrix, value_numbers
from graphopt.compat import RECOMPUTE, SAVE, InputDesc, fake_like, is_recomputed
from graphopt.graph import TrainingGraph, descendants
from graphopt.transforms.edit import ORIGIN, insert_node, simplify_sizes, sort_nodes

aten = torch.ops.aten
combine_rows = torch.ops.graphopt.combine_rows.default


@dataclass(frozen=True)
class Part:
    """What an input of a rewritten graph is: the "rows" or "values" of the "left" or "right" projector of `weight` (see
    `Projector.rows` and `Projector.by_column`), or all of a dense one, its "matrix"."""

    weight: str
    what: str
    side: str

    def __str__(self) -> str:
        return f"{self.side} {self.what} of {self.weight}"


Side = tuple[fx.Node] | tuple[fx.Node, fx.Node]
"""The inputs that hold a projector: its matrix, or its rows and values."""


@dataclass(frozen=True)
class Exchange:
    """A gradient that is formed, passed to a receiver, and replaced by what that returns (see `graphopt.ops.host_callback`)."""

    receiver: int
    site: int


def given_inputs(weight: str, subspace: Subspace) -> dict[InputDesc, Tensor]:
    """The inputs of a rewritten graph that hold the projectors of `weight`."""
    return {
        InputDesc("given", Part(weight, what, side)): value
        for side, projector in (("left", subspace.left), ("right", subspace.right))
        for what, value in (
            [("matrix", projector.values)] if projector.is_dense else [("rows", projector.rows), ("values", projector.by_column)]
        )
    }


class Compressor:
    """Compresses gradients, one by one, on one graph."""

    def __init__(self, graph: TrainingGraph, size: int, nonzeros: int) -> None:
        """Set up for one graph.

        Args:
            size, nonzeros: s and d of the projectors.
        """
        self.graph = graph
        self.size = size
        self.nonzeros = nonzeros
        self.position = {node: float(i) for i, node in enumerate(graph.graph.nodes)}
        self.numbers = value_numbers(graph.graph)
        tangents = [n for n, desc in zip(graph.placeholders, graph.inputs, strict=True) if desc.kind == "tangent"]
        self.backward = descendants(tangents)
        self.last_input = float(sum(desc.kind != "tangent" for desc in graph.inputs) - 1)
        self.inputs = 0
        self.tables: dict[int, fx.Node] = {}

    def compress(self, gradient: WeightGradient, order: str) -> None:
        """Return P'GQ instead of a gradient."""
        example, (m, n) = gradient.node.meta["val"], gradient.shape
        s, d = self.size, self.nonzeros
        exact = torch.float64 if example.dtype == torch.float64 else torch.float32

        def given(what: str, side: str, shape: tuple[int, int], dtype: torch.dtype) -> fx.Node:
            value = fake_like(example, shape, dtype)
            node = self.graph.add_input(InputDesc("given", Part(gradient.name, what, side)), value)
            self._after_the_others(node)
            return node

        def projector(side: str, rows: int) -> Side:
            if d == s:
                return (given("matrix", side, (rows, s), exact),)
            shape = s, entries_per_column(rows, d, s)
            return given("rows", side, shape, torch.int32), given("values", side, shape, exact)

        left, right = projector("left", m), projector("right", n)
        variable = InputDesc("compressed", gradient.name)
        self._after_the_others(self.graph.add_input(variable, fake_like(example, (s, s), exact)))
        total: fx.Node | None = None
        for term in sorted(gradient.terms, key=lambda term: self.position[term.leaf]):
            part = self._term(term, order, left, right)
            total = part if total is None else self._emit(aten.add.Tensor, (total, part), term.leaf)
        if total is None:  # not a sum of products: it is formed
            result = self._times(left, gradient.node, gradient.node)
            total = self._right(result, right, gradient.node)
        if total.meta["val"].dtype != exact:
            total = self._emit(aten._to_copy.default, (total,), gradient.node, {"dtype": exact})
        self.graph.compress_gradient(gradient.name, total)

    def exchange(self, gradient: WeightGradient, to: Exchange) -> None:
        """Return what a receiver makes of a gradient."""
        arguments = (gradient.node, to.receiver, to.site, self.size)
        compressed = self._emit(torch.ops.graphopt.exchange.default, arguments, gradient.node)
        variable = InputDesc("compressed", gradient.name)
        self._after_the_others(self.graph.add_input(variable, compressed.meta["val"]))
        self.graph.compress_gradient(gradient.name, compressed)

    def _after_the_others(self, node: fx.Node) -> None:
        """Give an input its place behind all others but the tangents."""
        self.inputs += 1
        self.position[node] = self.last_input + 1 - 1 / (self.inputs + 1)

    def _times(self, projector: Side, matrix: fx.Node, anchor: fx.Node) -> fx.Node:
        """A projector's transpose, P', by a matrix."""
        if len(projector) == 2:
            return self._emit(combine_rows, (matrix, *projector), anchor)
        dtype, (dense,) = matrix.meta["val"].dtype, projector
        if dense.meta["val"].dtype != dtype:
            dense = self._emit(aten._to_copy.default, (dense,), anchor, {"dtype": dtype})
        return self._emit(aten.mm.default, (self._transposed(dense, anchor), matrix), anchor)

    def _term(self, term: Matrix, order: str, left: Side, right: Side) -> fx.Node:
        """scale * P'ABQ of one product AB."""
        anchor = term.leaf
        a, b = cast(tuple[fx.Node, fx.Node], anchor.args)
        if term.transposed:  # (LR)' = R'L'
            a, b = self._transposed(b, anchor), self._transposed(a, anchor)
        left_first, right_first = order in ("activations", "left"), order in ("activations", "right")
        if left_first:
            a = self._times(left, self._table(a, anchor), anchor)  # P'A
        if right_first:
            b = self._transposed(self._times(right, self._table(self._transposed(b, anchor), anchor), anchor), anchor)  # BQ
        if left_first or right_first:
            result = self._emit(aten.mm.default, (a, b), anchor)
        else:
            result = self._emit(aten.t.default, (anchor,), anchor) if term.transposed else anchor
        if not left_first:
            result = self._times(left, result, anchor)
        if not right_first:
            result = self._right(result, right, anchor)
        if term.scale != 1.0:
            result = self._emit(aten.mul.Tensor, (result, term.scale), anchor)
        return result

    def _right(self, node: fx.Node, right: Side, anchor: fx.Node) -> fx.Node:
        """An (s x n) matrix by Q."""
        transposed = self._emit(aten.t.default, (node,), anchor)
        return self._emit(aten.t.default, (self._times(right, transposed, anchor),), anchor)

    def _table(self, node: fx.Node, anchor: fx.Node) -> fx.Node:
        """`node`; for sparse projectors with contiguous rows, in one copy for all weights that share the operand (q, k and v)."""
        if node.target is not aten.t.default or self.nonzeros == self.size:
            return node
        source = node.args[0]
        assert isinstance(source, fx.Node)
        key = self.numbers.get(source, -1 - len(self.numbers) - len(self.tables))
        if key not in self.tables:
            options = {"memory_format": torch.contiguous_format}
            self.tables[key] = self._emit(aten.clone.default, (node,), anchor, options)
        return self.tables[key]

    def _transposed(self, node: fx.Node, anchor: fx.Node) -> fx.Node:
        if node.target is aten.t.default:
            return node.args[0]  # type: ignore[return-value]
        return self._emit(aten.t.default, (node,), anchor)

    def _emit(self, target: Any, args: tuple[Any, ...], anchor: fx.Node, kwargs: dict[str, Any] | None = None) -> fx.Node:
        """A new node at `anchor`, after what it reads; one that needs no gradient runs in the backward all the same."""
        node = insert_node(self.graph.graph, target, args, anchor, kwargs, (*ORIGIN, "ac_graph_id"))
        if any(n in self.backward for n in node.all_input_nodes):
            self.backward.add(node)
        elif not is_recomputed(node):
            node.meta.update({**RECOMPUTE, **{k: v for k, v in node.meta.items() if k == "ac_graph_id"}})
        self.position[node] = max([self.position[n] for n in node.all_input_nodes] + [self.position.get(anchor, 0.0) - 0.5])
        return node

    def finish(self) -> None:
        """Put the nodes in an order in which they can run, and remove what nothing needs."""
        simplify_sizes(self.graph.graph)
        self.graph.eliminate_dead_code()
        sort_nodes(self.graph.graph, self.position)
        self.graph.module.recompile()


def gated(graph: TrainingGraph, names: Sequence[str], receiver: int) -> TrainingGraph:
    """A copy of `graph` that reads every weight in `names` through a gate, just before its first use.

    A gate waits for that weight's own update and for no other (LSP-Offload, Alg. 3).

    Args:
        names: the position in here is the number of the site.
        receiver: of gates; see `graphopt.ops.host_callback`.
    """
    result = graph.clone()
    for weight, name in result.parameter_nodes().items():
        users = set(weight.users)
        if name in names and users:
            first = next(node for node in result.graph.nodes if node in users)
            with result.graph.inserting_before(first):
                gate = result.graph.call_function(torch.ops.graphopt.gate.default, (weight, receiver, names.index(name)))
            gate.meta = {"val": weight.meta["val"], **SAVE}
            for user in users:
                user.replace_input_with(weight, gate)
    result.module.recompile()
    return result

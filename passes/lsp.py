"""Compressed weight gradients: P'GQ instead of G (LSP-Offload, section 4.1).

For a weight W (m x n) with gradient G, the graph returns g = P'GQ (s x s), as the gradient of a matrix D (s x s) that is zero
and would stand in W + PDQ'. G is a sum of products AB over N rows, so that g can be computed as (P'A)(BQ), without an (m x n)
matrix anywhere; which order costs least is chosen by `graphopt.planner.compression`. The optimizer steps D and adds PDQ' to W
(`graphopt.runtime.subspace_optimizer`).

Preserves: PROJECTED. g equals P'GQ of autograd's G to rounding; every other gradient is exact.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from graphopt.passes.base import Changes, Preserves, Site
from torch import Tensor, fx

import graphopt.ops.hand_over
import graphopt.ops.sparse  # noqa: F401  both register operators
from graphopt.analysis.compression_orders import ORDERS, CompressionShape, order_flops
from graphopt.analysis.products import value_numbers
from graphopt.analysis.weight_gradients import Term, WeightGradient, find_weight_gradients
from graphopt.compat import RECOMPUTE, InputDesc, fake_like, is_recomputed, run_on_metadata
from graphopt.errors import PassError
from graphopt.graph import TrainingGraph, descendants
from graphopt.projectors import Subspace, draw_subspace, entries_per_column
from graphopt.rewriting import simplify_sizes, sort_nodes

aten = torch.ops.aten
combine_rows = torch.ops.graphopt.combine_rows.default


@dataclass(frozen=True)
class Part:
    """What an input of a rewritten graph is: the "rows" or "values" of the "left" or "right" projector of `weight` (see
    `Projector.rows` and `Projector.by_column`)."""

    weight: str
    what: str
    side: str

    def __str__(self) -> str:
        return f"{self.side} {self.what} of {self.weight}"


SCHEDULES = ("sequential", "layerwise", "zero")


@dataclass(frozen=True)
class Exchange:
    """A gradient that is formed, handed to a receiver, and replaced by what that returns (see `graphopt.ops.hand_over`)."""

    receiver: int
    site: int


@dataclass(frozen=True)
class Lsp:
    """The compression.

    Attributes:
        subspace: s, the size of the compressed gradient.
        nonzeros: d, entries per row of the projectors.
        weights: names of the matrices to compress; None: every one whose gradient is a sum of matrix products and that is not
            smaller than `subspace`.
        order: one of `ORDERS` for all; None: the planner chooses for each.
        criterion: what the planner minimises: "time" (measured) or "flops".
        check_every: steps after which the projectors are compared with the gradients of a batch; they are at the first step.
        threshold: relative error |PP'GQQ' - G| / |G| from which they are fitted anew.
        iterations: of fitting, at most.
        seed: of the random projectors.
        schedule: "sequential": the optimizer's step copies, updates and applies, one weight after another; "layerwise": copies
            and updates start in the backward, and updates are applied in the next forward, where they are needed; "zero": the
            baseline, ZeRO-Offload's schedule without compression (copies start in the backward).
    Raises:
        PassError: a value outside its range.
    """

    subspace: int = 512
    nonzeros: int = 16
    weights: tuple[str, ...] | None = None
    order: str | None = None
    criterion: str = "time"
    check_every: int = 1000
    threshold: float = 0.5
    iterations: int = 100
    seed: int = 0
    schedule: str = "sequential"
    name = "lsp"
    preserves = Preserves.PROJECTED
    serves = ()

    def __post_init__(self) -> None:
        for field in ("subspace", "nonzeros", "check_every", "iterations"):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise PassError(f"{field}={value!r} must be a whole number of at least 1.")
        if self.nonzeros > self.subspace:
            raise PassError(
                f"nonzeros={self.nonzeros} is more than subspace={self.subspace}: a row of a projector has at most one entry per "
                "column. Use fewer nonzeros or a larger subspace."
            )
        if not isinstance(self.threshold, (int, float)) or not self.threshold > 0:
            raise PassError(f"threshold={self.threshold!r} must be a positive number: a relative error, for instance 0.5.")
        if self.order is not None and self.order not in ORDERS:
            raise PassError(f"order={self.order!r}: use one of {', '.join(ORDERS)}, or None.")
        if isinstance(self.weights, str):
            raise PassError(f"weights={self.weights!r} must be several names: ({self.weights!r},).")
        if self.schedule not in SCHEDULES:
            raise PassError(f"schedule={self.schedule!r}: use one of {', '.join(SCHEDULES)}.")
        if self.criterion not in ("time", "flops"):
            raise PassError(f"criterion={self.criterion!r}: use 'time' or 'flops'.")

    def applicable(self, graph: TrainingGraph) -> list[Site]:
        """Every weight whose gradient can be compressed, by its name.

        Raises:
            PassError: there is none, or one of `weights` cannot be.
        """
        gradients = find_weight_gradients(graph)
        reasons = {g.name: self.refusal(g) for g in gradients}
        if self.weights is not None:
            for name in self.weights:
                reason = reasons.get(name, "it is no trained matrix of the model")
                if reason:
                    raise PassError(f"the gradient of {name} cannot be compressed: {reason}. Remove it from weights.")
            return [Site(name) for name in reasons if name in self.weights]
        sites = [Site(name) for name, reason in reasons.items() if not reason]
        if not sites:
            largest = max((min(g.shape) for g in gradients if g.terms), default=0)
            if not largest:
                why = "; ".join(f"{name}: {reason}" for name, reason in list(reasons.items())[:3]) or "the model trains no matrix"
                raise PassError(f"no weight's gradient can be compressed: {why}. Remove the lsp pass.")
            raise PassError(
                f"no weight's gradient can be compressed to {self.subspace} x {self.subspace}: the largest subspace that a "
                f"weight of this model can have is {largest}. Use a smaller subspace, or remove the lsp pass."
            )
        return sites

    def refusal(self, gradient: WeightGradient) -> str:
        """Why a gradient stays as it is; "" if it is compressed."""
        if gradient.other:
            return f"it is not a sum of matrix products ({gradient.other})"
        if min(gradient.shape) < self.subspace and self.schedule != "zero":
            return f"{gradient.shape[0]} x {gradient.shape[1]} is smaller than subspace={self.subspace}"
        return ""

    def example_inputs(self, graph: TrainingGraph, seed: int) -> dict[InputDesc, Tensor]:
        """For the contract of PROJECTED passes: a value for every input that `apply` added, with projectors drawn at random."""
        generator = torch.Generator().manual_seed(seed)
        shapes = {p.name: p.shape for p in graph.parameters}
        found: dict[InputDesc, Tensor] = {}
        for desc, node in zip(graph.inputs, graph.placeholders, strict=True):
            if desc.kind == "compressed":
                value, shape = node.meta["val"], shapes[desc.target]
                subspace = draw_subspace((shape[0], shape[1]), self.subspace, self.nonzeros, generator)
                found |= given_inputs(desc.target, subspace.to(value.device, value.dtype))
                found[desc] = torch.zeros(self.subspace, self.subspace, dtype=value.dtype, device=value.device)
        return found

    def image(self, name: str, given: Mapping[InputDesc, Tensor], gradients: Mapping[str, Tensor]) -> Tensor:
        """For the contract of PROJECTED passes: P'GQ, computed from autograd's gradients with dense matrices."""
        gradient = gradients[name]
        sides = []
        for side, size in (("left", gradient.shape[0]), ("right", gradient.shape[1])):
            rows, values = (given[InputDesc("given", Part(name, what, side))] for what in ("rows", "values"))
            dense = torch.zeros(self.subspace, size, dtype=gradient.dtype, device=gradient.device)
            sides.append(dense.scatter_add_(1, rows.long(), values.to(gradient.dtype)))
        return sides[0] @ gradient @ sides[1].t()

    def apply(self, graph: TrainingGraph, decisions: Mapping[str, str | Exchange] | Collection[str]) -> Changes:
        """Compress the gradients named in `decisions`, in the order that it gives; where only names are given, in `order` or the
        one with the fewest FLOPs. An `Exchange` hands the full gradient out instead.

        Raises:
            PassError: an unknown or unsuitable name.
        """
        gradients = {g.name: g for g in find_weight_gradients(graph)}
        rewriter = _Rewriter(graph, self)
        left_alone = {name: reason for name, g in gradients.items() if (reason := self.refusal(g))}
        for name in decisions:
            if name not in gradients or (min(gradients[name].shape) < self.subspace and self.schedule != "zero"):
                reason = left_alone.get(name, "it is no trained matrix of the model")
                raise PassError(f"the gradient of {name} cannot be compressed: {reason}.")
        for name, gradient in gradients.items():
            if name in decisions:
                given = decisions[name] if isinstance(decisions, Mapping) else self.order
                if self.schedule == "zero":
                    rewriter.whole(gradient)
                elif isinstance(given, Exchange):
                    rewriter.exchange(gradient, given)
                else:
                    rewriter.compress(gradient, given or fewest_flops(gradient, self, graph))
            else:
                left_alone.setdefault(name, "not asked for")
        removed = rewriter.finish()
        return Changes(tuple(n for n in gradients if n in decisions), left_alone, removed)


def compression_shape(gradient: WeightGradient, term: Term, rewrite: Lsp, graph: TrainingGraph) -> CompressionShape:
    """The sizes of one product, rows as a formula of the batch."""
    rows = graph.formula(term.factors[0].meta["val"].shape[1])
    return CompressionShape(*gradient.shape, rows, rewrite.subspace, rewrite.nonzeros)


def fewest_flops(gradient: WeightGradient, rewrite: Lsp, graph: TrainingGraph) -> str:
    """The order with the fewest FLOPs at the captured batch size."""
    shapes = [compression_shape(gradient, term, rewrite, graph) for term in gradient.terms]

    def flops(order: str) -> int:
        return sum(int(order_flops(order, s).subs(dict.fromkeys(s.rows.free_symbols, graph.batch_size))) for s in shapes)

    return min(ORDERS, key=flops)


def given_inputs(weight: str, subspace: Subspace) -> dict[InputDesc, Tensor]:
    """The inputs of a rewritten graph that hold the projectors of `weight`."""
    return {
        InputDesc("given", Part(weight, what, side)): value
        for side, projector in (("left", subspace.left), ("right", subspace.right))
        for what, value in (("rows", projector.rows), ("values", projector.by_column))
    }


_INHERITED = ("nn_module_stack", "fwd_nn_module_stack", "stack_trace", "ac_graph_id")


class _Rewriter:
    """Compresses gradients, one by one, on one graph."""

    def __init__(self, graph: TrainingGraph, rewrite: Lsp) -> None:
        self.graph = graph
        self.rewrite = rewrite
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
        s, d = self.rewrite.subspace, self.rewrite.nonzeros
        exact = torch.float64 if example.dtype == torch.float64 else torch.float32

        def given(what: str, side: str, size: int, dtype: torch.dtype) -> fx.Node:
            value = fake_like(example, (s, size), dtype)
            node = self.graph.add_input(InputDesc("given", Part(gradient.name, what, side)), value)
            self._after_the_others(node)
            return node

        left, right = (
            (given("rows", side, e, torch.int32), given("values", side, e, exact))
            for side, e in (("left", entries_per_column(m, d, s)), ("right", entries_per_column(n, d, s)))
        )
        variable = InputDesc("compressed", gradient.name)
        self._after_the_others(self.graph.add_input(variable, fake_like(example, (s, s), exact)))
        total: fx.Node | None = None
        for term in sorted(gradient.terms, key=lambda term: self.position[term.node]):
            part = self._term(term, order, left, right)
            total = part if total is None else self._emit(aten.add.Tensor, (total, part), term.node)
        if total is None:  # not a sum of products: it is formed
            result = self._emit(combine_rows, (gradient.node, *left), gradient.node)
            total = self._right(result, right, gradient.node)
        if total.meta["val"].dtype != exact:
            total = self._emit(aten._to_copy.default, (total,), gradient.node, {"dtype": exact})
        self.graph.compress_gradient(gradient.name, total)

    def whole(self, gradient: WeightGradient) -> None:
        """Return a gradient as it is, as that of a variable."""
        exact = torch.float64 if gradient.node.meta["val"].dtype == torch.float64 else torch.float32
        value = self._emit(aten._to_copy.default, (gradient.node,), gradient.node, {"dtype": exact})
        self._after_the_others(self.graph.add_input(InputDesc("compressed", gradient.name), value.meta["val"]))
        self.graph.compress_gradient(gradient.name, value)

    def exchange(self, gradient: WeightGradient, to: Exchange) -> None:
        """Return what a receiver makes of a gradient."""
        arguments = (gradient.node, to.receiver, to.site, self.rewrite.subspace)
        compressed = self._emit(torch.ops.graphopt.exchange.default, arguments, gradient.node)
        variable = InputDesc("compressed", gradient.name)
        self._after_the_others(self.graph.add_input(variable, compressed.meta["val"]))
        self.graph.compress_gradient(gradient.name, compressed)

    def _after_the_others(self, node: fx.Node) -> None:
        """Give an input its place behind all others but the tangents."""
        self.inputs += 1
        self.position[node] = self.last_input + 1 - 1 / (self.inputs + 1)

    def _term(self, term: Term, order: str, left: tuple[fx.Node, fx.Node], right: tuple[fx.Node, fx.Node]) -> fx.Node:
        """scale * P'ABQ of one product AB."""
        anchor = term.node
        a, b = term.factors
        if term.transposed:  # (LR)' = R'L'
            a, b = self._transposed(b, anchor), self._transposed(a, anchor)

        def table(node: fx.Node, transposed: bool) -> fx.Node:
            return self._table(node, transposed, anchor)

        if order in ("activations", "left"):
            result = self._emit(combine_rows, (table(a, False), *left), anchor)  # P'A
            if order == "activations":
                other = self._emit(combine_rows, (table(b, True), *right), anchor)  # (BQ)'
                result = self._emit(aten.mm.default, (result, self._transposed(other, anchor)), anchor)
            else:
                result = self._right(self._emit(aten.mm.default, (result, b), anchor), right, anchor)
        elif order == "right":
            other = self._emit(combine_rows, (table(b, True), *right), anchor)
            product = self._emit(aten.mm.default, (a, self._transposed(other, anchor)), anchor)
            result = self._emit(combine_rows, (product, *left), anchor)
        else:
            formed = self._emit(aten.t.default, (anchor,), anchor) if term.transposed else anchor
            result = self._right(self._emit(combine_rows, (formed, *left), anchor), right, anchor)
        if term.scale != 1.0:
            result = self._emit(aten.mul.Tensor, (result, term.scale), anchor)
        return result

    def _right(self, node: fx.Node, right: tuple[fx.Node, fx.Node], anchor: fx.Node) -> fx.Node:
        """An (s x n) matrix by Q."""
        transposed = self._emit(aten.t.default, (node,), anchor)
        return self._emit(aten.t.default, (self._emit(combine_rows, (transposed, *right), anchor),), anchor)

    def _table(self, node: fx.Node, transposed: bool, anchor: fx.Node) -> fx.Node:
        """`node`, or its transpose, with contiguous rows; weights that share an operand (as q, k and v do) share the copy."""
        node = self._transposed(node, anchor) if transposed else node
        if node.target is not aten.t.default:
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
        with self.graph.graph.inserting_before(anchor):
            node = self.graph.graph.call_function(target, args, kwargs or {})
        node.meta = {k: anchor.meta[k] for k in _INHERITED if k in anchor.meta}
        node.meta["val"] = run_on_metadata(target, args, kwargs or {})
        if any(n in self.backward for n in node.all_input_nodes):
            self.backward.add(node)
        elif not is_recomputed(node):
            node.meta.update({**RECOMPUTE, **{k: v for k, v in node.meta.items() if k == "ac_graph_id"}})
        self.position[node] = max([self.position[n] for n in node.all_input_nodes] + [self.position.get(anchor, 0.0) - 0.5])
        return node

    def finish(self) -> int:
        """Put the nodes in an order in which they can run, and remove what nothing needs; returns how many."""
        before = len(self.graph.graph.nodes)
        simplify_sizes(self.graph.graph)
        self.graph.eliminate_dead_code()
        sort_nodes(self.graph.graph, self.position)
        self.graph.module.recompile()
        return before - len(self.graph.graph.nodes)

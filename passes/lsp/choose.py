"""In which order a compressed gradient P'(AB)Q is computed, AB being (m x N) by (N x n): the fewest FLOPs, or the least time."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from graphopt.passes.lsp.projectors import entries_per_column
from graphopt.passes.lsp.weight_gradients import WeightGradient, find_weight_gradients
from graphopt.passes.technique import Smaller

from graphopt.graph import TrainingGraph
from graphopt.planner.product_times import ProductTimes, TimesFor

if TYPE_CHECKING:
    from graphopt.passes.lsp.technique import Lsp

ORDERS = ("activations", "left", "right", "formed")
"""(P'A)(BQ); ((P'A)B)Q; P'(A(BQ)); P'(AB)Q, the last of which alone ever holds an (m x n) matrix."""


@dataclass(frozen=True)
class CompressionShape:
    """One product and its projectors.

    Attributes:
        m, n: sizes of the weight.
        rows: N, the samples (or tokens) that AB sums over.
        size, nonzeros: s and d.
    """

    m: int
    n: int
    rows: int
    size: int
    nonzeros: int


def steps(order: str, shape: CompressionShape) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, int, int]]]:
    """What an order computes: dense products (m, k, n), and sums (rows of the result, entries, rows of the table, width)."""
    m, n, rows, s = shape.m, shape.n, shape.rows, shape.size
    left, right = (entries_per_column(size, shape.nonzeros, s) for size in (m, n))
    product, sums = {
        "activations": ((s, rows, s), [(s, left, m, rows), (s, right, n, rows)]),
        "left": ((s, rows, n), [(s, left, m, rows), (s, right, n, s)]),
        "right": ((m, rows, s), [(s, right, n, rows), (s, left, m, s)]),
        "formed": ((m, rows, n), [(s, left, m, n), (s, right, n, s)]),
    }[order]
    if shape.nonzeros == s:
        return [product, *((r, table, width) for r, _, table, width in sums)], []
    return [product], sums


def order_flops(order: str, shape: CompressionShape) -> int:
    """FLOPs of an order, 2 per multiply-add."""
    dense, sparse = steps(order, shape)
    return sum(2 * a * b * c for a, b, c in dense) + sum(2 * r * e * w for r, e, _, w in sparse)


@dataclass(frozen=True)
class CompressionChoice:
    """The order of one weight's gradient, at one batch size.

    Attributes:
        layer: the weight's name.
        order: one of `ORDERS`.
        flops: of the compressed gradient in this order; `formed_flops` of the gradient itself.
        seconds: predicted, in this order and where the gradient is formed first; None where time was not measured.
    """

    layer: str
    order: str
    flops: int
    formed_flops: int
    seconds: tuple[float, float] | None

    def __str__(self) -> str:
        time = "" if self.seconds is None else f", {self.seconds[1] * 1e3:.2f} -> {self.seconds[0] * 1e3:.2f} ms"
        return f"{self.layer}: {self.order}, {self.formed_flops:,} -> {self.flops:,} FLOPs{time}"


def choose_compressions(
    graph: TrainingGraph, rewrite: Lsp, names: Collection[str], times_for: TimesFor
) -> dict[str, CompressionChoice]:
    """An order for the gradient of every weight in `names`, at the graph's batch size.

    Args:
        rewrite: says whether FLOPs or time decide, or the order itself.
        times_for: measured times on a device; None where nothing can be measured, so that FLOPs decide.
    """
    choices = {}
    for gradient in find_weight_gradients(graph):
        if gradient.name in names:
            value = gradient.node.meta["val"]
            times = times_for(value.device, value.dtype) if rewrite.criterion == "time" else None
            try:
                choices[gradient.name] = _choose(gradient, rewrite, graph, times)
            except torch.OutOfMemoryError:  # no room to time anything beside the model
                choices[gradient.name] = _choose(gradient, rewrite, graph, None)
    return choices


def _choose(gradient: WeightGradient, rewrite: Lsp, graph: TrainingGraph, times: ProductTimes | None) -> CompressionChoice:
    shapes = _shapes(gradient, rewrite, graph)
    if not shapes:  # in this call of the model it is computed in another way: it is formed, and compressed as it is
        whole = CompressionShape(*gradient.shape, 0, rewrite.subspace, rewrite.nonzeros)
        return CompressionChoice(gradient.name, "formed", order_flops("formed", whole), 0, None)
    order, seconds = rewrite.order or fewest_flops(gradient, rewrite, graph)[0], None
    if times is not None:
        compared = ORDERS if rewrite.order is None else {rewrite.order, "formed"}
        cost = {order: sum(_seconds(order, s, times) for s in shapes) for order in compared}
        order = rewrite.order or min(cost, key=lambda o: cost[o])
        seconds = (cost[order], cost["formed"])
    formed = sum(2 * s.m * s.n * s.rows for s in shapes)
    return CompressionChoice(gradient.name, order, sum(order_flops(order, s) for s in shapes), formed, seconds)


def _shapes(gradient: WeightGradient, rewrite: Lsp, graph: TrainingGraph) -> list[CompressionShape]:
    """The sizes of each product in a gradient, at the graph's batch size."""
    summed = [term.leaf.all_input_nodes[0].meta["val"].shape[1] for term in gradient.terms]
    rows = [graph.at(number, graph.batch_size) for number in summed]
    return [CompressionShape(*gradient.shape, number, rewrite.subspace, rewrite.nonzeros) for number in rows]


def _seconds(order: str, shape: CompressionShape, times: ProductTimes) -> float:
    dense, sparse = steps(order, shape)
    return sum(times.product(*d) for d in dense) + sum(times.combined(*c) for c in sparse)


def fewest_flops(gradient: WeightGradient, rewrite: Lsp, graph: TrainingGraph) -> tuple[str, int]:
    """The order with the fewest FLOPs at the captured batch size, and these."""
    shapes = _shapes(gradient, rewrite, graph)
    flops = {order: sum(order_flops(order, shape) for shape in shapes) for order in ORDERS}
    order = min(ORDERS, key=lambda order: flops[order])
    return order, flops[order]


def smaller_gradients(graph: TrainingGraph, rewrite: Lsp) -> dict[str, Smaller]:
    """The compressed gradient with its projectors of every weight that can have one."""
    found = {}
    for gradient in find_weight_gradients(graph):
        if rewrite.refusal(gradient):
            continue
        width = max(4, gradient.node.meta["val"].element_size())  # half precision is compressed in float32
        each = width if rewrite.nonzeros == rewrite.subspace else 2 * width + 3 * 4  # values twice, three places of each
        projectors = sum(gradient.shape) * rewrite.nonzeros * each
        found[gradient.name] = Smaller(projectors + rewrite.subspace**2 * width, fewest_flops(gradient, rewrite, graph)[1])
    return found

"""In which order each compressed gradient P'(AB)Q is computed: the fewest FLOPs, or the least time."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from graphopt.passes.lsp.orders import ORDERS, CompressionShape, order_flops, steps
from graphopt.passes.lsp.weight_gradients import WeightGradient, find_weight_gradients
from graphopt.passes.technique import Smaller

from graphopt.analysis.products import Matrix
from graphopt.graph import TrainingGraph
from graphopt.planner.product_times import ProductTimes, TimesFor

if TYPE_CHECKING:
    from graphopt.passes.lsp.technique import Lsp


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
    graph: TrainingGraph, batch_size: int, rewrite: Lsp, names: Collection[str], times_for: TimesFor
) -> dict[str, CompressionChoice]:
    """An order for the gradient of every weight in `names`.

    Args:
        batch_size: for which costs are compared.
        rewrite: says whether FLOPs or time decide, or the order itself.
        times_for: measured times on a device; None where nothing can be measured, so that FLOPs decide.
    """
    choices = {}
    for gradient in find_weight_gradients(graph):
        if gradient.name in names:
            value = gradient.node.meta["val"]
            times = times_for(value.device, value.dtype) if rewrite.criterion == "time" else None
            try:
                choices[gradient.name] = _choose(gradient, rewrite, graph, batch_size, times)
            except torch.OutOfMemoryError:  # no room to time anything beside the model
                choices[gradient.name] = _choose(gradient, rewrite, graph, batch_size, None)
    return choices


def _choose(
    gradient: WeightGradient, rewrite: Lsp, graph: TrainingGraph, batch_size: int, times: ProductTimes | None
) -> CompressionChoice:
    shapes = []
    for term in gradient.terms:
        shape = compression_shape(gradient, term, rewrite, graph)
        rows = int(shape.rows.subs(dict.fromkeys(shape.rows.free_symbols, batch_size)))
        shapes.append(replace(shape, rows=rows))
    if not shapes:  # in this call of the model it is computed in another way: it is formed, and compressed as it is
        whole = CompressionShape(*gradient.shape, 0, rewrite.subspace, rewrite.nonzeros)
        return CompressionChoice(gradient.name, "formed", order_flops("formed", whole), 0, None)
    flops = {order: sum(order_flops(order, s) for s in shapes) for order in ORDERS}
    if times is None:
        order, seconds = rewrite.order or min(ORDERS, key=lambda o: flops[o]), None
    else:
        compared = ORDERS if rewrite.order is None else {rewrite.order, "formed"}
        cost = {order: sum(_seconds(order, s, times) for s in shapes) for order in compared}
        order = rewrite.order or min(cost, key=lambda o: cost[o])
        seconds = (cost[order], cost["formed"])
    formed = sum(2 * s.m * s.n * s.rows for s in shapes)
    return CompressionChoice(gradient.name, order, flops[order], formed, seconds)


def _seconds(order: str, shape: CompressionShape, times: ProductTimes) -> float:
    dense, sparse = steps(order, shape)
    return sum(times.product(*d) for d in dense) + sum(times.combined(*c) for c in sparse)


def compression_shape(gradient: WeightGradient, term: Matrix, rewrite: Lsp, graph: TrainingGraph) -> CompressionShape:
    """The sizes of one product, rows as a formula of the batch."""
    rows = graph.formula(term.leaf.all_input_nodes[0].meta["val"].shape[1])
    return CompressionShape(*gradient.shape, rows, rewrite.subspace, rewrite.nonzeros)


def smaller_gradients(graph: TrainingGraph, rewrite: Lsp) -> dict[str, Smaller]:
    """The compressed gradient with its projectors of every weight that can have one."""
    found = {}
    for gradient in find_weight_gradients(graph):
        if rewrite.refusal(gradient):
            continue
        width = max(4, gradient.node.meta["val"].element_size())  # half precision is compressed in float32
        each = width if rewrite.nonzeros == rewrite.subspace else 2 * width + 3 * 4  # values twice, three places of each
        projectors = sum(gradient.shape) * rewrite.nonzeros * each
        shapes = [compression_shape(gradient, term, rewrite, graph) for term in gradient.terms]
        flops = min(_flops(order, shapes, graph) for order in ORDERS)
        found[gradient.name] = Smaller(projectors + rewrite.subspace**2 * width, flops)
    return found


def fewest_flops(gradient: WeightGradient, rewrite: Lsp, graph: TrainingGraph) -> str:
    """The order with the fewest FLOPs at the captured batch size."""
    shapes = [compression_shape(gradient, term, rewrite, graph) for term in gradient.terms]
    return min(ORDERS, key=lambda order: _flops(order, shapes, graph))


def _flops(order: str, shapes: Sequence[CompressionShape], graph: TrainingGraph) -> int:
    """FLOPs of an order at the captured batch size."""
    return sum(int(order_flops(order, s).subs(dict.fromkeys(s.rows.free_symbols, graph.batch_size))) for s in shapes)

"""A graph that measures what sampling would do: one for every ratio, with nothing left out.

At each boundary the gradient is multiplied by a scale per sample (1 / p of those kept, 0 for the others), with the number kept as
an input. The gradients are those of the sampled step; the backward also returns the samples' norms and the variance that keeping
some terms of each weight's gradient would add (VCAS, Eq. 3).
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import graphopt.passes.vcas.ops  # noqa: F401  registers the operators
import torch
from graphopt.passes.vcas.boundaries import find_boundaries
from graphopt.passes.vcas.products import find_weight_products, linear_products
from graphopt.passes.vcas.sliced_backward import RowLevels
from torch import fx

from graphopt.analysis.batch_dims import BatchDim
from graphopt.compat import InputDesc, fake_like
from graphopt.graph import TrainingGraph, descendants
from graphopt.transforms.symbolic_zeros import for_loss_alone

aten = torch.ops.aten

COUNTS = InputDesc("given", "counts")
"""The input of rows kept: one per boundary, then one per weight's product."""


@dataclass(frozen=True)
class Probe:
    """A measuring graph.

    Attributes:
        graph: with inputs `COUNTS` and `InputDesc("random", seed)`, and slots "norms <boundary>" and "variance <weight>" that its
            backward returns.
        parents: the boundary above each boundary, from the output to the input.
        tokens: rows per sample of each weight's product, and the boundary above it.
    """

    graph: TrainingGraph
    parents: dict[str, str | None]
    tokens: dict[str, tuple[int, str | None]]


def make_probe(graph: TrainingGraph, seed: int, separable: bool = True) -> Probe:
    """The measuring graph of a joint graph with a symbolic batch; `graph` itself stays as it is.

    Args:
        separable: whether rows may be left out, and not terms of weights' gradients alone.
    """
    measured = for_loss_alone(graph).clone()
    boundaries = find_boundaries(measured) if separable else ()
    products = find_weight_products(measured) if separable else linear_products(measured)
    sites = len(boundaries) + len(products)
    example = measured.example
    counts = measured.add_input(COUNTS, fake_like(example, (sites,), torch.int64))
    uniforms = measured.add_input(InputDesc("random", seed), fake_like(example, (2 * sites,), torch.float64))
    levels = RowLevels(measured, [], lambda *_: (counts, counts))

    def scales(weights: fx.Node, site: int, anchor: fx.Node) -> fx.Node:
        numbers = levels.emit(aten.slice.Tensor, (uniforms, 0, 2 * site, 2 * site + 2), anchor)
        count = levels.emit(aten.select.int, (counts, 0, site), anchor)
        return levels.emit(torch.ops.graphopt.row_scales.default, (weights, numbers, count), anchor)

    above: dict[fx.Node, str | None] = {}
    parents: dict[str, str | None] = {}
    for site, boundary in enumerate(boundaries):
        parents[boundary.name] = None if boundary.parent is None else boundaries[boundary.parent].name
        node, anchor, users = boundary.node, boundary.node.next, list(boundary.node.users)
        rows = levels.rows_of(node)
        norms = levels.row_norms(node, rows, anchor)
        scale = levels.emit(operator.getitem, (scales(norms, site, anchor), 0), anchor)
        scaled = levels.scale_rows(node, rows, scale, anchor)
        for user in users:
            user.replace_input_with(node, scaled)
        measured.add_backward_output(f"norms {boundary.name}", norms)
        above |= dict.fromkeys(descendants([scaled]), boundary.name)
    tokens = {}
    for site, product in enumerate(products, start=len(boundaries)):
        node = product.node
        weights = _weights(levels, node)
        variance = levels.emit(operator.getitem, (scales(weights, site, node), 1), node)
        measured.add_backward_output(f"variance {product.name}", variance)
        tokens[product.name] = (product.tokens, above.get(node))
    measured.module.recompile()
    return Probe(measured, parents, tokens)


def _weights(levels: RowLevels, product: fx.Node) -> fx.Node:
    """|dZ_i| |Z_i| of each term of a product."""
    operands = ((product.args[0], 1), (product.args[1], 0))
    sizes = tuple(levels.row_norms(n, BatchDim(dim, 1), product) for n, dim in operands)  # type: ignore[arg-type]
    return levels.emit(aten.mul.Tensor, sizes, product)

"""Row sampling in the backward (VCAS, section 4).

SampleA: at a boundary between blocks, rows (samples) of the gradient are kept with probability p_i proportional to their norm
and scaled by 1 / p_i; everything below runs on the kept rows alone. SampleW: of the sum over rows dW = dZ'Z of a linear layer,
rows are kept with q_i proportional to |dZ_i| |Z_i|. With p and q capped at one, the variance that this adds is
sum (1 / p_i - 1) |G_i|^2 and sum (1 / q_i - 1) |dZ_i|^2 |Z_i|^2 (Eq. 3).

Preserves: UNBIASED. Kept in full (every ratio 1), the graph is not touched.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import graphopt.passes.vcas.ops  # noqa: F401  registers the operators
import torch
from graphopt.passes.base import Changes
from graphopt.passes.vcas.boundaries import Boundary, find_boundaries
from graphopt.passes.vcas.products import WeightProduct, find_weight_products
from graphopt.passes.vcas.sliced_backward import Cut, RowLevels
from torch import fx

from graphopt.analysis.batch_dims import BatchDim
from graphopt.compat import InputDesc, fake_like
from graphopt.graph import TrainingGraph
from graphopt.transforms.symbolic_zeros import for_loss_alone

aten = torch.ops.aten

ROWS, TOKENS = "rows: ", "tokens: "
"""Sites are named by these and the block, or the weight."""


def sample(graph: TrainingGraph, ratios: Mapping[str, float], draws: Draws | GivenDraws) -> Changes:
    """Sample a graph in place; see `Vcas.apply`."""
    alone = for_loss_alone(graph)
    boundaries, all_products = find_boundaries(alone), find_weight_products(alone)
    products = {p.node: p for p in all_products if ratios.get(TOKENS + p.name, 1.0) < 1}
    cuts, cut_names = plan_cuts(boundaries, ratios, graph.batch_size, draws.resample)
    changed = [ROWS + name for name in cut_names]

    def sample_product(levels: RowLevels, node: fx.Node, level: int | None) -> None:
        product = products.get(node)
        if product is not None and _sample_tokens(levels, product, level, ratios[TOKENS + product.name], draws):
            changed.append(TOKENS + product.name)

    if cuts or products:
        graph.module, graph.inputs, graph.refused = alone.module, alone.inputs, alone.refused
        RowLevels(graph, cuts, draws.rows).apply(sample_product)
        graph.module.recompile()
    sites = [ROWS + b.name for b in boundaries] + [TOKENS + p.name for p in all_products]
    left = {name: "kept in full" for name in sites if name not in changed}
    return Changes(tuple(changed), left)


def plan_cuts(
    boundaries: Sequence[Boundary], ratios: Mapping[str, float], batch_size: int, resample: bool
) -> tuple[list[Cut], list[str]]:
    """Rows to keep at each boundary, as cuts and the boundaries' names.

    A boundary keeps at least two rows (torch treats a batch of one as another kind of batch) and at most as many as the one above
    it; one that keeps as many draws nothing.

    Args:
        resample: boundaries that keep every row draw, too.
    """
    cuts: list[Cut] = []
    names: list[str] = []
    at: dict[int, int | None] = {}
    for i, boundary in enumerate(boundaries):
        parent = None if boundary.parent is None else at[boundary.parent]
        above = batch_size if parent is None else cuts[parent].count
        count = max(2, math.ceil(ratios.get(ROWS + boundary.name, 1.0) * batch_size - 1e-9))
        if count >= above and not resample:
            at[i] = parent
            continue
        at[i] = len(cuts)
        cuts.append(Cut(boundary.node, min(count, above), parent))
        names.append(boundary.name)
    return cuts, names


def _sample_tokens(levels: RowLevels, product: WeightProduct, level: int | None, ratio: float, draws: Draws | GivenDraws) -> bool:
    """Keep some rows of a product's sum; whether there were more."""
    node = product.node
    available = levels.count(level) * product.tokens
    count = max(1, math.ceil(ratio * available - 1e-9))
    if count >= available:
        return False
    operands = []
    for dim, (here, before) in enumerate(zip(node.args, levels.original_args[node], strict=True)):
        assert isinstance(here, fx.Node)
        assert isinstance(before, fx.Node)
        of_level = before in levels.cone or not levels.by_sample(before)
        operands.append(_Operand(here if of_level else before, 1 - dim, of_level))
    norms = [operand.norms(levels, product.tokens, level, node) for operand in operands]
    weights = levels.emit(aten.mul.Tensor, tuple(norms), node)
    positions, scale = draws.rows(levels, weights, count, node)
    # Half of the factor 1 / q on each operand: their product stays as it is, and neither overflows in half precision.
    root = levels.emit(aten.sqrt.default, (scale,), node)
    in_batch = positions if level is None else _positions_in_batch(levels, positions, product.tokens, level, node)
    kept = []
    for operand in operands:
        rows = operand.take(levels, positions if operand.of_level else in_batch, node)
        kept.append(levels.scale_rows(rows, BatchDim(operand.dim, 1), root, node))
    node.args = tuple(kept)
    return True


@dataclass(frozen=True)
class _Operand:
    """A factor of a weight's product: the gradient on the rows of its level, the activation on those of the whole batch.

    Attributes:
        dim: the dimension that is summed over.
        of_level: it has the rows of the level, as a gradient has, and activations whose samples are not one after the other.
    """

    node: fx.Node
    dim: int
    of_level: bool

    def norms(self, levels: RowLevels, tokens: int, level: int | None, anchor: fx.Node) -> fx.Node:
        """Norm of each row of the level; an activation's are found in the forward, where it is at hand."""
        dtype = torch.float64 if self.node.meta["val"].dtype == torch.float64 else torch.float32
        norms = levels.row_norms(self.node, BatchDim(self.dim, 1), anchor, dtype)
        if level is None or self.of_level:
            return norms
        return levels.take(norms, BatchDim(0, tokens), levels.rows[level], anchor)

    def take(self, levels: RowLevels, positions: fx.Node, anchor: fx.Node) -> fx.Node:
        """Some rows."""
        if self.dim == 0:
            return levels.take(self.node, BatchDim(0, 1), positions, anchor)
        return _take_columns(levels, self.node, positions, anchor)


def _positions_in_batch(levels: RowLevels, positions: fx.Node, tokens: int, level: int, anchor: fx.Node) -> fx.Node:
    """Where rows of a level are among all rows of the batch."""
    if tokens == 1:
        return levels.emit(aten.index_select.default, (levels.rows[level], 0, positions), anchor)
    sample = levels.emit(aten.div.Tensor_mode, (positions, tokens), anchor, {"rounding_mode": "floor"})
    token = levels.emit(aten.remainder.Scalar, (positions, tokens), anchor)
    sample = levels.emit(aten.index_select.default, (levels.rows[level], 0, sample), anchor)
    start = levels.emit(aten.mul.Tensor, (sample, tokens), anchor)
    return levels.emit(aten.add.Tensor, (start, token), anchor)


def _take_columns(levels: RowLevels, node: fx.Node, positions: fx.Node, anchor: fx.Node) -> fx.Node:
    """Columns of a matrix; of a transposed one its rows, which lie together in memory."""
    swapped = node.target is aten.permute.default and list(node.args[1]) == [1, 0]  # type: ignore[arg-type]
    transposed = node.target is aten.t.default or swapped
    if not transposed:
        return levels.emit(aten.index_select.default, (node, 1, positions), anchor)
    rows = levels.emit(aten.index_select.default, (node.args[0], 0, positions), anchor)
    return levels.emit(aten.t.default, (rows,), anchor)


class Draws:
    """Draws rows inside the graph, from an input of uniform numbers."""

    resample = False

    def __init__(self, graph: TrainingGraph, seed: int) -> None:
        self.graph = graph
        self.seed = seed
        self.used = 0
        self.uniforms: fx.Node | None = None

    def rows(self, levels: RowLevels, weights: fx.Node, count: int, anchor: fx.Node) -> tuple[fx.Node, fx.Node]:
        """Positions of the kept rows and their scale."""
        args = (weights, self._numbers(levels, anchor), count)
        drawn = levels.emit(torch.ops.graphopt.systematic_rows.default, args, anchor)
        return levels.emit(operator.getitem, (drawn, 0), anchor), levels.emit(operator.getitem, (drawn, 1), anchor)

    def _numbers(self, levels: RowLevels, anchor: fx.Node) -> fx.Node:
        self.used += 2
        value = fake_like(self.graph.example, (self.used,), torch.float64)
        if self.uniforms is None:
            self.uniforms = self.graph.add_input(InputDesc("random", self.seed), value)
        self.uniforms.meta["val"] = value
        return levels.emit(aten.slice.Tensor, (self.uniforms, 0, self.used - 2, self.used), anchor)


class GivenDraws:
    """Rows that the caller passes, for checks: inputs `InputDesc("given", (site, "rows" or "scale", of the whole batch))`."""

    resample = True

    def __init__(self, graph: TrainingGraph) -> None:
        self.graph = graph
        self.sites = 0

    def rows(self, levels: RowLevels, weights: fx.Node, count: int, anchor: fx.Node) -> tuple[fx.Node, fx.Node]:
        """Inputs for the positions of the kept rows and their scale."""
        value, site = weights.meta["val"], self.sites
        self.sites += 1
        whole = isinstance(value.shape[0], torch.SymInt)
        inputs = []
        for what, kind in (("rows", torch.int64), ("scale", torch.float64)):
            inputs.append(self.graph.add_input(InputDesc("given", (site, what, whole)), fake_like(value, (count,), kind)))
        return inputs[0], inputs[1]

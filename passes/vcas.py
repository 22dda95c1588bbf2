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
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from graphopt.passes.base import Changes, Pass, Preserves, Site
from graphopt.passes.technique import Planning, Technique
from torch import fx

import graphopt.ops.sampling  # noqa: F401  registers the operators
from graphopt.analysis.batch_dims import BatchDim
from graphopt.analysis.boundaries import Boundary, find_boundaries
from graphopt.analysis.weight_products import WeightProduct, find_weight_products
from graphopt.budget import Budget
from graphopt.compat import InputDesc, fake_like
from graphopt.errors import BudgetError, InputError, PassError
from graphopt.graph import TrainingGraph
from graphopt.row_levels import Cut, RowLevels
from graphopt.tangents import for_loss_alone

if TYPE_CHECKING:
    from graphopt.planner.plan import Plan
    from graphopt.runtime.module import OptimizedModule

aten = torch.ops.aten

ROWS, TOKENS = "rows: ", "tokens: "
"""Sites are named by these and the block, or the weight."""


LEFT_OUT = "the selection keeps to the FLOPs by itself, and measuring variances would cost more of them"
"""Why "auto" does not sample rows where FLOPs are limited, although the budget allows some variance."""

Ratios = tuple[tuple[str, float], ...]
"""(site, part of its rows kept) where that is less than all, sorted."""


@dataclass(frozen=True)
class SampleSizes:
    """Ratios that a controller has found, for batches of one size; others are computed exactly.

    Attributes:
        ratios: by site; sites that are not named are kept in full.
        batch_size: samples of those batches.
    Raises:
        InputError: a ratio or a size that no batch can have, as a damaged file may.
    """

    ratios: Ratios = ()
    batch_size: int = 0

    def __post_init__(self) -> None:
        if self.batch_size < 0 or not all(0 < ratio <= 1 for _, ratio in self.ratios):
            raise InputError("the ratios of vcas are not all above 0 and at most 1.")

    @property
    def key(self) -> Hashable:
        """See `Decision`."""
        return self.ratios


@dataclass(frozen=True)
class Vcas(Technique):
    """The sampler.

    Attributes:
        keep_rows: part of the batch kept (rho): for all boundaries, or one number for each from the output to the input. None:
            under `Budget(variance=...)` a controller adapts it, starting from 1.
        keep_tokens: part of the rows kept in each weight's gradient (nu): for all, or by parameter name. None: as `keep_rows`.
        sampler: "systematic" keeps an exact number of rows; "bernoulli" (the paper's) draws each by itself, and has room for
            three standard deviations more than expected.
        seed: of the generator that rows are drawn with.
        every: steps between adaptations (F); the paper's advice is at most 1/50 of all steps, and no more than 500.
        alpha, beta: how fast an adaptation changes the rows' and the tokens' ratios.
    Raises:
        PassError: a ratio outside (0, 1], ratios that increase towards the input, or an unknown sampler.
    """

    keep_rows: float | tuple[float, ...] | None = None
    keep_tokens: float | Mapping[str, float] | None = None
    sampler: str = "systematic"
    seed: int = 0
    every: int = 100
    alpha: float = 0.01
    beta: float = 0.95
    name = "vcas"
    preserves = Preserves.UNBIASED
    serves = ("variance",)
    decides = SampleSizes

    def __post_init__(self) -> None:
        if self.sampler not in ("systematic", "bernoulli"):
            raise PassError(f"sampler={self.sampler!r}: use 'systematic' or 'bernoulli'.")
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise PassError(f"every={self.every!r} must be at least 1 step.")
        for name, rate in (("alpha", self.alpha), ("beta", self.beta)):
            if not (isinstance(rate, (int, float)) and 0 < rate < 1):
                raise PassError(f"{name}={rate!r} must be a number between 0 and 1.")
        if isinstance(self.keep_rows, Sequence) and not isinstance(self.keep_rows, str) and self.keep_rows:
            object.__setattr__(self, "keep_rows", tuple(self.keep_rows))
        rows = self.keep_rows if isinstance(self.keep_rows, tuple) else (self.keep_rows,)
        tokens = self.keep_tokens.values() if isinstance(self.keep_tokens, Mapping) else (self.keep_tokens,)
        for name, ratios in (("keep_rows", rows), ("keep_tokens", tokens)):
            for ratio in ratios:
                number = isinstance(ratio, (int, float)) and not isinstance(ratio, bool)
                if ratio is not None and not (number and 0 < ratio <= 1):
                    raise PassError(f"{name}={ratio!r} must be a number above 0 and at most 1.")
        if isinstance(self.keep_rows, tuple) and list(self.keep_rows) != sorted(self.keep_rows, reverse=True):
            raise PassError(f"keep_rows={self.keep_rows}: ratios must not increase from the output to the input.")

    @property
    def adaptive(self) -> bool:
        """Whether a controller is to find the ratios."""
        return self.keep_rows is None and self.keep_tokens is None

    def check(self, budget: Budget, passes: Sequence[Pass]) -> None:
        """See that either the ratios are given or the variance is."""
        if not self.adaptive and budget.variance is not None:
            raise BudgetError("vcas has fixed ratios, so that budget variance cannot be met: leave out one of the two.")
        if self.adaptive and budget.variance is None:
            raise PassError("vcas needs keep_rows or keep_tokens, or a Budget(variance=...) to adapt them to.")

    @classmethod
    def wanted(cls, budget: Budget) -> bool | str:
        """See `Technique`."""
        return budget.variance is not None and (budget.flops is None or LEFT_OUT)

    def after_selection(self, plan: Plan, planning: Planning) -> Plan:
        """The plan, knowing whether the backward can be sampled.

        Raises:
            PassError: it cannot, although the caller asked for it by stating ratios; or they do not fit the model.
        """
        reason = planning.mixing(plan)
        if not self.adaptive:
            if reason:
                remedy = "Pass an example of at least 2 samples" if planning.graph.batch_size == 1 else "Remove the vcas pass"
                raise PassError(f"rows of this model's backward cannot be sampled: {reason}. {remedy}.")
            self.ratios(plan.before_sampling().rewrite(planning.graph)[0])
        return replace(plan, mixing=reason)

    def found(self, plan: Plan) -> SampleSizes:
        """What a controller has decided."""
        decided: SampleSizes = plan.decisions.get(self.name, SampleSizes())
        return decided

    def decide(self, plan: Plan, captured: TrainingGraph, graph: TrainingGraph) -> tuple[dict[str, float], tuple[()]]:
        """The ratios by site; none where the backward cannot be sampled."""
        if plan.mixing or plan.measures or not graph.symbolic:
            return {}, ()
        if not self.adaptive:
            return self.ratios(graph), ()
        found = self.found(plan)
        if graph.batch_size != found.batch_size:
            return {}, ()
        known = {site.name for site in self.applicable(graph)}  # another selection may have fewer sites
        return {name: ratio for name, ratio in found.ratios if name in known}, ()

    def reselected(self, plan: Plan, graph: TrainingGraph, mixing: Callable[[Plan], str]) -> Plan:
        """The plan without ratios: another selection has other boundaries. Until the next calibration every row is kept."""
        return replace(plan.decided(self.name, SampleSizes()), mixing=mixing(plan) if graph.symbolic else plan.mixing)

    def leaves_out(self, plan: Plan) -> bool:
        """See `Technique`; a step that measures never does."""
        return not plan.measures and (not self.adaptive or bool(self.found(plan).ratios))

    def for_batch(self, plan: Plan, batch_size: int) -> Plan:
        """Ratios that were measured hold for one size alone."""
        found = self.found(plan)
        return plan.decided(self.name, SampleSizes()) if found.ratios and found.batch_size != batch_size else plan

    def start(self, opt: OptimizedModule) -> None:
        """Have a controller find the ratios."""
        from graphopt.runtime.sampling import SamplingController

        if self.adaptive and opt.budget.variance is not None:
            opt.control(SamplingController(opt, self, opt.budget.variance))

    def applicable(self, graph: TrainingGraph) -> list[Site]:
        """Every boundary and every weight's product; none where the batch is not symbolic."""
        if not graph.symbolic:
            return []
        graph = for_loss_alone(graph)
        boundaries = [Site(ROWS + b.name) for b in find_boundaries(graph)]
        return boundaries + [Site(TOKENS + p.name) for p in find_weight_products(graph)]

    def ratios(self, graph: TrainingGraph) -> dict[str, float]:
        """The ratio of every site, as this pass was given them.

        Raises:
            PassError: not as many ratios as boundaries, or an unknown weight.
        """
        sites = [site.name for site in self.applicable(graph)]
        rows = [name for name in sites if name.startswith(ROWS)]
        tokens = [name for name in sites if name.startswith(TOKENS)]
        given = self.keep_rows if isinstance(self.keep_rows, tuple) else (self.keep_rows or 1.0,) * len(rows)
        if rows and len(given) != len(rows):
            names = ", ".join(name.removeprefix(ROWS) for name in rows)
            raise PassError(f"keep_rows has {len(given)} ratios for {len(rows)} boundaries, from the output: {names}.")
        if isinstance(self.keep_tokens, Mapping):
            unknown = sorted({TOKENS + name for name in self.keep_tokens} - set(tokens))
            if unknown:
                raise PassError(f"keep_tokens names no weight of a linear layer: {', '.join(unknown)}.")
            by_name = self.keep_tokens
            kept = [by_name.get(name.removeprefix(TOKENS), 1.0) for name in tokens]
        else:
            kept = [self.keep_tokens or 1.0] * len(tokens)
        return dict(zip([*rows, *tokens], [*given, *kept], strict=False))

    def apply(self, graph: TrainingGraph, decisions: Mapping[str, float] | Collection[str]) -> Changes:
        """Sample at each site in `decisions` with its ratio there, or, where only names are given, with this pass's own.

        The number of rows follows from `graph.batch_size`: the result holds for that batch alone.

        Raises:
            PassError: an unknown site, or an operator below a boundary that mixes samples.
        """
        own = self.ratios(graph)
        unknown = sorted(set(decisions) - set(own))
        if unknown:
            raise PassError(f"nothing to sample at {', '.join(unknown)}.")
        ratios = dict(decisions) if isinstance(decisions, Mapping) else {name: own[name] for name in decisions}
        return sample(graph, ratios, _Draws(graph, self.sampler, self.seed))


def sample(graph: TrainingGraph, ratios: Mapping[str, float], draws: _Draws | GivenDraws) -> Changes:
    """Sample a graph in place; see `Vcas.apply`."""
    before = len(graph.graph.nodes)
    alone = for_loss_alone(graph)
    boundaries, all_products = find_boundaries(alone), find_weight_products(alone)
    products = {p.node: p for p in all_products if ratios.get(TOKENS + p.name, 1.0) < 1}
    cuts, cut_names = plan_cuts(boundaries, ratios, graph.batch_size, draws.room, draws.resample)
    changed = [ROWS + name for name in cut_names]

    def sample_product(levels: RowLevels, node: fx.Node, level: int | None) -> None:
        product = products.get(node)
        if product is not None and _sample_tokens(levels, product, level, ratios[TOKENS + product.name], draws):
            changed.append(TOKENS + product.name)

    if cuts or products:
        graph.module, graph.inputs, graph.refused = alone.module, alone.inputs, alone.refused
        RowLevels(graph, cuts, draws.rows).apply(sample_product)
        draws.finish()
        graph.module.recompile()
    sites = [ROWS + b.name for b in boundaries] + [TOKENS + p.name for p in all_products]
    left = {name: "kept in full" for name in sites if name not in changed}
    return Changes(tuple(changed), left, before - len(graph.graph.nodes))


def plan_cuts(
    boundaries: Sequence[Boundary],
    ratios: Mapping[str, float],
    batch_size: int,
    room: Callable[[int, int], int] = lambda count, _: count,
    resample: bool = False,
) -> tuple[list[Cut], list[str]]:
    """Rows to keep at each boundary, as cuts and the boundaries' names.

    A boundary keeps at least two rows (torch treats a batch of one as another kind of batch) and at most as many as the one above
    it; one that keeps as many draws nothing.

    Args:
        room: places for so many expected rows among so many.
        resample: boundaries that keep every row draw, too.
    """
    cuts: list[Cut] = []
    names: list[str] = []
    at: dict[int, int | None] = {}
    for i, boundary in enumerate(boundaries):
        parent = None if boundary.parent is None else at[boundary.parent]
        above = batch_size if parent is None else cuts[parent].count
        expected = max(2, math.ceil(ratios.get(ROWS + boundary.name, 1.0) * batch_size - 1e-9))
        if expected >= above and not resample:
            at[i] = parent
            continue
        at[i] = len(cuts)
        expected = min(expected, above)
        cuts.append(Cut(boundary.node, room(expected, above), expected, parent))
        names.append(boundary.name)
    return cuts, names


def _sample_tokens(
    levels: RowLevels, product: WeightProduct, level: int | None, ratio: float, draws: _Draws | GivenDraws
) -> bool:
    """Keep some rows of a product's sum; whether there were more."""
    node = product.node
    available = levels.count(level) * product.tokens
    expected = max(1, math.ceil(ratio * available - 1e-9))
    if expected >= available:
        return False
    operands = []
    for dim, (here, before) in enumerate(zip(node.args, levels.original_args[node], strict=True)):
        assert isinstance(here, fx.Node)
        assert isinstance(before, fx.Node)
        operands.append(_Operand(here if before in levels.cone else before, 1 - dim, before in levels.cone))
    norms = [operand.norms(levels, product.tokens, level, node) for operand in operands]
    weights = levels.emit(aten.mul.Tensor, tuple(norms), node)
    positions, scale = draws.rows(levels, weights, expected, draws.room(expected, available), node)
    # Half of the factor 1 / q on each operand: their product stays as it is, and neither overflows in half precision.
    root = levels.emit(aten.sqrt.default, (scale,), node)
    in_batch = positions if level is None else _positions_in_batch(levels, positions, product.tokens, level, node)
    kept = []
    for operand in operands:
        rows = operand.take(levels, positions if operand.is_gradient else in_batch, node)
        kept.append(levels.scale_rows(rows, BatchDim(operand.dim, 1), root, node))
    node.args = tuple(kept)
    return True


@dataclass(frozen=True)
class _Operand:
    """A factor of a weight's product: the gradient on the rows of its level, the activation on those of the whole batch.

    Attributes:
        dim: the dimension that is summed over.
    """

    node: fx.Node
    dim: int
    is_gradient: bool

    def norms(self, levels: RowLevels, tokens: int, level: int | None, anchor: fx.Node) -> fx.Node:
        """Norm of each row of the level; an activation's are found in the forward, where it is at hand."""
        dtype = torch.float64 if self.node.meta["val"].dtype == torch.float64 else torch.float32
        norms = levels.row_norms(self.node, BatchDim(self.dim, 1), anchor, dtype)
        if level is None or self.is_gradient:
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
    transposed = node.target is aten.t.default or (node.target is aten.permute.default and list(node.args[1]) == [1, 0])  # type: ignore[arg-type]
    if not transposed:
        return levels.emit(aten.index_select.default, (node, 1, positions), anchor)
    rows = levels.emit(aten.index_select.default, (node.args[0], 0, positions), anchor)
    return levels.emit(aten.t.default, (rows,), anchor)


def places(sampler: str, expected: int, available: int) -> int:
    """Places for the rows that are drawn: three standard deviations more than expected, where draws are independent.

    Args:
        sampler: see `Vcas`.
        expected, available: rows that are drawn on average, and among how many.
    """
    return expected if sampler == "systematic" else min(available, math.ceil(expected + 3 * math.sqrt(expected)))


class _Draws:
    """Draws rows inside the graph, from an input of uniform numbers."""

    resample = False

    def __init__(self, graph: TrainingGraph, sampler: str, seed: int) -> None:
        self.graph = graph
        self.sampler = sampler
        self.seed = seed
        self.used = 0
        self.uniforms: fx.Node | None = None

    def room(self, expected: int, available: int) -> int:
        """See `places`."""
        return places(self.sampler, expected, available)

    def rows(self, levels: RowLevels, weights: fx.Node, expected: int, count: int, anchor: fx.Node) -> tuple[fx.Node, fx.Node]:
        """Positions of the kept rows and their scale."""
        if self.sampler == "systematic":
            args: tuple[Any, ...] = (weights, self._numbers(levels, 2, anchor), count)
            drawn = levels.emit(torch.ops.graphopt.systematic_rows.default, args, anchor)
        else:
            available = self.graph.at(weights.meta["val"].shape[0], self.graph.batch_size)
            args = (weights, self._numbers(levels, 2 * available, anchor), expected, count)
            drawn = levels.emit(torch.ops.graphopt.bernoulli_rows.default, args, anchor)
        return levels.emit(operator.getitem, (drawn, 0), anchor), levels.emit(operator.getitem, (drawn, 1), anchor)

    def _numbers(self, levels: RowLevels, count: int, anchor: fx.Node) -> fx.Node:
        if self.uniforms is None:
            example = self.graph.example
            self.uniforms = self.graph.add_input(InputDesc("random", self.seed), fake_like(example, (2**40,), torch.float64))
        start = self.used
        self.used += count
        return levels.emit(aten.slice.Tensor, (self.uniforms, 0, start, start + count), anchor)

    def finish(self) -> None:
        """Record how many numbers a step needs."""
        if self.uniforms is not None:
            self.uniforms.meta["val"] = fake_like(self.uniforms.meta["val"], (self.used,), torch.float64)


class GivenDraws:
    """Rows that the caller hands over, for checks: inputs `InputDesc("given", (site, "rows" or "scale", of the whole batch))`."""

    resample = True

    def __init__(self, graph: TrainingGraph) -> None:
        self.graph = graph
        self.sites = 0

    def room(self, expected: int, available: int) -> int:
        """As many places as rows."""
        return expected

    def rows(self, levels: RowLevels, weights: fx.Node, expected: int, count: int, anchor: fx.Node) -> tuple[fx.Node, fx.Node]:
        """Inputs for the positions of the kept rows and their scale."""
        value, site = weights.meta["val"], self.sites
        self.sites += 1
        whole = isinstance(value.shape[0], torch.SymInt)
        inputs = []
        for what, kind in (("rows", torch.int64), ("scale", torch.float64)):
            inputs.append(self.graph.add_input(InputDesc("given", (site, what, whole)), fake_like(value, (count,), kind)))
        return inputs[0], inputs[1]

    def finish(self) -> None:
        """Nothing is left to do."""

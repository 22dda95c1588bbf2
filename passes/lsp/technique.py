"""Compressed weight gradients: P'GQ instead of G (LSP-Offload, section 4.1).

For a weight W (m x n) with gradient G, the graph returns g = P'GQ (s x s), as the gradient of a matrix D (s x s) that is zero
and would stand in W + PDQ'. G is a sum of products AB over N rows, so that g can be computed as (P'A)(BQ), without an (m x n)
matrix anywhere; which order costs least is chosen by `graphopt.passes.lsp.choose`. The optimizer steps D and adds PDQ' to W
(`graphopt.passes.lsp.optimizer`).

Preserves: PROJECTED. g equals P'GQ of autograd's G to rounding; every other gradient is exact.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from graphopt.passes.base import Changes, PassReport, Preserves, Site
from graphopt.passes.fields import require_names, require_number, require_one_of, require_seed, require_whole
from graphopt.passes.lsp.choose import ORDERS, choose_compressions, fewest_flops, smaller_gradients
from graphopt.passes.lsp.compressor import Compressor, Exchange, Part, gated, given_inputs
from graphopt.passes.lsp.projectors import draw_subspace
from graphopt.passes.lsp.weight_gradients import WeightGradient, find_weight_gradients
from graphopt.passes.state import State
from graphopt.passes.technique import Found, Offers, Planning, Section, Technique, left_alone
from torch import Tensor

from graphopt.compat import InputDesc
from graphopt.errors import PassError
from graphopt.graph import TrainingGraph
from graphopt.planner.product_times import product_times

if TYPE_CHECKING:
    from graphopt.planner.plan import Plan
    from graphopt.runtime.module import OptimizedModule


@dataclass(frozen=True)
class Compressed:
    """Which gradients are compressed, and to whom they go; the numbers are those of `new_receiver`, in one process.

    Attributes:
        weights: always the same ones once they are `settled`, since an optimizer holds their state.
        settled: the plan is made.
        gates: the receiver of gates, where updates are applied in the forward; see `gated`.
        checking: the receiver to which a step hands the full gradients, where it does not compress them itself.
    """

    weights: tuple[str, ...]
    settled: bool = False
    gates: int | None = None
    checking: int | None = None

    @property
    def key(self) -> Hashable:
        """See `Decision`. While a plan is looked for, the weights differ from one to the next."""
        return self.weights, self.gates, self.checking


@dataclass(frozen=True)
class Lsp(Technique):
    """The compression.

    Attributes:
        subspace: s, the size of the compressed gradient.
        nonzeros: d, entries per row of the projectors; as many as `subspace`: dense ones, which represent more of the gradients,
            for s numbers per row in memory where sparse ones take 5 d.
        weights: names of the matrices to compress; None: every one whose gradient is a sum of matrix products and that is not
            smaller than `subspace`; (): those alone for which `Budget(memory=...)` leaves no other way.
        order: one of `ORDERS` for all; None: the planner chooses for each.
        criterion: what the planner minimises: "time" (measured) or "flops".
        check_every: steps after which the projectors are compared with the gradients of a batch; they are at the first step.
        batches: whose gradients a check gathers, at most `check_every`. All but the last are summed on the host, which takes the
            weights' memory once more, and projectors learned from them (`learning`); the last shows how well. 1:
            learned from what is compared.
        threshold: relative error |PP'GQQ' - G| / |G| from which they are learned anew.
        iterations: by which what is learned is fitted further, at most, as long as that helps.
        seed: of the random projectors.
        schedule: "sequential": the optimizer's step copies, updates and applies, one weight after another; "layerwise": copies
            and updates start in the backward, and updates are applied in the next forward, where they are needed.
    Raises:
        PassError: a value outside its range.
    """

    subspace: int = 512
    nonzeros: int = 16
    weights: tuple[str, ...] | None = None
    order: str | None = None
    criterion: str = "time"
    check_every: int = 1000
    batches: int = 1
    threshold: float = 0.5
    iterations: int = 100
    seed: int = 0
    schedule: str = "sequential"
    name = "lsp"
    preserves = Preserves.PROJECTED
    serves = ()

    def __post_init__(self) -> None:
        for field in ("subspace", "nonzeros", "check_every", "batches", "iterations"):
            require_whole(self, field)
        if self.nonzeros > self.subspace:
            raise PassError(
                f"{self.name}: nonzeros={self.nonzeros} is more than subspace={self.subspace}: a row of a projector has at most "
                "one entry per column. Use fewer nonzeros or a larger subspace."
            )
        require_number(self, "threshold", lambda value: value > 0, "above 0: a relative error, for instance 0.5")
        if self.order is not None:
            require_one_of(self, "order", ORDERS)
        require_names(self, "weights")
        require_seed(self)
        require_one_of(self, "schedule", ("sequential", "layerwise"))
        require_one_of(self, "criterion", ("time", "flops"))

    @property
    def apart(self) -> str:
        """See `Technique`."""
        if self.schedule == "sequential":
            return ""
        return f"schedule={self.schedule!r} hands gradients to the host before they are averaged; use schedule='sequential'"

    @property
    def measures_machine(self) -> bool:
        """See `Technique`."""
        return self.criterion == "time" and self.order is None

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
        if gradient.node.meta["val"].is_complex():
            return "its numbers are complex, and projectors are real"
        if gradient.other:
            return f"it is not a sum of matrix products ({gradient.other})"
        if min(gradient.shape) < self.subspace:
            return f"{gradient.shape[0]} x {gradient.shape[1]} is smaller than subspace={self.subspace}"
        return ""

    def offers(self, plan: Plan, graph: TrainingGraph) -> Offers:
        """See `Technique`; where weights were named, all of these are compressed anyway."""
        decided = self._decided(plan)
        if self.weights != () or decided.settled:
            return Offers(held=frozenset(decided.weights))
        return Offers(smaller=smaller_gradients(graph, self), kept_value=max(1 - self.threshold**2, 0.05))

    @classmethod
    def offered(cls, graph: TrainingGraph) -> Lsp | None:
        """With a quarter of the widest matrix, at most the paper's 512; dense if that takes no more memory than 16 non-zeros."""
        widest = max((min(p.shape) for p in graph.trainable if len(p.shape) == 2), default=0)
        if widest < 32:
            return None
        size = min(512, 2 ** int(math.log2(widest / 4)))
        return cls(subspace=size, nonzeros=size if size <= 5 * 16 else 16, weights=(), criterion="flops")

    def adopt(self, plan: Plan, found: Found) -> Plan:
        """See `Technique`."""
        chosen = self.weights != () or self._decided(plan).settled
        return plan if chosen else plan.decided(self.name, Compressed(found.smaller))

    def _decided(self, plan: Plan) -> Compressed:
        decided: Compressed = plan.decisions.get(self.name, Compressed(()))
        return decided

    def after_selection(self, plan: Plan, planning: Planning) -> Plan:
        """The plan with the weights whose gradient is compressed whenever it is computed, whatever is selected and sampled later.

        Raises:
            PassError: there is none; or the tensors to train were given, and a weight that was named, or every weight, is not
                among them.
        """
        if self.weights == ():
            return plan.decided(self.name, replace(self._decided(plan), settled=True))
        names = tuple(site.name for site in self.applicable(planning.graph))
        if plan.train is None or plan.selection is not None:  # a selection may change: whatever it may train has a subspace
            return plan.decided(self.name, Compressed(names, settled=True))
        trained = tuple(name for name in names if name in plan.train)
        if not trained or (self.weights is not None and trained != names):
            cut = next(name for name in names if name not in plan.train)
            raise PassError(
                f"lsp cannot compress the gradient of {cut}: greentrainer does not train it. Train it, or leave it out."
            )
        return plan.decided(self.name, Compressed(trained, settled=True))

    def decide(
        self, plan: Plan, captured: TrainingGraph, graph: TrainingGraph
    ) -> tuple[dict[str, str | Exchange], tuple[Any, ...]]:
        """The order of each product; a gradient that a pass turned into something else than a sum of products is formed."""
        mine = plan.decisions.get(self.name)
        names = tuple(site.name for site in self.applicable(captured)) if mine is None else mine.weights
        computed = graph.gradients()
        wanted = [name for name in names if name in computed]
        if mine is not None and mine.checking is not None:
            return {name: Exchange(mine.checking, names.index(name)) for name in wanted}, ()
        choices = choose_compressions(graph, self, wanted, product_times)
        return {name: choices[name].order for name in wanted}, tuple(choices.values())

    def finish(self, plan: Plan, graph: TrainingGraph) -> TrainingGraph:
        """The graph that waits for updates where it reads weights, if these are applied in the forward."""
        mine = plan.decisions.get(self.name)
        if mine is None or mine.gates is None or mine.checking is not None:
            return graph
        return gated(graph, mine.weights, mine.gates)

    def section(
        self, plan: Plan, graph: TrainingGraph, reports: Sequence[PassReport], ran: Sequence[PassReport], state: State | None
    ) -> Section:
        """Per weight ("compressed") how its gradient is compressed, and how well its projectors represent it."""
        from graphopt.passes.lsp.subspaces import Subspaces

        found = []
        choices = [choice for report in ran if report.name == self.name for choice in report.choices]
        for choice in choices:
            fact = {**asdict(choice), "text": str(choice)}
            if isinstance(state, Subspaces):
                weight = state.weights[choice.layer]
                error = None if math.isnan(weight.error) else weight.error
                fact |= {"error": error, "fits": weight.fits, "skipped": weight.skipped}
                compared = " not compared yet" if error is None else f"' error {error:.2f} when last compared"
                fact["text"] += f"; projectors{compared}, {weight.fits} fits"
                if weight.skipped:
                    fact["text"] += f"; {weight.skipped} steps skipped: its gradient was not finite"
            found.append(fact)
        return Section(
            {"compressed": found} if found else {},
            tuple(f"compressed       {fact['text']}" for fact in found),
            left_alone=left_alone(self.name, reports, [choice.layer for choice in choices]),
            approximation=f"gradients {self.preserves.value}",
        )

    def alone(self, plan: Plan) -> Plan:
        """See `Technique`: no weight has a gate."""
        mine = plan.decisions.get(self.name)
        return plan if mine is None else plan.decided(self.name, replace(mine, gates=None))

    def start(self, opt: OptimizedModule) -> State | None:
        """Draw projectors, and have the model's gradients compressed by them; None if nothing is compressed."""
        from graphopt.passes.lsp.subspaces import Subspaces

        mine, tensors = opt.plan.decisions[self.name], opt.tensors()
        if not mine.weights:
            return None
        subspaces = Subspaces(self, {name: tensors[name] for name in mine.weights}, opt.ranks)
        opt.decide(self.name, replace(mine, gates=subspaces.gates))
        return subspaces

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
            matrix = given.get(InputDesc("given", Part(name, "matrix", side)))
            if matrix is not None:
                sides.append(matrix.t().to(gradient.dtype))
                continue
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
        rewriter = Compressor(graph, self.subspace, self.nonzeros)
        left_alone = {name: reason for name, g in gradients.items() if (reason := self.refusal(g))}
        for name in decisions:
            if name not in gradients or min(gradients[name].shape) < self.subspace:
                reason = left_alone.get(name, "it is no trained matrix of the model")
                raise PassError(f"the gradient of {name} cannot be compressed: {reason}.")
        for name, gradient in gradients.items():
            if name in decisions:
                given = decisions[name] if isinstance(decisions, Mapping) else self.order
                if isinstance(given, Exchange):
                    rewriter.exchange(gradient, given)
                else:
                    rewriter.compress(gradient, given or fewest_flops(gradient, self, graph)[0])
            else:
                left_alone.setdefault(name, "not asked for")
        rewriter.finish()
        return Changes(tuple(n for n in gradients if n in decisions), left_alone)

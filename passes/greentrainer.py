"""Dy-only backward cut (GreenTrainer, section 3, Eq. 4).

Dropping the gradient outputs of unselected tensors and removing dead code leaves exactly the backward cone sigma(m) of the
selected ones: every dW that nobody asked for disappears, and the dY chain ends at the deepest selected tensor. Activations
that only the removed nodes read are no longer saved.

With selected set m, the step costs T_fp + m . t_dw + sigma(m) . t_dy FLOPs. Preserves: EXACT for the tensors kept; the
gradient of the others is None, so that any optimizer skips them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, get_args

from graphopt.passes.base import Changes, Preserves, Site
from graphopt.passes.fields import require_names, require_one_of
from graphopt.passes.technique import Offers, Selecting, Technique

from graphopt.errors import ALL_FROZEN, PassError
from graphopt.graph import TrainingGraph
from graphopt.planner.importance import Metric

if TYPE_CHECKING:
    from graphopt.planner.plan import Plan

Rule = Literal["steepness", "capacity", "greentrainer"]
"""By what tensors are selected; see `GreenTrainer`."""


@dataclass(frozen=True)
class GreenTrainer(Technique):
    """The cut; which tensors to train is decided elsewhere (`graphopt.planner.selection`).

    Attributes:
        train: names of the parameters to train. None: the planner selects them under `Budget(flops=...)`, or
            fewer than all where `Budget(memory=...)` leaves no other way.
        rule: what the planner maximises in sum. "steepness": values by place and size, to which the norms of one batch's
            gradients add where the loss is far steeper than elsewhere; by place and size alone where the model has no loss,
            memory is limited, or gradients are not finite. "capacity": by place and size, which needs no gradients (see
            `graphopt.planner.capacity`). "greentrainer": the importance that is published, from one batch's gradients.
        metric: of `rule="greentrainer"`.
    """

    train: tuple[str, ...] | None = None
    rule: Rule = "steepness"
    metric: Metric = "loss"
    name = "greentrainer"
    preserves = Preserves.EXACT
    serves = ("flops", "memory")
    by_part = True
    unneeded = "everything is trained within the budget"

    def __post_init__(self) -> None:
        require_names(self, "train")
        require_one_of(self, "rule", get_args(Rule))
        require_one_of(self, "metric", get_args(Metric))

    def applicable(self, graph: TrainingGraph) -> list[Site]:
        """Every parameter whose gradient the graph computes."""
        return [Site(p.name) for p in graph.trainable]

    @property
    def selecting(self) -> Selecting:
        """See `Technique`."""
        return Selecting(self.train, self.rule, self.metric)

    def without_gradients(self) -> GreenTrainer:
        """See `Technique`; the rule that is published needs them."""
        return replace(self, rule="capacity") if self.rule == "steepness" else self

    def offers(self, plan: Plan, graph: TrainingGraph) -> Offers:
        """See `Technique`."""
        return Offers(leaves_untrained=self.train is None)

    @classmethod
    def offered(cls, graph: TrainingGraph) -> GreenTrainer:
        """See `Technique`."""
        return cls()

    def decide(self, plan: Plan, captured: TrainingGraph, graph: TrainingGraph) -> tuple[set[str], tuple[()]]:
        """The tensors to train.

        Raises:
            PassError: all of them are frozen.
        """
        sites = {site.name for site in self.applicable(graph)}
        kept = sites if plan.train is None else sites & plan.train
        if plan.train is not None and not kept:
            raise PassError(ALL_FROZEN)
        return kept, ()

    def apply(self, graph: TrainingGraph, decisions: Collection[str]) -> Changes:
        """Keep the gradients named in `decisions` and cut the rest.

        Raises:
            PassError: nothing would be trained, or a name has no gradient to keep.
        """
        sites = [site.name for site in self.applicable(graph)]
        unknown = sorted(set(decisions) - set(sites))
        if unknown:
            raise PassError(f"cannot train {', '.join(unknown)}: no such parameter, or it is frozen or unused.")
        if not decisions:
            raise PassError("nothing selected: keep at least one parameter.")
        cut = [name for name in sites if name not in decisions]
        for name in cut:
            graph.drop_gradient(name)
        graph.eliminate_dead_code()
        return Changes(tuple(cut), {name: "selected for training" for name in sites if name in decisions})

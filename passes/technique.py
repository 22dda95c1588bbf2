"""The hooks by which planner and runtime work with techniques that they do not know.

A pass that keeps the contract of `base` alone is a technique without decisions of its own: it rewrites every site that it finds.
One that is a `Technique` takes part in making the plan, and may have a state that lives as long as the training does.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from graphopt.passes.base import Changes, Pass, Preserves, Site
from torch import Tensor

from graphopt.budget import Budget
from graphopt.graph import TrainingGraph

if TYPE_CHECKING:
    from graphopt.planner.plan import Plan
    from graphopt.runtime.module import OptimizedModule


class Decision(Protocol):
    """What a technique has decided: a frozen dataclass of plain values, which a checkpoint can hold."""

    @property
    def key(self) -> Hashable:
        """What compiled steps depend on, as text that is the same in every process."""
        ...


@dataclass(frozen=True)
class Planning:
    """What a plan is made from.

    Attributes:
        graph: the captured joint graph.
        tensors: the model's parameters and buffers by name.
        auto: the passes were not named by the user: one that has nothing to do may leave.
        mixing: why rows of the backward must not be left out under a plan; "" if they may.
    """

    graph: TrainingGraph
    tensors: Mapping[str, Tensor]
    auto: bool
    mixing: Callable[[Plan], str]


class Technique:
    """A pass with decisions of its own; these are what it does where it says nothing else.

    No method changes what it is given.

    Attributes:
        by_part: it works on a part of a model, such as between two graph breaks, as it does on all of it.
        decides: the type of its decision, by which a checkpoint is read; None: it is decided anew and not loaded.
    """

    name: str
    preserves: Preserves
    serves: tuple[str, ...]
    by_part = False
    decides: type[Any] | None = None

    def applicable(self, graph: TrainingGraph) -> list[Site]:
        """See `Pass`."""
        raise NotImplementedError

    def apply(self, graph: TrainingGraph, decisions: Any) -> Changes:
        """See `Pass`."""
        raise NotImplementedError

    def check(self, budget: Budget, passes: Sequence[Pass]) -> None:
        """Raise `BudgetError` or `PassError` if it cannot serve a budget, or not beside other passes."""

    @classmethod
    def wanted(cls, budget: Budget) -> bool | str:
        """Whether passes="auto" uses it; a text says why it is left out although the budget would allow it.

        By default where it serves the budget, or needs none and changes nothing but the cost.
        """
        return bool(set(cls.serves) & set(budget.stated())) if cls.serves else cls.preserves is Preserves.EXACT

    def before_selection(self, plan: Plan, planning: Planning) -> Plan:
        """The plan with what it decides before it is known which tensors are trained; without itself if it has nothing to do."""
        return plan

    def after_selection(self, plan: Plan, planning: Planning) -> Plan:
        """The plan with what it decides once that is known."""
        return plan

    def reselected(self, plan: Plan, graph: TrainingGraph, mixing: Callable[[Plan], str]) -> Plan:
        """The plan after other tensors were selected; what is computed again and compressed for the memory is chosen before.

        Args:
            graph, mixing: see `Planning`.
        """
        return plan

    def measured(self, plan: Plan, graph: TrainingGraph, tensors: Mapping[str, Tensor]) -> Plan:
        """The plan with what depends on the values of the model's tensors."""
        return plan

    def decide(self, plan: Plan, captured: TrainingGraph, graph: TrainingGraph) -> tuple[Any, tuple[Any, ...]]:
        """What `apply` is to do to `graph`, by default all that it can, and how that was chosen, for reports.

        Args:
            captured: as it was before any pass.
        """
        return {site.name for site in self.applicable(graph)}, ()

    def finish(self, plan: Plan, graph: TrainingGraph) -> TrainingGraph:
        """The graph after `apply`, with what else a running step needs."""
        return graph

    def inseparable(self, graph: TrainingGraph, tensors: Mapping[str, Tensor], inputs: Sequence[Tensor]) -> str:
        """Why it cannot leave out rows of a graph's backward; "" if it can, or never does.

        Args:
            graph: as it is before any rows are left out.
            tensors: the model's parameters and buffers by name.
            inputs: a batch, in the order of `graph.batch_dims`.
        """
        return ""

    def leaves_out(self, plan: Plan) -> bool:
        """Whether it leaves out rows of the backward in steps of a plan."""
        return False

    def for_batch(self, plan: Plan, batch_size: int) -> Plan:
        """The plan for steps of so many samples."""
        return plan

    def alone(self, plan: Plan) -> Plan:
        """The plan for a step beside the training, which hands nothing to what `start` has made."""
        return plan

    def start(self, opt: OptimizedModule) -> None:
        """Give an optimised model what lives as long as the training: a controller, projectors."""

    @classmethod
    def stand_in(cls, opt: OptimizedModule) -> None:
        """Give an optimised model whose plan does without what loops find where it is used."""


@dataclass(frozen=True)
class _Own(Technique):
    """A pass that is no `Technique`."""

    rewrite: Pass

    def applicable(self, graph: TrainingGraph) -> list[Site]:
        """See `Pass`."""
        return self.rewrite.applicable(graph)

    def apply(self, graph: TrainingGraph, decisions: Any) -> Changes:
        """See `Pass`."""
        return self.rewrite.apply(graph, decisions)


def technique(rewrite: Pass) -> Technique:
    """The hooks of any pass."""
    return rewrite if isinstance(rewrite, Technique) else _Own(rewrite)

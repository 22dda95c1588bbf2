"""The hooks by which planner and runtime work with techniques that they do not know.

A pass that keeps the contract of `base` alone is a technique without decisions of its own: it rewrites every site that it finds.
One that is a `Technique` takes part in making the plan, and may have a state that lives as long as the training does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from graphopt.passes.base import Changes, Pass, PassReport, Preserves, Site, Supplying
from graphopt.passes.state import State, Supplied
from torch import Tensor

from graphopt.budget import Budget
from graphopt.graph import TrainingGraph

if TYPE_CHECKING:
    from graphopt.planner.importance import Metric
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
        not_separable: why rows of the backward must not be left out under a plan; "" if they may.
        inputs: names and values of the example's tensors, in the order of the graph's inputs, and how many samples they are.
            None: the graph takes others, or the plan is for several ranks, which must go through steps in the same way.
    """

    graph: TrainingGraph
    tensors: Mapping[str, Tensor]
    auto: bool
    not_separable: Callable[[Plan], str]
    inputs: tuple[tuple[str, ...], tuple[Tensor, ...], int] | None = None


@dataclass(frozen=True)
class Selecting:
    """How a technique that leaves tensors untrained chooses those that it trains.

    Attributes:
        train: their names, where the user gave them.
        rule, metric: see `graphopt.planner.rating`.
    """

    train: tuple[str, ...] | None
    rule: str
    metric: Metric


@dataclass(frozen=True)
class Smaller:
    """A gradient that a technique can put in the place of a parameter's own.

    Attributes:
        bytes: it takes, with all that is kept for it.
        flops: of computing it, at the captured batch size.
    """

    bytes: int
    flops: int


@dataclass(frozen=True)
class Offers:
    """What a technique can do for a step to need less memory: terms of the one program (`graphopt.planner.memory_plan`).

    Attributes:
        leaves_untrained: tensors may be left untrained.
        recomputes: segments of the forward may be computed again in the backward.
        smaller: by parameter, the gradient that may take the place of its own.
        kept_value: part of a tensor's importance that such a gradient keeps.
        held: parameters whose gradient and optimizer state are none of the step's, whatever the program says.
    """

    leaves_untrained: bool = False
    recomputes: bool = False
    smaller: Mapping[str, Smaller] = field(default_factory=dict)
    kept_value: float = 1.0
    held: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Found:
    """What the program has found: `smaller` gradients by parameter, and `recomputed` segments, by name, `merged` of so many."""

    smaller: tuple[str, ...]
    recomputed: tuple[str, ...]
    merged: int = 1


@dataclass(frozen=True)
class Section:
    """A technique's part of the report.

    Attributes:
        facts: plain values, for machines.
        lines: for people.
        notes: what else there is to know.
        left_alone: reason by name of what looks like a site and is none.
        approximation: how a step differs from full training; "" if it does not.
        used: by field of the budget, what the technique uses of it.
    """

    facts: Mapping[str, Any] = field(default_factory=dict)
    lines: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    left_alone: Mapping[str, str] = field(default_factory=dict)
    approximation: str = ""
    used: Mapping[str, float] = field(default_factory=dict)


class Technique:
    """A pass with decisions of its own; these are what it does where it says nothing else.

    No method changes what it is given.

    Attributes:
        by_part: it works on a part of a model, such as between two graph breaks, as it does on all of it.
        decides: the type of its decision, by which a checkpoint is read; None: it is decided anew and not loaded.
        unneeded: why it was not needed where it changed nothing; "" if it has nothing to say then.
        communicates: its graphs run on several ranks together, or wait for ever.
    """

    name: str
    preserves: Preserves
    serves: tuple[str, ...]
    by_part = False
    decides: type[Any] | None = None
    unneeded = ""
    communicates = False

    @property
    def apart(self) -> str:
        """Why ranks with a mesh cannot train together by its gradients, if it is PROJECTED; "" if they can."""
        return "it is not known to project the gradients of all ranks in the same way"

    @property
    def measures_machine(self) -> bool:
        """Whether `decide` goes by times that it measures: torch's cache on disk may hold what other times decided."""
        return False

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

    def reselected(self, plan: Plan, graph: TrainingGraph, not_separable: Callable[[Plan], str]) -> Plan:
        """The plan after other tensors were selected; what is computed again and compressed for the memory is chosen before.

        Args:
            graph, not_separable: see `Planning`.
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
        """The graph after `apply`, with what else a running step needs; it takes and returns the same."""
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

    def for_all_outputs(self, plan: Plan) -> Plan:
        """The plan for a backward in which more than the loss is differentiated."""
        return plan

    def alone(self, plan: Plan) -> Plan:
        """The plan for a step beside the training, which hands nothing to what `start` has made."""
        return plan

    @property
    def selecting(self) -> Selecting | None:
        """How tensors are selected, if it leaves any untrained; it then does nothing else to a graph."""
        return None

    def without_gradients(self) -> Technique:
        """The technique, whose default rule of selection measures no gradients."""
        return self

    def offers(self, plan: Plan, graph: TrainingGraph) -> Offers:
        """What it can do for a step of `plan` to need less memory."""
        return Offers()

    def finer(self, plan: Plan, graph: TrainingGraph) -> Plan | None:
        """The plan in which it takes less memory for the same gradients, and some time for that; None: it cannot."""
        return None

    def extra_seconds(self, plan: Plan, graph: TrainingGraph) -> float:
        """What its decision takes in a step beyond its FLOPs, in seconds."""
        return 0.0

    @classmethod
    def offered(cls, graph: TrainingGraph) -> Technique | None:
        """The technique as `graphopt.pareto` tries it on a graph, if it makes offers."""
        return None

    def adopt(self, plan: Plan, found: Found) -> Plan:
        """The plan with that part of what was found that is of its making; nothing, if nothing of it was found."""
        return plan

    def section(
        self, plan: Plan, graph: TrainingGraph, reports: Sequence[PassReport], ran: Sequence[PassReport], state: State | None
    ) -> Section:
        """Its part of the report.

        Args:
            graph: that the plan was made on.
            reports: of its passes on a step at the batch size of the report.
            ran: of the step that ran last.
            state: that `start` returned.
        """
        return Section(approximation="" if self.preserves is Preserves.EXACT else f"gradients {self.preserves.value}")

    def start(self, opt: OptimizedModule) -> State | None:
        """What lives as long as the training of an optimised model: a controller, projectors, values for added inputs."""
        return Supplied(self) if isinstance(self, Supplying) else None

    @classmethod
    def stand_in(cls, opt: OptimizedModule) -> State | None:
        """For an optimised model whose plan does without, what loops find where it is used."""
        return None


@dataclass(frozen=True)
class _Own(Technique):
    """A pass that is no `Technique`."""

    rewrite: Pass

    def __post_init__(self) -> None:
        for name in ("name", "preserves", "serves"):
            object.__setattr__(self, name, getattr(self.rewrite, name))

    def applicable(self, graph: TrainingGraph) -> list[Site]:
        """See `Pass`."""
        return self.rewrite.applicable(graph)

    def start(self, opt: OptimizedModule) -> State | None:
        """See `Technique`."""
        return Supplied(self.rewrite) if isinstance(self.rewrite, Supplying) else None


def left_alone(name: str, reports: Sequence[PassReport], rewritten: Collection[str]) -> dict[str, str]:
    """What the reports of a pass say was left alone, but for sites that the last step rewrote nevertheless."""
    reasons = {site: why for report in reports if report.name == name for site, why in report.changes.left_alone.items()}
    return {site: why for site, why in reasons.items() if site not in rewritten}


def technique(rewrite: Pass) -> Technique:
    """The hooks of any pass."""
    return rewrite if isinstance(rewrite, Technique) else _Own(rewrite)

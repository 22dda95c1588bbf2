"""The reordering of adapters' products as a technique: what it decides."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from graphopt.passes.base import Changes, PassReport, Preserves, Site
from graphopt.passes.fields import require_one_of
from graphopt.passes.runlora.choose import TOLERABLE, choose_orders, merge_errors
from graphopt.passes.runlora.orders import Order, named_order
from graphopt.passes.runlora.rewrite import reorder
from graphopt.passes.runlora.sites import find_lora_sites, lora_sites
from graphopt.passes.state import State
from graphopt.passes.technique import Planning, Section, Technique, left_alone
from torch import Tensor

from graphopt.errors import PassError
from graphopt.graph import TrainingGraph
from graphopt.planner.product_times import product_times

if TYPE_CHECKING:
    from graphopt.planner.plan import Plan


@dataclass(frozen=True)
class MergeErrors:
    """By layer, the part of its adapters' contribution that merging it with its weight loses; see `merge_errors`."""

    by_layer: Mapping[str, float]

    @property
    def key(self) -> Hashable:
        """See `Decision`: the layers that must not be merged."""
        return tuple(sorted(name for name, error in self.by_layer.items() if error > TOLERABLE))


@dataclass(frozen=True)
class RunLora(Technique):
    """The reordering of adapters' products.

    Attributes:
        order: one order for all layers, as an `Order` or by the paper's names ("forward2+backward5"); None: the planner
            chooses for each.
        criterion: what the planner minimises: "time" (measured products) or "flops".
    Raises:
        PassError: an unknown order or criterion.
    """

    order: Order | str | None = None
    criterion: str = "time"
    name = "runlora"
    preserves = Preserves.EXACT
    serves = ()
    by_part = True
    decides = MergeErrors
    unneeded = "autograd's own orders are the cheapest"

    def __post_init__(self) -> None:
        require_one_of(self, "criterion", ("time", "flops"))
        _ = self.fixed_order

    @property
    def fixed_order(self) -> Order | None:
        """`order`, if one was asked for."""
        return self.order if self.order is None or isinstance(self.order, Order) else _by_name(self.order)

    @property
    def measures_machine(self) -> bool:
        """See `Technique`."""
        return self.criterion == "time" and self.fixed_order is None

    def applicable(self, graph: TrainingGraph) -> list[Site]:
        """Every layer whose products can be reordered, by the name of its weight."""
        return [Site(layer.name) for layer in find_lora_sites(graph).layers]

    def before_selection(self, plan: Plan, planning: Planning) -> Plan:
        """Find where merging would lose the adapters; leave a plan where no layer has any."""
        sites = lora_sites(planning.graph)
        if planning.auto and not sites.layers and not sites.left_alone:
            return plan.without(self)
        return self.measured(plan, planning.graph, planning.tensors)

    def measured(self, plan: Plan, graph: TrainingGraph, tensors: Mapping[str, Tensor]) -> Plan:
        """The plan with the errors of merging as the weights are now."""
        return plan.decided(self.name, MergeErrors(merge_errors(graph, tensors)))

    def decide(self, plan: Plan, captured: TrainingGraph, graph: TrainingGraph) -> tuple[dict[str, Order], tuple[Any, ...]]:
        """The cheapest order of every layer."""
        errors = plan.decisions.get(self.name, MergeErrors({})).by_layer
        found = choose_orders(graph, graph.batch_size, self, errors, product_times)
        return {name: choice.order for name, choice in found.items()}, tuple(found.values())

    def section(
        self, plan: Plan, graph: TrainingGraph, reports: Sequence[PassReport], ran: Sequence[PassReport], state: State | None
    ) -> Section:
        """Per layer ("adapters") its order of products, FLOPs, bytes and predicted time before and after; what is left alone."""
        choices = [choice for report in ran if report.name == self.name for choice in report.choices]
        facts = [{**asdict(c), "order": str(c.order), "before": str(c.before), "text": str(c)} for c in choices]
        return Section(
            {"adapters": facts} if facts else {},
            tuple(f"adapters         {choice}" for choice in choices),
            left_alone=left_alone(self.name, reports, [choice.layer for choice in choices]),
        )

    def apply(self, graph: TrainingGraph, decisions: Mapping[str, Order] | Collection[str]) -> Changes:
        """Give each layer the order in `decisions`; where only names are given, `order` or the one with the fewest FLOPs.

        Raises:
            PassError: an unknown layer, or an order that merges where merging would change the result.
        """
        return reorder(graph, decisions if isinstance(decisions, Mapping) else dict.fromkeys(decisions, self.fixed_order))


def _by_name(text: str) -> Order:
    forward, _, backward = str(text).replace(" ", "").partition("+")
    try:
        return named_order(forward, backward)
    except KeyError:
        raise PassError(f"runlora: order={text!r}: use forward1 or forward2, then + and backward1 to backward8.") from None

"""What training a tensor is worth by its place and size: a rating that needs no gradients.

The first-order gain of an optimizer step, -<dw, g>, grows with a tensor's size and adds up what the tensors of one layer would
gain alone. Maximised under a limit on FLOPs it picks the widest matrices next to the output. Trained, such sets lose to most
others (`graphopt bench selection`). Sets that win train the output layer, and many matrices from several layers, small ones
before wide ones. A sum of values with diminishing returns in a tensor's size picks those:

    value = elements ** SIZE * live part ** LIVE, and OUTPUT times as much for the output layer
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from graphopt.analysis.flops import FlopProfile
from graphopt.analysis.live_rows import live_parts
from graphopt.graph import TrainingGraph
from graphopt.planner.costs import backward_costs
from graphopt.planner.importance import Importance


@dataclass(frozen=True)
class Weighting:
    """The numbers in the rating, chosen by `graphopt bench selection`.

    Attributes:
        size: diminishing returns in a tensor's elements: 1 counts elements, 0 counts tensors.
        live: the same in the part of its gradient's rows that is not zero by the model's structure; see `live_parts`.
        output: how many times its value the output layer has.
    """

    size: float = 0.2
    live: float = 0.1
    output: float = 10.0


def capacity(graph: TrainingGraph, profile: FlopProfile, names: Iterable[str], weighting: Weighting | None = None) -> Importance:
    """Rate the parameters `names`; no gradient is computed, so that weights may be fake and a batch may be anything.

    The output layer is every tensor whose gradient costs nothing but its own product: no gradient is passed on to reach it.

    Args:
        graph, profile: compute and count their gradients.
        weighting: by default, what `Weighting` says.
    """
    by = weighting or Weighting()
    live, costs = live_parts(graph), backward_costs(profile)
    elements = {p.name: math.prod(p.shape) for p in graph.parameters}
    last = {name for k, name in enumerate(costs.names) if costs.cost([k]) == costs.weight_grad_flops[k]}
    values = {
        name: elements[name] ** by.size * live.get(name, 1.0) ** by.live * (by.output if name in last else 1.0) for name in names
    }
    largest = max(values.values(), default=1.0) or 1.0
    source = f"elements^{by.size:g} x live part of the rows^{by.live:g}, x {by.output:g} for the output layer"
    return Importance({name: value / largest for name, value in values.items()}, source)

"""What training a tensor is worth by its place and size: a rating that needs no gradients.

The first-order gain of an optimizer step, -<dw, g>, grows with a tensor's size and adds up what the tensors of one layer would
gain alone. Maximised under a limit on FLOPs it picks the widest matrices next to the output. Trained, such sets lose to most
others (`graphopt bench selection`). Better ones train the output layer and many matrices, of whatever size, from several
layers. So every matrix counts alike, and the cheapest are chosen. It is a rule of thumb, and not the best on every task:

    value = (output layer: 10, else 1) x (vector: 0.3, matrix: 1)
"""

from __future__ import annotations

from dataclasses import dataclass

from graphopt.analysis.flops import FlopProfile
from graphopt.graph import TrainingGraph
from graphopt.planner.costs import backward_costs
from graphopt.planner.importance import Importance
from graphopt.planner.simple_rules import is_vector


@dataclass(frozen=True)
class Weighting:
    """The numbers in the rating, chosen by short runs on three tasks of `graphopt bench selection`: glosses, digits, definitions.

    Attributes:
        vector: value of a bias or of a norm's weight; a matrix has 1.
        output: how many times its value the output layer has.
    """

    vector: float = 0.3
    output: float = 10.0


def capacity(graph: TrainingGraph, profile: FlopProfile, weighting: Weighting | None = None) -> Importance:
    """Rate all trainable parameters; no gradient is computed, so that weights may be fake and a batch may be anything.

    The output layer is every tensor whose gradient costs nothing but its own product: no gradient is passed on to reach it.

    Args:
        graph, profile: compute and count their gradients.
        weighting: by default, what `Weighting` says.
    """
    by = weighting or Weighting()
    costs = backward_costs(profile)
    shapes = {p.name: p.shape for p in graph.parameters}
    last = {name for k, name in enumerate(costs.names) if costs.cost([k]) == costs.weight_grad_flops[k]}
    values = {
        name: (by.output if name in last else 1.0) * (by.vector if is_vector(shapes[name]) else 1.0) for name in costs.names
    }
    largest = max(values.values(), default=1.0) or 1.0
    source = f"matrices count 1, vectors {by.vector:g}, the output layer x {by.output:g}"
    return Importance({name: value / largest for name, value in values.items()}, source)

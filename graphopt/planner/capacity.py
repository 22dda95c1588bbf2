"""What training a tensor is worth by its place and size and, where gradients were measured, by how steep the loss is in it.

The first-order gain of an optimizer step, -<dw, g>, grows with a tensor's size and adds up what the tensors of one layer would
gain alone. Maximised under a limit on FLOPs it picks the widest matrices next to the output. Trained, such sets lose to most
others (`graphopt bench selection`). Better ones train the output layer and many matrices, of whatever size, from several
layers. So every matrix counts alike, and the cheapest are chosen.

Where the inputs differ from those of pre-training, one must reach the first layers, whatever that leaves to the others
("surgical fine-tuning", arXiv 2210.11466). Their gradients are then many times as large as those of other layers, and count:

    value = (output layer: 10, else 1) x (vector: 0.35, matrix: 1) + (|g|_2 / (6 x the matrices' median |g|_2))^6

where the second term counts 20 at most: a few tensors that are far steeper outweigh all matrices above them. The power leaves
ordinary tensors nearly alike, so that the first term decides between them, and the second where that makes no difference. It is
a rule of thumb, and not the best on every task.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from graphopt.analysis.flops import FlopProfile
from graphopt.graph import TrainingGraph
from graphopt.planner.costs import backward_costs
from graphopt.planner.importance import Importance
from graphopt.planner.simple_rules import is_vector


@dataclass(frozen=True)
class Weighting:
    """The numbers in the rating, chosen by short runs on tasks of `graphopt bench selection`.

    Attributes:
        vector: value of a bias or of a norm's weight; a matrix has 1.
        output: how many times its value the output layer has.
        steep: how many times the median matrix's a gradient is that adds a matrix's value.
        most: how many times that value it adds at most: of untrained models a few gradients are thousands of times the median.
    """

    vector: float = 0.35
    output: float = 10.0
    steep: float = 6.0
    most: float = 20.0


def capacity(
    graph: TrainingGraph, profile: FlopProfile, weighting: Weighting | None = None, norms: Mapping[str, float] | None = None
) -> Importance:
    """Rate all trainable parameters. Without norms, weights may be fake and a batch may be anything.

    The output layer is every tensor whose gradient costs nothing but its own product: no gradient is passed on to reach it.

    Args:
        graph, profile: compute and count their gradients.
        weighting: by default, what `Weighting` says.
        norms: of the gradients of a batch's loss, by name; of the tensors that were measured. Their scale does not matter.
    """
    by = weighting or Weighting()
    costs = backward_costs(profile)
    shapes = {p.name: p.shape for p in graph.parameters}
    last = {name for k, name in enumerate(costs.names) if costs.cost([k]) == costs.weight_grad_flops[k]}
    values = {
        name: (by.output if name in last else 1.0) * (by.vector if is_vector(shapes[name]) else 1.0) for name in costs.names
    }
    source = f"matrices count 1, vectors {by.vector:g}, the output layer x {by.output:g}"
    ordinary = [n for name, n in (norms or {}).items() if n > 0 and name not in last and not is_vector(shapes[name])]
    if norms and ordinary:
        unit, most = by.steep * statistics.median(ordinary), by.most ** (1 / 6)
        values = {name: value + min(norms.get(name, 0.0) / unit, most) ** 6 for name, value in values.items()}
        source += f", plus (gradient / {by.steep:g} x the median matrix's)^6"
    largest = max(values.values(), default=1.0) or 1.0
    return Importance({name: value / largest for name, value in values.items()}, source, dict(norms or {}))

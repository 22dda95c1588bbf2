"""What training a tensor is worth by its place and size and, where gradients were measured, by how steep the loss is in it.

The first-order gain of an optimizer step, -<dw, g>, grows with a tensor's size and adds up what the tensors of one layer would
gain alone. Maximised under a limit on FLOPs it picks the widest matrices next to the output. Trained, such sets lose to most
others (`graphopt bench selection`). Where the loss reads few rows, such as one of each sample, better sets train the output
layer, many matrices of whatever size, and vectors of many layers: so every matrix counts alike, and the cheapest are chosen.
In the last layer most matrices then learn from one row of each sample, though they were made for all rows. That costs next to
nothing and does harm: they count 0. Where the loss reads every row, as a language model's does, there is more to be learned from
a batch, and large matrices pay: they count by the root of their size.

Where the inputs differ from those of pre-training, one must reach the first layers, whatever that leaves to the others
("surgical fine-tuning", arXiv 2210.11466). Then the steepest matrix is one of the half nearer to the input. With a gradient of 3
times the median's or more, a budget is to reach it. Below 6 times it is then worth 20 of the others. From 6 times on, the loss is
"steep at the input", and its own gradient says what it is worth. There is much to be learned: large matrices pay, vectors learn
too little, matrices of few rows count, and of equals the one nearer to the input is taken. Where the budget reaches the steepest
matrix, those with a gradient below half of the median's, often queries and keys, make room for it and its layer:

    value = (output layer: 10, else 1)
            x (vector: 1.2; matrix: 1, or 0 of few rows)                     where the loss reads few rows,
              (vector: 1.2; matrix: (elements / the matrices' median)^0.5)   where it reads every row,
              (vector: 0.35; matrix: (elements / the matrices' median)^0.5
                             x min(1, |g|_2 / (0.5 x the matrices' median |g|_2)) where the steepest is in reach)
                                                                             where it is steep at the input
            + (|g|_2 / (6 x the matrices' median |g|_2))^6

where the last term counts 20 at most, and 1 where the loss is not steep at the input. So a few tensors that are far steeper
outweigh all matrices above them; ordinary tensors stay nearly alike, so that the first term decides between them, and the last
where that makes no difference. It is a rule of thumb, and not the best on every task.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping

from torch import fx

from graphopt.analysis.batch_dims import gradient_cone
from graphopt.analysis.flop_formulas import node_flops
from graphopt.analysis.flops import FlopProfile, flop_profile
from graphopt.graph import TrainingGraph, ancestors, parameters_read
from graphopt.planner.importance import Importance
from graphopt.planner.simple_rules import is_vector

FEW_ROWS = 0.25
"""Of the rows that other layers compute. A loss that reads fewer has one label or so for each sample."""

DEEPER = 0.001
"""By which part a tensor at the input counts more than one at the output where the loss is steep there: enough between equals."""

# The numbers of the rule above, chosen by short runs on tasks of `graphopt bench selection`:
VECTOR = 1.2  # value of a bias or of a norm's weight; the matrix of median size has 1
VECTOR_OF_STEEP = 0.35  # the same where the loss is steep at the input
SIZE = 0.5  # power of a matrix's size, relative to the median's, where it counts
OUTPUT = 10.0  # how many times its value the output layer has
FLAT = 0.5  # part of the median matrix's gradient; matrices with less count in proportion, where that makes room
STEEP = 6.0  # how many times the median matrix's a gradient is that adds a matrix's value
REACH = 3.0  # how many times the median matrix's the steepest gradient is, at the input, that a budget is to reach
MOST = 20.0  # times that value at most: of untrained models a few gradients are thousands of times the median


def capacity(
    graph: TrainingGraph,
    profile: FlopProfile,
    norms: Mapping[str, float] | None = None,
    reachable: Collection[str] = (),
) -> Importance:
    """Rate all trainable parameters. Without norms, weights may be fake and a batch may be anything.

    The output layer is every tensor whose gradient costs nothing but its own product: no gradient is passed on to reach it.

    Args:
        graph: computes their gradients, as captured.
        profile: FLOPs of the graph as it is where tensors are selected: exact rewrites before may leave rows out.
        norms: of the gradients of a batch's loss, by name; of the tensors that were measured. Their scale does not matter.
        reachable: tensors that the budget can reach.
    """
    shapes = {p.name: p.shape for p in graph.parameters}
    own = {row.name: row.weight_grad_flops for row in profile.tensors}
    last = {name for name in profile.order if profile.cost([name]) == own[name]}
    inner = [name for name in profile.order if name not in last and not is_vector(shapes[name])]
    sizes = {name: math.prod(shapes[name]) for name in inner if own[name]}  # tables that are only looked up take no FLOPs
    every = _reads_every_row(graph)
    usual = statistics.median(sizes.values() or [1])
    idle = set() if every else _with_few_rows(graph, profile, inner)
    norms = norms or {}
    found = [norms.get(name, 0.0) for name in inner]
    middle = statistics.median([norm for norm in found if norm > 0] or [math.inf])
    unit = STEEP * middle
    deepest = max(found[len(found) // 2 :], default=0.0)  # of those nearer to the input
    steep = deepest >= max(unit, *found, 0.0)
    vector = VECTOR_OF_STEEP if steep else VECTOR
    power = SIZE if sizes and (every or steep) else 0.0
    kinds = {name: vector if is_vector(shapes[name]) else (sizes.get(name, usual) / usual) ** power for name in profile.order}
    if steep:
        kinds = {name: value * (1 + DEEPER * k / len(kinds)) for k, (name, value) in enumerate(kinds.items())}
    wanted = deepest >= max(REACH * middle, *found, 0.0)
    steepest = max(inner, key=lambda name: norms.get(name, 0.0)) if wanted else ""
    in_reach = steepest in reachable
    makes_room = steep and in_reach
    if makes_room:
        enough = FLAT * middle
        kinds |= {name: kinds[name] * min((norms.get(name) or enough) / enough, 1.0) for name in sizes}
    values = {name: value * (OUTPUT if name in last else 1.0) for name, value in kinds.items()}
    size = f"(size / median)^{power:g}" if power else "1"
    source = f"matrices count {size}, vectors {vector:g}, the output layer x {OUTPUT:g}"
    if unit < math.inf:
        most = (MOST if steep else 1.0) ** (1 / 6)
        values = {name: value + min(norms.get(name, 0.0) / unit, most) ** 6 for name, value in values.items()}
        if in_reach and not steep:  # there its own gradient says enough, and the output layer may be worth more
            values[steepest] = max(values[steepest], MOST)  # for its sake a budget reaches so far
        source += f", x gradient / {FLAT:g} of the median matrix's below that" if makes_room else ""
        source += f", plus (gradient / {STEEP:g} x the median matrix's)^6"
    if idle and not steep:
        values |= dict.fromkeys(idle, 0.0)
        source += ", matrices of few rows 0"
    largest = max(values.values(), default=1.0) or 1.0
    missed = steepest if reachable and not in_reach else ""
    return Importance({name: value / largest for name, value in values.items()}, source, dict(norms), missed=missed)


def _with_few_rows(graph: TrainingGraph, profile: FlopProfile, matrices: Collection[str]) -> set[str]:
    """Matrices that learn from a smaller part of the rows that forward computes with them than others do.

    Args:
        graph: as captured.
        profile: of the graph as it is after exact rewrites, which leave rows out.
    """
    before, left = ({row.name: row.weight_grad_flops for row in p.tensors} for p in (flop_profile(graph), profile))
    shares = {name: left[name] / before[name] for name in matrices if before.get(name)}
    return {name for name, share in shares.items() if share < FEW_ROWS * max(shares.values())}


def _reads_every_row(graph: TrainingGraph) -> bool:
    """Whether the last products with weights, before the loss, have about as many rows as products have in general."""
    names, backward = graph.parameter_nodes(), gradient_cone(graph)
    rows: dict[fx.Node, float] = {}
    for node in graph.graph.nodes:
        if node.op != "call_function" or node in backward or not (flops := graph.at(node_flops(node), graph.batch_size)):
            continue
        for read in parameters_read(node, names):
            rows[node] = max(rows.get(node, 0.0), flops / read.meta["val"].numel())
    before = ancestors([read for node in rows for read in node.all_input_nodes])
    heads = [count for node, count in rows.items() if node not in before]
    return bool(heads) and max(heads) >= FEW_ROWS * statistics.median(rows.values())

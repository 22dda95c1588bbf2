"""Which rows of each tensor can reach what training reads, and which rows of a gradient are not zero."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from graphopt.passes.dead_rows.of_each import RowsOfEach, known_before
from graphopt.passes.dead_rows.places import Places, Rows, put_back_at, read_places, rules_of, traced_length
from torch import fx

from graphopt.analysis.batch_dims import gradient_cone
from graphopt.analysis.flop_formulas import node_flops
from graphopt.analysis.row_axes import Rules
from graphopt.analysis.row_rules import Axis, Read, arguments, first_value, tensors_of
from graphopt.graph import TrainingGraph, descendants, parameters_read
from graphopt.transforms.edit import in_one_region

aten = torch.ops.aten


@dataclass(frozen=True)
class Demand:
    """What can be computed on some rows alone.

    Attributes:
        name: the first parameter that reads only these rows, or "the output"; "the loss" if they are those with a label.
        rows: which.
        takes: nodes of the forward that take these rows, and no others, of a tensor.
        narrow: nodes that need be computed for these rows alone, and where the rows are in their results.
        zeros: those of them that are zero in all other rows; others are not defined there.
        sums: what nodes that sum over rows read, all other rows being zero.
        flops: of a step, that this saves.
    """

    name: str
    rows: Places
    takes: Mapping[fx.Node, Axis]
    narrow: Mapping[fx.Node, Axis]
    zeros: frozenset[fx.Node]
    sums: Mapping[fx.Node, Read]
    flops: int


def find_demands(graph: TrainingGraph, labelled: float | None = None) -> list[Demand]:
    """Every set of rows by which a step can be made cheaper, each as if it were the only one.

    Args:
        labelled: the part of each sample's rows whose label may count, where a loss ignores others; None: all.
    """
    found: list[Demand] = []
    for rows, takes in read_places(graph, labelled):
        if any(arguments(take)[0] in demand.narrow for demand in found for take in takes):
            continue
        demand = _demand(graph, rows, takes)
        if demand.flops > 0 and (isinstance(rows, Rows) or known_before(rows, demand.narrow)):
            found.append(demand)
    return found


def _demand(graph: TrainingGraph, rows: Places, takes: Mapping[fx.Node, Axis]) -> Demand:
    rules = rules_of(graph, rows)
    zeros, sums = _zeros(graph, rules, rows)
    narrow = dict(zeros)
    for node in reversed(graph.graph.nodes):
        if node.op != "call_function" or node in zeros or node in takes or node in sums or first_value(node) is None:
            continue
        axis = _needed(node, rules, narrow, takes, sums)
        if axis is not None and rules.carries(node, axis) and rules.read(node, axis) is not None:
            narrow[node] = axis
    # Without results of operators that have others which are needed in full: of these, rows are taken when all are computed.
    narrow = {n: axis for n, axis in narrow.items() if n.target is not operator.getitem or arguments(n)[0] in narrow}
    saved = sum(graph.at(node_flops(node), graph.batch_size) for node in (*narrow, *sums))
    used = {take: axis for take, axis in takes.items() if arguments(take)[0] in narrow}
    flops = int(saved * (1 - rows.count / traced_length(graph, rows))) if used or sums else 0
    name = "the loss" if isinstance(rows, RowsOfEach) and rows.ignored is not None else _name(graph, takes)
    return Demand(name, rows, used, narrow, frozenset(zeros), sums, flops)


def _zeros(graph: TrainingGraph, rules: Rules, rows: Places) -> tuple[dict[fx.Node, Axis], dict[fx.Node, Read]]:
    """Nodes that are zero in all rows but these, and those that sum over the rows of such."""
    zeros: dict[fx.Node, Axis] = {}
    sums: dict[fx.Node, Read] = {}
    for node in graph.graph.nodes:
        if node.op != "call_function":
            continue
        if (put := put_back_at(graph, rows, node)) is not None:
            zeros[node] = put
            continue
        read = {n: zeros[n] for n in tensors_of(node) if n in zeros and in_one_region((n, node))}
        if not read:
            continue
        if (summed := rules.summed(node, zeros)) is not None:
            sums[node] = summed
        elif rules.keeps_zeros(node, read):
            first, there = next(iter(read.items()))
            axis = rules.written(node, first, there)
            if axis is not None and all((rules.read(node, axis) or {}).get(n) == where for n, where in read.items()):
                zeros[node] = axis
    return zeros, sums


def _needed(
    node: fx.Node, rules: Rules, narrow: Mapping[fx.Node, Axis], takes: Mapping[fx.Node, Axis], sums: Mapping[fx.Node, Read]
) -> Axis | None:
    """Where the rows are that all users of a node read of it; None if one of them reads more."""
    axes: set[Axis | None] = set()
    if not in_one_region((node, *node.users)):
        return None
    for user in node.users:
        if user.target is aten.sym_size.int:  # `simplify_sizes` reads it elsewhere
            continue
        if user in takes and arguments(user)[0] is node:
            axes.add(takes[user])
        elif user in sums:
            axes.add(sums[user].get(node))
        elif user in narrow:
            axes.add((rules.read(user, narrow[user]) or {}).get(node))
        else:
            return None
    return axes.pop() if len(axes) == 1 else None


def _name(graph: TrainingGraph, takes: Mapping[fx.Node, Axis]) -> str:
    """The first parameter that is read together with what was taken."""
    below, names = descendants(takes) - gradient_cone(graph), graph.parameter_nodes()
    for node in graph.graph.nodes:
        if node in below and node not in takes and (read := parameters_read(node, names)):
            return names[read[0]]
    return "the output"

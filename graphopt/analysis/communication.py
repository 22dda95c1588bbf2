"""Bytes that a step hands to other ranks, counted on its graph."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from graphopt.compat.distributed import collective_of, group_in
from graphopt.graph import TrainingGraph


@dataclass(frozen=True)
class Collective:
    """One call.

    Attributes:
        kind: such as "all_reduce".
        bytes: of the tensors that this rank hands in.
        group: the name of the process group, where a graph says it.
    """

    kind: str
    bytes: int
    group: str = ""


@dataclass(frozen=True)
class Communication:
    """The collectives of a step, in the order in which they are issued."""

    collectives: tuple[Collective, ...]

    @property
    def bytes(self) -> int:
        """Of all of them."""
        return sum(collective.bytes for collective in self.collectives)


def communication(*graphs: TrainingGraph) -> Communication:
    """What the graphs of a step communicate, at their batch size."""
    return Communication(tuple(found for graph in graphs for found in _collectives(graph)))


def _collectives(graph: TrainingGraph) -> Iterable[Collective]:
    for node in graph.graph.nodes:
        kind = collective_of(node.target)
        if kind:
            values = [n.meta.get("val") for n in node.all_input_nodes]
            yield Collective(kind, graph.bytes_of(values), group_in(node))

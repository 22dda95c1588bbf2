"""What was found of a graph, kept as long as the graph lives."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar

from graphopt.graph import TrainingGraph
from graphopt.runtime.bounded_cache import BoundedCache

Found = TypeVar("Found")

LIMIT = 16
"""Of each kind of finding, how many a graph holds, those used last: keys may hold measured values, which change for ever."""


def kept(graph: TrainingGraph, what: str, key: Hashable, find: Callable[[], Found]) -> Found:
    """`find()`, called once for a graph, `what` it finds and `key`, and again where `LIMIT` other keys have come since.

    That relies on no graph being changed once it is made: a pass rewrites a clone. What is found may refer to the graph, which
    holds it.
    """
    kinds = vars(graph.graph).setdefault("_graphopt_kept", {})
    known: BoundedCache[Hashable, tuple[Found]] = kinds.setdefault(what, BoundedCache(LIMIT))
    sizes = tuple(sorted(graph.sizes.items(), key=str))
    own = key, graph.batch_size, graph.batch_dims, sizes, graph.static_reason  # graphs of one module may differ in these
    found = known.get(own) or known.put(own, (find(),))
    return found[0]

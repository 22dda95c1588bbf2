"""Rewrites that were made lately: plans that differ in one pass share what runs before it, and need not make it again."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Set
from typing import Any

from graphopt.analysis.kept import kept
from graphopt.graph import TrainingGraph
from graphopt.passes import Pass, PassReport
from graphopt.runtime.bounded_cache import BoundedCache

LIMIT = 3
"""Rewrites that are kept per graph, those used last; of each as many again, one pass further on."""

Rewritten = tuple[TrainingGraph, PassReport]


def once(run: Callable[[Pass, TrainingGraph, Any], Rewritten], rewrite: Pass, graph: TrainingGraph, decisions: Any) -> Rewritten:
    """`run(rewrite, graph, decisions)`, or what it gave before for the same pass, graph and decisions.

    That relies on a pass being a function of its own fields, the graph and the decisions.
    """
    frozen = _frozen(decisions)
    if frozen is None:
        return run(rewrite, graph, decisions)
    made: BoundedCache[Hashable, tuple[Pass, Rewritten]] = kept(graph, "rewrites", None, lambda: BoundedCache(LIMIT))
    key = run, id(rewrite), frozen  # the entry holds the pass, so that no other has its id
    found = made.get(key) or made.put(key, (rewrite, run(rewrite, graph, decisions)))
    return found[1]


def _frozen(decisions: Any) -> Hashable | None:
    """Decisions as a key, their order included where they have one; None where they cannot be one."""
    frozen = tuple(decisions.items()) if isinstance(decisions, Mapping) else decisions
    frozen = frozenset(frozen) if isinstance(frozen, Set) else frozen
    try:
        hash(frozen)
    except TypeError:
        return None
    return type(decisions).__name__, frozen

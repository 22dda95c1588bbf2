"""What training on several ranks would do, before there are any.

`optimize(mesh=...)` is its graph.
"""

from __future__ import annotations

import functools
import re

from graphopt.budget import Budget
from graphopt.graph import TrainingGraph
from graphopt.passes import communicating
from graphopt.passes.technique import Planning, technique
from graphopt.planner.plan import Plan


def averaged(graph: TrainingGraph, ranks: int, plan: Plan | None = None) -> TrainingGraph:
    """The graph that each of several ranks would run under a plan, by default without any, with its collectives.

    It can be counted and not run: there is no such group.
    """
    last = communicating("predicted", ranks)
    plan = Plan(Budget(), ()) if plan is None else plan
    plan = technique(last).before_selection(plan.with_passes([*plan.passes, last]), Planning(graph, {}, True, lambda _: ""))
    return plan.rewrite(graph)[0]


@functools.lru_cache(2**16)
def block_of(name: str) -> str:
    """The repeated block that a parameter belongs to: its outermost numbered module; "" if it has none."""
    match = re.match(r"(.*?\.\d+)\.", f".{name}")
    return match.group(1)[1:] if match else ""

"""What is rewritten once, and what anew."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
from graphopt.passes import GreenTrainer, Vcas, run_pass
from graphopt.passes.vcas import SampleSizes

from graphopt.budget import Budget
from graphopt.graph import TrainingGraph
from graphopt.planner.plan import REWRITES, Plan, once
from tests import zoo


class Counted:
    """`run_pass`, counting."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, rewrite: Any, graph: TrainingGraph, decisions: Any) -> Any:
        self.count += 1
        return run_pass(rewrite, graph, decisions)


def test_equal_rewrites_are_one() -> None:
    run, rewrite, graph = Counted(), GreenTrainer(), zoo.captured("mlp").clone()
    first = once(run, rewrite, graph, {"third.weight", "third.bias"})
    assert once(run, rewrite, replace(graph), {"third.bias", "third.weight"}) is first
    assert run.count == 1


def test_another_graph_batch_pass_or_decision_is_another_rewrite() -> None:
    run, rewrite, graph = Counted(), GreenTrainer(), zoo.captured("mlp").clone()
    requests: list[tuple[Any, TrainingGraph, Any]] = [
        (rewrite, graph, {"third.bias"}),
        (rewrite, graph.clone(), {"third.bias"}),
        (rewrite, replace(graph, batch_size=7), {"third.bias"}),
        (GreenTrainer(), graph, {"third.bias"}),
        (rewrite, graph, {"third.weight"}),
        (rewrite, graph, ["third.weight"]),  # what cannot be compared
        (rewrite, graph, ["third.weight"]),
    ]
    for request in requests:
        once(run, *request)
    assert run.count == len(requests)


@pytest.mark.usefixtures("_only_new_objects")
def test_rewrites_go_with_the_graph_and_the_oldest_go_first() -> None:
    run, rewrite, graph = Counted(), GreenTrainer(), zoo.captured("mlp").clone()
    names = sorted(site.name for site in rewrite.applicable(graph))[: REWRITES + 1]
    assert len(names) > REWRITES
    made = [weakref.ref(once(run, rewrite, graph, {name})[0].module) for name in names]
    gc.collect()
    assert [ref() is None for ref in made] == [True] + [False] * REWRITES
    del graph
    gc.collect()
    gc.collect()  # what the first let go
    assert all(ref() is None for ref in made)


def test_plans_that_differ_in_the_sampler_share_the_cut(monkeypatch: Any) -> None:
    run, graph = Counted(), zoo.captured("bert").clone()
    monkeypatch.setattr("graphopt.planner.plan.run_pass", run)
    names = [site.name for site in GreenTrainer().applicable(graph)]
    plan = Plan(Budget(), (GreenTrainer(), Vcas()), train=frozenset(names[len(names) // 3 :]))
    sites = [site.name for site in Vcas().applicable(plan.before_sampling().rewrite(graph)[0])]
    assert run.count == 1
    for keep in (0.75, 0.5):
        rewritten, reports = plan.decided(Vcas.name, SampleSizes(((sites[-1], keep),), 4)).rewrite(graph)
        assert len(reports) == 2
        rewritten.graph.lint()
    assert run.count == 3

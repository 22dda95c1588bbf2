"""What is found of a graph is found once, and not kept longer than the graph."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

from graphopt.passes import DeadRows
from torch import fx

from graphopt.analysis.kept import LIMIT, kept
from graphopt.capture import capture
from graphopt.graph import TrainingGraph
from tests import zoo
from tests.passes.dead_rows.test_technique import OfEach, last_kept, padded


def graph_of_mlp() -> TrainingGraph:
    model, inputs = zoo.make("mlp", 4)
    return capture(model, inputs)


def test_it_is_found_once_for_every_key_and_batch_size() -> None:
    graph, found = graph_of_mlp(), []
    for other in (graph, graph, replace(graph, batch_size=8), graph.clone()):
        kept(other, "this", 1, lambda: found.append(1))
    kept(graph, "this", 2, lambda: found.append(1))
    kept(graph, "that", 1, lambda: found.append(1))
    assert len(found) == 5


def test_it_goes_with_the_graph_even_where_it_refers_to_it() -> None:
    def of_a_graph() -> weakref.ref[fx.GraphModule]:
        graph = graph_of_mlp().clone()  # tests share what they capture
        kept(graph, "nodes", None, lambda: list(graph.graph.nodes))
        return weakref.ref(graph.module)

    gone = of_a_graph()
    gc.collect()
    assert gone() is None


def test_sites_are_those_of_a_graph_as_it_is_now() -> None:
    graph, rewrite = capture(OfEach(last_kept, blocks=1), padded()), DeadRows()
    names = [site.name for site in rewrite.applicable(graph)]
    assert rewrite.apply(graph, names).changed == tuple(names)
    assert names
    assert not rewrite.applicable(graph)


def test_a_graph_keeps_no_more_and_no_more_for_keys_that_never_come_again() -> None:
    class Finding:
        pass

    graph = graph_of_mlp().clone()
    found = [weakref.ref(kept(graph, "this", measured, Finding)) for measured in range(3 * LIMIT)]
    gc.collect()
    assert [k for k, finding in enumerate(found) if finding() is not None] == list(range(2 * LIMIT, 3 * LIMIT))


def test_many_findings_of_one_kind_leave_those_of_others() -> None:
    graph = graph_of_mlp().clone()
    rare = kept(graph, "rare", None, list)
    for measured in range(3 * LIMIT):
        kept(graph, "this", measured, list)
    assert kept(graph, "rare", None, list) is rare

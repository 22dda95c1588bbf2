"""Means over ranks in a graph: the gradients of one rank stay, and the order of collectives is the one that is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from graphopt.passes import Distribute, run_pass
from graphopt.passes.distribute.rewrite import in_buckets
from graphopt.passes.distribute.technique import ready_order

from graphopt.analysis.communication import communication
from graphopt.compat.distributed import ALL_REDUCE
from graphopt.graph import TrainingGraph
from graphopt.testing import check_pass
from tests import zoo


@pytest.fixture
def group(tmp_path: Path) -> Iterator[str]:
    """The name of a group of this process alone."""
    assert not dist.is_initialized()
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        yield dist.group.WORLD.group_name
    finally:
        dist.destroy_process_group()


def in_twos(graph: TrainingGraph) -> tuple[tuple[str, ...], ...]:
    names = ready_order(graph)
    return tuple(names[i : i + 2] for i in range(0, len(names), 2))


@pytest.mark.parametrize("name", ["mlp", "cnn", "gpt2"])
@pytest.mark.parametrize("backwards", [False, True])
def test_the_mean_of_one_rank_is_its_own_gradient(group: str, name: str, backwards: bool) -> None:
    model, inputs = zoo.make(name)
    in_order = lambda graph: in_twos(graph)[:: -1 if backwards else 1]  # noqa: E731
    check_pass(Distribute(group, 1), model, inputs, in_order, captured=zoo.in_both_precisions(name))


@pytest.mark.parametrize("backwards", [False, True])
def test_collectives_are_sent_in_the_order_that_is_asked_for(backwards: bool) -> None:
    graph = zoo.captured("mlp")
    buckets = in_twos(graph)[:: -1 if backwards else 1]
    sizes = {name: node.meta["val"].nbytes for name, node in graph.gradients().items()}
    rewritten, report = run_pass(Distribute("nobody", 2), graph, buckets)
    assert [c.bytes for c in communication(rewritten).collectives] == [sum(sizes[n] for n in bucket) for bucket in buckets]
    assert report.changes.changed == tuple(name for bucket in buckets for name in bucket)
    nodes = list(rewritten.graph.nodes)
    sent = [i for i, node in enumerate(nodes) if node.target == ALL_REDUCE]
    products = [i for i, node in enumerate(nodes) if node.target == torch.ops.aten.mm.default]
    assert backwards or sent[0] < products[-1]  # before the backward has ended


def test_buckets_follow_from_names_kinds_and_sizes_alone() -> None:
    gradients = [("a", "f", 4), ("b", "h", 2), ("c", "f", 4), ("d", "f", 20), ("e", "h", 2), ("f", "f", 1)]
    assert in_buckets(gradients, 8) == (("a", "c"), ("d",), ("b", "e"), ("f",))
    assert in_buckets(gradients, 100) == (("b", "e"), ("a", "c", "d", "f"))

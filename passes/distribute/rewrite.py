"""All-reduces in a joint graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from graphopt.compat import run_on_metadata
from graphopt.compat.distributed import ALL_REDUCE, WAIT
from graphopt.graph import TrainingGraph

aten = torch.ops.aten


def insert_means(graph: TrainingGraph, buckets: Sequence[Sequence[str]], group: str, size: int) -> None:
    """Return the mean over ranks in the place of every gradient of the buckets.

    A bucket is sent as soon as its last gradient is there and the one before it was sent, and waited for at the end: the
    backward goes on meanwhile.

    Args:
        buckets: names of parameters, in the order in which all ranks send them.
        group: the name of the process group, which has `size` ranks.
    """
    order = {node: i for i, node in enumerate(graph.graph.nodes)}
    gradients, results, output = graph.gradients(), list(graph.results), graph.graph.output_node()
    place = next(i for i, node in enumerate(graph.graph.nodes) if node.op != "placeholder") - 1
    last = list(graph.graph.nodes)[place]
    sent: list[fx.Node] = []
    for bucket in buckets:
        nodes = [gradients[name] for name in bucket]
        newest = max(nodes, key=order.__getitem__)
        if order[newest] > place:
            place, last = order[newest], newest
        put = _Inserting(graph.graph, last)
        flat = [put(aten.reshape.default, node, [-1]) for node in nodes]
        joined = flat[0] if len(flat) == 1 else put(aten.cat.default, flat)
        part = put(aten.mul.Tensor, joined, 1 / size)  # before they are added up, as DistributedDataParallel does
        sent.append(put(ALL_REDUCE, part, "sum", group))
        last = put.last
    means: dict[str, fx.Node] = {}
    put = _Inserting(graph.graph, output.prev)
    for bucket, collective in zip(buckets, sent, strict=True):
        whole, start = put(WAIT, collective), 0
        for name in bucket:
            value = gradients[name].meta["val"]
            end = start + value.numel()
            part = whole if len(bucket) == 1 else put(aten.slice.Tensor, whole, 0, start, end)
            means[name] = put(aten.view.default, part, list(value.shape))
            start = end
    for position, desc in enumerate(graph.outputs):
        if desc.kind == "gradient" and results[position] is not None and desc.target.target in means:
            results[position] = means[desc.target.target]
    output.args = (tuple(results),)
    graph.module.recompile()


class _Inserting:
    """Puts nodes one after another behind `last`."""

    def __init__(self, graph: fx.Graph, last: fx.Node) -> None:
        self.graph = graph
        self.last = last

    def __call__(self, target: Any, *args: Any) -> fx.Node:
        with self.graph.inserting_after(self.last):
            node = self.graph.call_function(target, args)
        node.meta = {"val": run_on_metadata(target, args, {}), "partitioner_tag": "is_backward"}
        self.last = node
        return node

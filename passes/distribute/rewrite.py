"""All-reduces in a joint graph: which gradients are averaged by one, and where.

Every rank has to issue the same collectives in the same order, also where another graph runs on it: one for other lengths, or
the model itself. So both follow from an agreed order of names, and from dtypes and sizes, alone.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from graphopt.compat.distributed import ALL_REDUCE, WAIT
from graphopt.graph import TrainingGraph
from graphopt.transforms.edit import insert_node

aten = torch.ops.aten

BYTES = 25 * 2**20
"""Of a bucket, at most, as in DistributedDataParallel; a larger gradient has one for itself."""


def in_buckets(gradients: Iterable[tuple[str, Hashable, int]], limit: int = BYTES) -> tuple[tuple[str, ...], ...]:
    """Names, bucket by bucket: a bucket is issued when it is full, and the rest in the order of their last gradients.

    Args:
        gradients: names in the agreed order, with what all of a bucket have in common (their dtype and device), and bytes.
        limit: bytes of a bucket.
    """
    full: list[tuple[str, ...]] = []
    filling: dict[Hashable, tuple[list[str], int]] = {}
    for name, kind, size in gradients:
        names, before = filling.pop(kind, ([], 0))
        if names and before + size > limit:
            full.append(tuple(names))
            names, before = [], 0
        filling[kind] = ([*names, name], before + size)
    return (*full, *(tuple(names) for names, _ in filling.values()))


def insert_means(graph: TrainingGraph, buckets: Sequence[Sequence[str]], group: str, size: int) -> None:
    """Return the mean over ranks in the place of every gradient of the buckets.

    A bucket is sent as soon as its last gradient is there and the one before it was sent, and waited for at the end: the
    backward goes on meanwhile.

    Args:
        buckets: names of parameters, in the order in which all ranks send them.
        group: the name of the process group, which has `size` ranks.
    """

    def put(target: Any, *args: Any) -> fx.Node:
        node = insert_node(graph.graph, target, args, anchor, inherited=())
        node.meta["partitioner_tag"] = "is_backward"
        return node

    order = {node: i for i, node in enumerate(graph.graph.nodes)}
    gradients, results, output = graph.gradients(), list(graph.results), graph.graph.output_node()
    anchor = next(node for node in graph.graph.nodes if node.op != "placeholder")
    sent: list[fx.Node] = []
    for bucket in buckets:
        nodes = [gradients[name] for name in bucket]
        newest = max(nodes, key=order.__getitem__)
        if order[newest] >= order[anchor]:
            anchor = newest.next
        flat = [put(aten.reshape.default, node, [-1]) for node in nodes]
        joined = flat[0] if len(flat) == 1 else put(aten.cat.default, flat)
        part = put(aten.mul.Tensor, joined, 1 / size)  # before they are added up, as DistributedDataParallel does
        sent.append(put(ALL_REDUCE, part, "sum", group))
    means: dict[str, fx.Node] = {}
    anchor = output
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

"""Operators that pick rows by number, as the backward of `x[torch.arange(batch), positions]` does.

Below a boundary a sample has another number: its place among those that were kept. Only where all numbers are known to be their
samples' own can they be counted anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from graphopt.analysis.batch_dims import batch_dim, carries_batch, elements_before
from graphopt.analysis.row_rules import VIEWS
from graphopt.compat import OpOverload
from graphopt.errors import PassError
from graphopt.graph import TrainingGraph

aten = torch.ops.aten

_RANGES = (aten.arange.default, aten.arange.start, aten.arange.start_step)

_MAX = 2
"""Mode of a bag of embeddings in which its backward goes by which row was largest, and not by the numbers of bags."""

_SHAPED = frozenset({
    *VIEWS, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.expand.default, aten.t.default, aten.transpose.int,
    aten.permute.default, aten.slice.Tensor, aten.alias.default, aten.detach.default, aten.clone.default, aten._to_copy.default,
})  # fmt: skip
"""Operators that only move numbers, or leave some out."""


def with_own_rows(
    graph: TrainingGraph, node: fx.Node, whole: Mapping[fx.Node, Any], renumber: Callable[[fx.Node], fx.Node]
) -> tuple[Any, ...]:
    """An operator's arguments, with the numbers of samples replaced.

    Args:
        whole: what each node is for the whole batch.
        renumber: makes of numbers of samples those below a boundary.
    Raises:
        PassError: numbers that may be those of other samples.
    """
    names = [a.name for a in node.target._schema.arguments] if isinstance(node.target, OpOverload) else []
    _require_no_other_numbers(graph, node, names, whole)
    several = names[:2] == ["self", "indices"] and isinstance(node.args[1], Sequence)
    if not several and names[:3] != ["self", "dim", "index"]:
        return node.args
    arguments: list[Any] = list(node.args)
    picked = whole[arguments[0]]
    rows = batch_dim(graph, picked)
    if rows is None:
        return node.args
    if several:
        dim, arguments[1] = 0, list(arguments[1])
        for i, numbers in enumerate(arguments[1]):
            value = None if numbers is None else numbers.meta["val"]
            if value is not None and value.dtype in (torch.bool, torch.uint8):  # a mask of as many dimensions as it has
                dim += value.dim()
                continue
            if value is not None and dim == rows.dim:
                arguments[1][i] = _renumbered(graph, node, numbers, picked.shape[dim], renumber)
            dim += 1
    elif arguments[1] % picked.dim() == rows.dim and isinstance(arguments[2], fx.Node):
        arguments[2] = _renumbered(graph, node, arguments[2], picked.shape[rows.dim], renumber)
    return tuple(arguments)


def _require_no_other_numbers(graph: TrainingGraph, node: fx.Node, names: Sequence[str], whole: Mapping[fx.Node, Any]) -> None:
    """Refuse what numbers rows in a way that is not followed: kernels may read and write outside of tensors with fewer rows."""
    given = dict(zip(names, node.args, strict=False))
    if names[:2] == ["self", "index"] and carries_batch(graph, whole[node.args[0]]):  # type: ignore[index]
        remedy = "give indices of its dimensions, that of samples by torch.arange(batch size)"
    elif isinstance(given.get("num_weights"), fx.Node):
        remedy = "index it by torch.arange(batch size) instead of F.embedding"
    elif "offset2bag" in given and given.get("mode") != _MAX:
        remedy = "sum or average what nn.Embedding gives"
    else:
        return
    raise PassError(f"{node.target} numbers rows of the batch in another way than is followed: {remedy}.")


def _renumbered(
    graph: TrainingGraph, node: fx.Node, numbers: fx.Node, size: Any, renumber: Callable[[fx.Node], fx.Node]
) -> fx.Node:
    if not _are_own(graph, numbers, size):
        remedy = "number them by torch.arange(batch size)"
        raise PassError(f"{node.target} picks rows of the batch that may be other samples' ({numbers.name}): {remedy}.")
    return renumber(numbers)


def _are_own(graph: TrainingGraph, numbers: fx.Node, size: Any) -> bool:
    """Whether the numbers of each sample are those of its own rows in a dimension of `size`: a range over it, reshaped."""
    while True:
        value = numbers.meta.get("val")
        rows = batch_dim(graph, value) if isinstance(value, Tensor) else None
        if value is None or rows is None or value.dtype not in (torch.int64, torch.int32):
            return False
        if numbers.target in _RANGES:
            names = [a.name for a in numbers.target._schema.arguments]
            given: dict[str, Any] = {"start": 0, "step": 1, **dict(zip(names, numbers.args, strict=False))}
            end = given["end"].meta["val"] if isinstance(given["end"], fx.Node) else given["end"]
            return (given["start"], given["step"], graph.formula(end)) == (0, 1, graph.formula(size))
        if numbers.target not in _SHAPED:
            return False
        source = numbers.args[0]
        assert isinstance(source, fx.Node)
        before = batch_dim(graph, source.meta["val"])
        if before is None or (numbers.target is aten.slice.Tensor and before != rows):
            return False
        if numbers.target in VIEWS and elements_before(graph, source.meta["val"]) != elements_before(graph, value):
            return False
        numbers = source

"""Taking some rows of tensors in a joint graph, and putting them back; where rows are, `Axis` says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from graphopt.analysis.row_axes import PRIMES, Rules
from graphopt.analysis.row_rules import VIEWS, WITH_SIZES, Axis, first_value
from graphopt.errors import PassError

aten = torch.ops.aten

Emit = Callable[[Any, tuple[Any, ...]], fx.Node]
"""(operator, arguments) -> a new node."""


def some_rows(
    rules: Rules, node: fx.Node, axis: Axis, start: int, stop: int, emit: Emit, size: int | fx.Node | None = None
) -> fx.Node:
    """The rows `start` to `stop` (exclusive) of a tensor.

    Args:
        size: see `split_rows`.
    Raises:
        PassError: sizes beside the rows' dimension depend on the batch.
    """
    split, dim = split_rows(rules, node, axis, rules.length, emit, size)
    return joined_rows(emit(aten.slice.Tensor, (split, dim, start, stop)), node, axis, emit)


def split_rows(
    rules: Rules, node: fx.Node, axis: Axis, length: int, emit: Emit, size: int | fx.Node | None = None
) -> tuple[fx.Node, int]:
    """A tensor of `length` rows with a dimension of its own for them, and which one that is.

    Args:
        length: as `rules` has it.
        size: the same as a size in the graph; None: it is a number.
    Raises:
        PassError: see `some_rows`.
    """
    sizes = list(node.meta["val"].shape)
    if axis.inner == 1 and rules.shape(node)[axis.dim] == length:
        return node, axis.dim
    there = length if size is None else size
    if all(axis.inner % prime for prime in PRIMES):
        rows = [-1, there, *([axis.inner] if axis.inner > 1 else [])]
    else:  # the samples are between neighbouring rows, and their number is a symbol
        rows = [rules.shape(node)[axis.dim] // (length * axis.inner), there, -1]
    return emit(aten.reshape.default, (node, [*_known(sizes[: axis.dim]), *rows, *_known(sizes[axis.dim + 1 :])])), axis.dim + 1


def joined_rows(part: fx.Node, like: fx.Node, axis: Axis, emit: Emit) -> fx.Node:
    """The inverse of `split_rows`: some rows with the dimensions of the tensor `like`."""
    value = first_value(like)
    assert value is not None
    sizes = list(value.shape)
    if part.meta["val"].dim() == len(sizes):
        return part
    return emit(aten.reshape.default, (part, [*_known(sizes[: axis.dim]), -1, *_known(sizes[axis.dim + 1 :])]))


def on_some_rows(rules: Rules, node: fx.Node, args: tuple[Any, ...], axis: Axis, count: int) -> tuple[Any, tuple[Any, ...]]:
    """The operator and the arguments by which `count` rows of a node's result are computed from these rows of what it reads.

    Args:
        args: on these rows; sizes among them are those of all rows.
    Raises:
        PassError: see `some_rows`.
    """
    target = aten.reshape.default if node.target in VIEWS else node.target  # some rows may lie in memory in another way
    if node.target not in WITH_SIZES:
        return target, args
    sizes, size = list(args[1]), rules.shape(node)[axis.dim] // rules.length * count
    if all(size % prime for prime in PRIMES):
        sizes[axis.dim] = size
    elif node.target not in VIEWS and sizes[axis.dim] != -1:
        raise PassError(f"{node.name} has a size beside its rows that depends on the batch")
    else:
        others = [node.meta["val"].shape[d] if sizes[d] == -1 else sizes[d] for d in range(len(sizes))]
        sizes = [-1 if d == axis.dim else other for d, other in enumerate(others)]
        if any(isinstance(other, torch.SymInt) for other in sizes):
            raise PassError(f"{node.name} has two sizes that depend on the batch")
    return target, (args[0], sizes, *args[2:])


def _known(sizes: Sequence[Any]) -> list[int]:
    if not all(isinstance(size, int) for size in sizes):
        raise PassError(f"a tensor has sizes {sizes} beside its rows, which depend on the batch")
    return list(sizes)

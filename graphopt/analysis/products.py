"""Matrix products in a joint graph, seen through what does not change them.

Models flatten, transpose, scale and copy between two products. `as_matrix` looks through that: it says which tensor an operand
is, whether it is transposed, and by what number it was multiplied. Two tensors are the same if they are computed alike.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphopt.analysis.row_rules import VIEWS
from graphopt.compat import expression, has_schema, is_in_place

aten = torch.ops.aten

_SAME_VALUES = frozenset({aten.detach.default, aten.alias.default, aten.clone.default, aten.lift_fresh.default})
_RANDOM = torch.Tag.nondeterministic_seeded


@dataclass(frozen=True)
class Matrix:
    """An operand of a product: `scale` times the matrix that `leaf` is with all but its last dimension flattened.

    Attributes:
        leaf: the node that computes it.
        transposed: the operand is the transpose of that matrix.
        scale: a number.
    """

    leaf: fx.Node
    transposed: bool
    scale: float


def as_matrix(node: fx.Node) -> Matrix:
    """What a node with two dimensions is as a matrix."""
    transposed, scale = False, 1.0
    while node.op == "call_function":
        if (narrow := widened(node)) is not None:
            node = narrow
            continue
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node):
            break
        if _transposes(node):
            transposed = not transposed
        elif (factor := scalar_factor(node)) is not None:
            scale *= factor
        elif not same_tensor(node):
            break
        node = source
    return Matrix(node, transposed, scale)


def _transposes(node: fx.Node) -> bool:
    """Whether a node is the transpose of a matrix, however the model says so."""
    if node.target is aten.permute.default:
        return [int(d) % 2 for d in node.args[1]] == [1, 0] and node.meta["val"].dim() == 2  # type: ignore[union-attr, arg-type]
    if node.target is aten.transpose.int:
        return {int(d) % 2 for d in node.args[1:]} == {0, 1} and node.meta["val"].dim() == 2  # type: ignore[arg-type]
    return node.target is aten.t.default and node.meta["val"].dim() == 2


def _keeps_rows(node: fx.Node) -> bool:
    """Whether a view keeps the last dimension, so that the flattened rows stay the same."""
    before, after = (list(n.meta["val"].shape[-1:]) for n in (node.args[0], node))  # type: ignore[union-attr]
    return bool(before) and all(isinstance(size, int) for size in (*before, *after)) and before == after


def scalar_factor(node: fx.Node) -> float | None:
    """The number that a node multiplies its first argument by; None if it does something else."""
    if node.target in (aten.mul.Tensor, aten.mul.Scalar) and isinstance(node.args[1], (int, float)):
        return float(node.args[1])
    if node.target in (aten.div.Tensor, aten.div.Scalar) and len(node.args) == 2 and isinstance(node.args[1], (int, float)):
        return 1.0 / float(node.args[1]) if node.args[1] else None
    return None


def product(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The operands of a matrix product, with or without a bias; None for any other node."""
    if node.target is aten.mm.default:
        return node.args[0], node.args[1]  # type: ignore[return-value]
    if node.target is aten.addmm.default and not any(v != 1 for v in node.kwargs.values()):
        return node.args[1], node.args[2]  # type: ignore[return-value]
    return None


def value_numbers(graph: fx.Graph) -> dict[fx.Node, int]:
    """A number per node; equal numbers mean equal values, because the same operator has the same arguments.

    Operators that draw random numbers or write to an argument get a number of their own.
    """
    numbers: dict[fx.Node, int] = {}
    known: dict[Any, int] = {}
    for position, node in enumerate(graph.nodes):
        key: Any = position
        if node.op == "call_function" and not _is_impure(node):
            arguments = fx.map_arg((node.args, node.kwargs), lambda n: f"value {numbers[n]}")
            key = (node.target, repr(arguments))
        numbers[node] = known.setdefault(key, position)
    return numbers


def _is_impure(node: fx.Node) -> bool:
    if node.target is operator.getitem or not has_schema(node.target):
        return False
    return _RANDOM in node.target.tags or is_in_place(node.target)  # type: ignore[union-attr]


def same_shape(left: fx.Node, right: fx.Node) -> bool:
    """Whether two nodes' tensors have equal shapes, for every batch size."""
    shapes = [tuple(expression(size) for size in node.meta["val"].shape) for node in (left, right)]
    return shapes[0] == shapes[1]


def same_tensor(node: fx.Node) -> bool:
    """Whether a node passes its first argument on: the same rows, the same values."""
    return (node.target in VIEWS and _keeps_rows(node)) or node.target in _SAME_VALUES


def widened(node: fx.Node) -> fx.Node | None:
    """What a node gives back, unchanged, after it was cast to a wider dtype; None if the node is no such cast."""
    if node.target is aten._to_copy.default:
        wide = node.args[0]
        if isinstance(wide, fx.Node) and wide.target is aten._to_copy.default:
            narrow = wide.args[0]
            assert isinstance(narrow, fx.Node)
            dtypes = [n.meta["val"].dtype for n in (node, wide, narrow)]
            if dtypes[0] == dtypes[2] and all(d.is_floating_point for d in dtypes) and dtypes[1].itemsize > dtypes[0].itemsize:
                return narrow
    return None

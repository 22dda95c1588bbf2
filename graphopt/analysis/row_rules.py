"""Operators that work row by row, one by one: which rows of their arguments the rows of a result are computed from.

A row is one index of a dimension of some tensor, such as one token of a sequence. As tensors are reshaped and transposed, rows
move: `Axis` says where they are. `graphopt.analysis.row_axes` has what follows for a graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from graphopt.compat import OpOverload

if TYPE_CHECKING:
    from graphopt.analysis.row_axes import Rules

aten = torch.ops.aten


@dataclass(frozen=True)
class Axis:
    """Where the rows of a tensor are: T rows in a dimension of outer * T * inner elements.

    Attributes:
        dim: the dimension.
        inner: neighbouring elements of it that belong to one row.
    """

    dim: int
    inner: int = 1


Read = Mapping[fx.Node, Axis | None]
"""By tensor that an operator reads, where its rows are; None: it has none, and is read as a whole."""

VIEWS = frozenset({aten.view.default, aten._unsafe_view.default, aten.reshape.default})

WITH_SIZES = frozenset({*VIEWS, aten.expand.default, aten.select_backward.default, aten.slice_backward.default})
"""Operators whose second argument is the sizes of the result."""

_LIKE_THEIR_ARGUMENT = frozenset({
    aten._to_copy.default, aten.detach.default, aten.alias.default, aten.zeros_like.default, aten.ones_like.default,
    aten.full_like.default, aten.native_dropout.default, aten.contiguous.default, aten.lift_fresh_copy.default,
})  # fmt: skip
"""Operators without torch's tag that compute each element from those at the same place."""

LINEAR = frozenset({
    aten.neg.default, aten.clone.default, aten._to_copy.default, aten.detach.default, aten.alias.default, aten.contiguous.default,
    aten.mul.Scalar, aten.div.Scalar, aten.t.default, aten.transpose.int, aten.permute.default, aten.unsqueeze.default,
    aten.squeeze.dim, aten.squeeze.dims, aten.select.int, aten.slice.Tensor, aten.select_backward.default,
    aten.slice_backward.default, aten.expand.default, *VIEWS,
})  # fmt: skip
"""Operators of one tensor whose result is zero where that is."""

SUMS = frozenset({aten.add.Tensor, aten.sub.Tensor})
PRODUCTS = frozenset({aten.mm.default, aten.bmm.default})
_SUMMING = frozenset({aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default, aten.var.correction})
_SOFTMAX: dict[Any, int] = {
    aten._softmax.default: 1, aten._log_softmax.default: 1, aten._softmax_backward_data.default: 2,
    aten._log_softmax_backward_data.default: 2,
}  # fmt: skip
"""The position of the argument that says along which dimension."""

_NORM_BACKWARD = frozenset({aten.native_layer_norm_backward.default, aten._fused_rms_norm_backward.default})
"""Operators that return the gradient of the input, row by row, then sums over rows."""
_NORM = frozenset({aten.native_layer_norm.default, aten._fused_rms_norm.default})
NLL, NLL_BACKWARD = aten.nll_loss_forward.default, aten.nll_loss_backward.default
NONE, MEAN = 0, 1
"""Reductions of an NLL loss: a value for each row, or their mean."""
ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default
ATTENTION_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default

ROWS_FIRST = frozenset({*_NORM_BACKWARD, ATTENTION_BACKWARD})
"""Operators of several results of which only the first has rows."""


def first_value(node: fx.Node) -> Tensor | None:
    """The tensor that a node records, or the first of several."""
    value = node.meta.get("val")
    if isinstance(value, (tuple, list)) and value:
        value = next((v for v in value if isinstance(v, Tensor)), None)
    return value if isinstance(value, Tensor) else None


def arguments(node: fx.Node) -> tuple[Any, ...]:
    """What a node is called with: nodes, numbers, lists of them."""
    return node.args


def tensors_of(node: fx.Node) -> list[fx.Node]:
    """The tensors that a node reads."""
    return [n for n in node.all_input_nodes if first_value(n) is not None]


def is_elementwise(target: Any) -> bool:
    """Whether an operator computes each element from those at the same place."""
    if not isinstance(target, OpOverload) or target._schema.is_mutable:
        return False
    random = torch.Tag.nondeterministic_seeded in target.tags and target is not aten.native_dropout.default
    return (torch.Tag.pointwise in target.tags or target in _LIKE_THEIR_ARGUMENT) and not random


def is_zero(argument: Any) -> bool:
    """Whether an argument is zero, or a tensor of zeros."""
    if not isinstance(argument, fx.Node):
        return argument == 0
    zeros = (aten.zeros_like.default, aten.new_zeros.default, aten.zeros.default)
    positions: dict[Any, int] = {aten.full.default: 1, aten.scalar_tensor.default: 0, aten.full_like.default: 1}
    value = positions.get(argument.target)
    return argument.target in zeros or (value is not None and arguments(argument)[value] == 0)


def elementwise(rules: Rules, node: fx.Node, axis: Axis) -> Read | None:
    """Each element from those at its place; smaller arguments are broadcast."""
    shape, found = rules.shape(node), {}
    for argument in tensors_of(node):
        sizes = rules.shape(argument)
        dim = axis.dim - (len(shape) - len(sizes))
        found[argument] = replace(axis, dim=dim) if dim >= 0 and sizes[dim] != 1 else None
    return found


def _view(rules: Rules, node: fx.Node, axis: Axis) -> Read | None:
    argument = tensors_of(node)[0]
    there = in_other_sizes(rules.shape(node), axis, rules.shape(argument), rules.length)
    return None if there is None else {argument: there}


def in_other_sizes(shape: tuple[int, ...], axis: Axis, sizes: tuple[int, ...], length: int) -> Axis | None:
    """Where rows are in the same elements with other sizes: as many come before a row, and as many belong to it."""
    if 0 in shape or 0 in sizes:  # such as a quotient of symbols, with primes in their places
        return None
    before = math.prod(shape[: axis.dim]) * (shape[axis.dim] // (length * axis.inner))
    within = axis.inner * math.prod(shape[axis.dim + 1 :])
    for dim, size in enumerate(sizes):
        outside, inside = math.prod(sizes[:dim]), math.prod(sizes[dim + 1 :])
        if before % outside == 0 and within % inside == 0 and size == before // outside * length * (within // inside):
            return Axis(dim, within // inside)
    return None


def _moved(order: Callable[[Rules, fx.Node], list[int]]) -> Callable[[Rules, fx.Node, Axis], Read | None]:
    """Dimensions in another order, `order` of which says where each comes from; -1: from nowhere."""

    def rule(rules: Rules, node: fx.Node, axis: Axis) -> Read | None:
        dim = order(rules, node)[axis.dim]
        return {tensors_of(node)[0]: replace(axis, dim=dim)} if dim >= 0 else None

    return rule


def _transposed(rules: Rules, node: fx.Node) -> list[int]:
    dims = list(range(len(rules.shape(node))))
    one, other = (0, 1) if node.target is aten.t.default else (d % len(dims) for d in arguments(node)[1:3])
    if len(dims) > 1:
        dims[one], dims[other] = dims[other], dims[one]
    return dims


def _permuted(rules: Rules, node: fx.Node) -> list[int]:
    return [d % len(arguments(node)[1]) for d in arguments(node)[1]]


def _with_one_more(rules: Rules, node: fx.Node) -> list[int]:
    """`unsqueeze`, and `select_backward`: one index of a dimension among zeros."""
    dims = len(rules.shape(node))
    new = arguments(node)[1 if node.target is aten.unsqueeze.default else 2] % dims
    return [d - (d > new) if d != new else -1 for d in range(dims)]


def _squeezed(rules: Rules, node: fx.Node) -> list[int]:
    sizes = rules.shape(tensors_of(node)[0])
    given = arguments(node)[1] if isinstance(arguments(node)[1], (list, tuple)) else [arguments(node)[1]]
    gone = {d % len(sizes) for d in given if sizes[d] == 1}
    return [d for d in range(len(sizes)) if d not in gone]


def _selected(rules: Rules, node: fx.Node) -> list[int]:
    dims = len(rules.shape(node)) + 1
    gone = arguments(node)[1] % dims
    return [d for d in range(dims) if d != gone]


def _sliced(rules: Rules, node: fx.Node, axis: Axis) -> Read | None:
    """A part of another dimension, or such a part among zeros."""
    position = 2 if node.target is aten.slice_backward.default else 1
    dim = (arguments(node)[position] if len(arguments(node)) > position else 0) % len(rules.shape(node))
    return {tensors_of(node)[0]: axis} if dim != axis.dim else None


def _multiplied(rules: Rules, node: fx.Node, axis: Axis) -> Read | None:
    """`mm`, `bmm`, and the same with something added: rows of the left factor, or columns of the right."""
    *added, left, right = arguments(node)[:3]
    dims = len(rules.shape(node))
    if left is right or left in added or right in added or not all(isinstance(n, fx.Node) for n in (left, right)):
        return None
    found: dict[Any, Axis | None] = {
        left: axis if axis.dim != dims - 1 else None,
        right: axis if axis.dim != dims - 2 else None,
    }
    for more in added:
        sizes = rules.shape(more)
        dim = axis.dim - (dims - len(sizes))
        found[more] = replace(axis, dim=dim) if dim >= 0 and sizes[dim] != 1 else None
    return found


def _along(rules: Rules, node: fx.Node, axis: Axis) -> Read | None:
    """Softmax and its kind along another dimension."""
    dim = arguments(node)[_SOFTMAX[node.target]] % len(rules.shape(node))
    return elementwise(rules, node, axis) if dim != axis.dim else None


def _reduced(rules: Rules, node: fx.Node, axis: Axis) -> Read | None:
    """A sum, or the like, over other dimensions."""
    argument = tensors_of(node)[0]
    dims = len(rules.shape(argument))
    given = arguments(node)[1] if len(arguments(node)) > 1 else None
    if not given:
        return None
    reduced = {d % dims for d in given}
    kept = list(range(dims)) if len(rules.shape(node)) == dims else [d for d in range(dims) if d not in reduced]
    dim = kept[axis.dim]
    return {argument: replace(axis, dim=dim)} if dim not in reduced else None


def _normalised(rules: Rules, node: fx.Node, axis: Axis) -> Read | None:
    """A normalisation over the last dimensions, or its backward."""
    dims = len(rules.shape(node))
    position = 2 if node.target in _NORM_BACKWARD else 1
    if axis.dim >= dims - len(arguments(node)[position]):
        return None
    return {n: axis if len(rules.shape(n)) == dims else None for n in tensors_of(node)}


def _attended(rules: Rules, node: fx.Node, axis: Axis) -> Read | None:
    """Attention, and its backward: rows are queries; every one reads all keys."""
    backward = node.target is ATTENTION_BACKWARD
    causal = arguments(node)[7] if backward else (arguments(node)[4] if len(arguments(node)) > 4 else False)
    if axis != Axis(2) or causal:
        return None
    with_rows = [arguments(node)[i] for i in ((0, 1, 4, 5) if backward else (0,))]
    whole = [arguments(node)[i] for i in ((2, 3) if backward else (1, 2))]
    if set(with_rows) & set(whole):
        return None
    found: dict[Any, Axis | None] = {**dict.fromkeys(with_rows, axis), **dict.fromkeys(whole, None)}
    mask = node.kwargs.get("attn_mask")
    if isinstance(mask, fx.Node):
        sizes = rules.shape(mask)
        found[mask] = Axis(len(sizes) - 2) if len(sizes) > 1 and sizes[-2] != 1 else None
    return found


def _looked_up(rules: Rules, node: fx.Node, axis: Axis) -> Read | None:
    weight, indices = arguments(node)[:2]
    return {weight: None, indices: axis} if axis.dim < len(rules.shape(node)) - 1 else None


def _picked(rules: Rules, node: fx.Node, axis: Axis) -> Read | None:
    """The gradient of what an NLL loss reads, (N, classes)."""
    gradient, log_probabilities, labels, *others = arguments(node)
    if axis.dim != 0 or len(rules.shape(node)) != 2 or labels is gradient:
        return None
    found: dict[fx.Node, Axis | None] = {n: None for n in others if isinstance(n, fx.Node)}
    found[gradient] = axis if len(rules.shape(gradient)) == 1 else None
    return {**found, log_probabilities: axis, labels: axis}


def _joined(rules: Rules, node: fx.Node, axis: Axis) -> Read | None:
    """Tensors side by side along another dimension."""
    dim = (arguments(node)[1] if len(arguments(node)) > 1 else 0) % len(rules.shape(node))
    return dict.fromkeys(tensors_of(node), axis) if dim != axis.dim else None


RULES: dict[Any, Callable[[Rules, fx.Node, Axis], Read | None]] = {
    **dict.fromkeys(VIEWS, _view),
    **dict.fromkeys((aten.t.default, aten.transpose.int), _moved(_transposed)),
    **dict.fromkeys((aten.squeeze.dim, aten.squeeze.dims), _moved(_squeezed)),
    **dict.fromkeys((aten.slice.Tensor, aten.slice_backward.default), _sliced),
    **dict.fromkeys((*PRODUCTS, aten.addmm.default, aten.baddbmm.default), _multiplied),
    **dict.fromkeys(_SOFTMAX, _along),
    **dict.fromkeys(_SUMMING, _reduced),
    **dict.fromkeys((*_NORM, *_NORM_BACKWARD), _normalised),
    **dict.fromkeys((ATTENTION, ATTENTION_BACKWARD), _attended),
    aten.permute.default: _moved(_permuted),
    aten.unsqueeze.default: _moved(_with_one_more),
    aten.select.int: _moved(_selected),
    aten.select_backward.default: _moved(_with_one_more),
    aten.expand.default: elementwise,
    aten.embedding.default: _looked_up,
    NLL_BACKWARD: _picked,
    aten.cat.default: _joined,
}

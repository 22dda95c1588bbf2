"""Which rows of tensors in a graph are computed from which others, and whether rows of zeros stay zero.

`graphopt.analysis.row_rules` has the operators.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import fx

from graphopt.analysis.row_rules import (
    LINEAR,
    PRODUCTS,
    ROWS_FIRST,
    RULES,
    SUMS,
    VIEWS,
    Axis,
    Read,
    arguments,
    elementwise,
    first_value,
    in_other_sizes,
    is_elementwise,
    is_zero,
)
from graphopt.compat import expression
from graphopt.graph import TrainingGraph

aten = torch.ops.aten

PRIMES = tuple(itertools.accumulate(range(31), lambda prime, _: sympy.nextprime(prime), initial=1_000_003))
"""What symbols in sizes are taken to be, the batch first: what depends on one is a multiple of it, or prime to it.

Symbols that were traced with one number are taken to be one: torch often knows them to be equal without saying so.
"""


@functools.lru_cache(maxsize=10_000)
def _at_primes(size: sympy.Expr, batch: frozenset[sympy.Symbol], others: tuple[tuple[sympy.Symbol, int], ...]) -> int:
    distinct = sorted({traced for _, traced in others})
    own = {symbol: PRIMES[1 + distinct.index(traced) % (len(PRIMES) - 1)] for symbol, traced in others}
    return int(size.subs({**own, **dict.fromkeys(batch, PRIMES[0])}))


@dataclass(frozen=True)
class Rules:
    """What is row by row in one graph.

    Attributes:
        graph: sizes that are symbols are taken to be large primes, of which no other size is a multiple.
        length: T, how many rows there are.
    """

    graph: TrainingGraph
    length: int

    def shape(self, node: fx.Node) -> tuple[int, ...]:
        """Of a tensor, or of the first result of an operator."""
        value = first_value(node)
        assert value is not None
        return tuple(size if isinstance(size, int) else self.number(size) for size in value.shape)

    def number(self, size: Any) -> int:
        """A size with primes in the place of its symbols."""
        return _at_primes(expression(size), self.graph.symbols, tuple(sorted(self.graph.sizes.items(), key=str)))

    def carries(self, node: fx.Node, axis: Axis) -> bool:
        """Whether a tensor can have its rows there."""
        shape = self.shape(node)
        return 0 <= axis.dim < len(shape) and shape[axis.dim] % (self.length * axis.inner) == 0

    def read(self, node: fx.Node, axis: Axis) -> Read | None:
        """What rows of a node's result, at `axis`, are computed from; None if from more than the same rows."""
        if node.op != "call_function":
            return None
        if node.target is operator.getitem:
            source, index = arguments(node)
            return None if index != 0 and source.target in ROWS_FIRST else {source: axis}
        rule = RULES.get(node.target)
        if rule is None and is_elementwise(node.target):
            rule = elementwise
        found = None if rule is None else rule(self, node, axis)
        if found is None or any(a is not None and not self.carries(n, a) for n, a in found.items()):
            return None
        return found

    def written(self, node: fx.Node, argument: fx.Node, axis: Axis) -> Axis | None:
        """Where rows of an argument end up in a node's result, if they do."""
        if first_value(node) is None:
            return None
        shape = self.shape(node)
        if node.target in VIEWS:
            found = in_other_sizes(self.shape(argument), axis, shape, self.length)
            places = [found] if found is not None else []
        else:
            places = [replace(axis, dim=dim) for dim in range(len(shape))]
        for there in places:
            if self.carries(node, there) and (self.read(node, there) or {}).get(argument) == axis:
                return there
        return None

    def keeps_zeros(self, node: fx.Node, zeros: Mapping[fx.Node, Axis]) -> bool:
        """Whether rows of a node's result are zero where those of the arguments in `zeros` are."""
        target, first = node.target, arguments(node)[0] if arguments(node) else None
        if target in LINEAR or target is operator.getitem:
            return first in zeros
        if target is aten.mul.Tensor or target in PRODUCTS:
            return any(argument in zeros for argument in arguments(node))
        if target in (aten.div.Tensor, aten.sum.dim_IntList):
            return first in zeros and not any(argument in zeros for argument in arguments(node)[1:])
        if target in SUMS:
            return all(argument in zeros for argument in arguments(node)[:2])
        if target is aten.where.self:
            return all(argument in zeros or is_zero(argument) for argument in arguments(node)[1:])
        if target is aten.masked_fill.Scalar:
            return first in zeros and arguments(node)[2] == 0
        gradient = str(target).partition(".")[2].partition(".")[0].endswith("_backward") and is_elementwise(target)
        gradient = gradient or target in ROWS_FIRST or str(target).endswith("_backward_data.default")
        return gradient and first in zeros  # gradients come first, and enter linearly

    def is_linear(self, node: fx.Node, gradients: Mapping[fx.Node, Axis]) -> bool:
        """Whether a node is linear in `gradients`, so that a factor of theirs may be applied to its result.

        A cast is taken to be so where it rounds each number by a part of itself. Integers and truth values do not. Types of 8
        bits and fewer do so in a range that a factor leaves. That of float16 is left to the caller.
        """
        if not self.keeps_zeros(node, gradients):
            return False
        if node.target is aten._to_copy.default:
            dtype = node.meta["val"].dtype
            return bool(dtype.is_complex or (dtype.is_floating_point and dtype.itemsize > 1))
        if node.target in SUMS:
            return True
        return sum(argument in gradients for argument in arguments(node)) == 1  # a square is not, nor what they decide

    def summed(self, node: fx.Node, zeros: Mapping[fx.Node, Axis]) -> Read | None:
        """Where a node sums over rows, all but some of which are zero: where these rows are in what it reads."""
        target, args = node.target, arguments(node)
        if target in PRODUCTS:
            left, right = args[0], args[1]
            inner = {left: len(self.shape(left)) - 1, right: len(self.shape(right)) - 2}
            for one, other in ((left, right), (right, left)):
                axis = zeros.get(one)
                if left is not right and axis is not None and axis.dim == inner[one]:
                    there = Axis(inner[other], axis.inner)
                    if zeros.get(other, there) == there:
                        return {one: axis, other: there}
        if target is aten.sum.dim_IntList and (axis := zeros.get(args[0])) is not None:
            dims = len(self.shape(args[0]))
            if axis.dim in {d % dims for d in args[1] or range(dims)}:
                return {args[0]: axis}
        return None

"""The orders in which P'(AB)Q can be computed, for a product AB (m x N by N x n) of which only P'ABQ (s x s) is wanted (LSP)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from graphopt.passes.lsp.projectors import entries_per_column

ORDERS = ("activations", "left", "right", "formed")
"""(P'A)(BQ); ((P'A)B)Q; P'(A(BQ)); P'(AB)Q, the last of which alone ever holds an (m x n) matrix."""


@dataclass(frozen=True)
class CompressionShape:
    """One product and its projectors.

    Attributes:
        m, n: sizes of the weight.
        rows: N, the samples (or tokens) that AB sums over; an int or an expression.
        size, nonzeros: s and d.
    """

    m: int
    n: int
    rows: Any
    size: int
    nonzeros: int

    @property
    def left_entries(self) -> int:
        """Entries per column of P."""
        return entries_per_column(self.m, self.nonzeros, self.size)

    @property
    def right_entries(self) -> int:
        """Entries per column of Q."""
        return entries_per_column(self.n, self.nonzeros, self.size)


def steps(order: str, shape: CompressionShape) -> tuple[list[tuple[Any, Any, Any]], list[tuple[Any, Any, Any, Any]]]:
    """What an order computes: dense products (m, k, n), and sums (rows of the result, entries, rows of the table, width)."""
    m, n, rows, s = shape.m, shape.n, shape.rows, shape.size
    left, right = shape.left_entries, shape.right_entries
    product, sums = {
        "activations": ((s, rows, s), [(s, left, m, rows), (s, right, n, rows)]),
        "left": ((s, rows, n), [(s, left, m, rows), (s, right, n, s)]),
        "right": ((m, rows, s), [(s, right, n, rows), (s, left, m, s)]),
        "formed": ((m, rows, n), [(s, left, m, n), (s, right, n, s)]),
    }[order]
    if shape.nonzeros == s:
        return [product, *((r, table, width) for r, _, table, width in sums)], []
    return [product], sums


def order_flops(order: str, shape: CompressionShape) -> Any:
    """FLOPs of an order, 2 per multiply-add."""
    dense, sparse = steps(order, shape)
    return sum(2 * a * b * c for a, b, c in dense) + sum(2 * r * e * w for r, e, _, w in sparse)

"""Rows that nobody reads are not computed.

Map: `technique` (what it decides), `places` (where rows are read: the same ones of every sample, or, in `of_each`, one of each),
`demand` (what follows: what is computed for these rows alone, and which gradients are zero), `rewrite` (the same on some rows).
"""

from graphopt.passes.dead_rows.technique import DeadRows

__all__ = ["DeadRows"]

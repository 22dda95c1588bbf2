"""Rows that nobody reads are not computed.

Map: `technique` (what it decides), `demand` (which rows are read, and which gradients are zero), `rewrite` (the same on
some rows).
"""

from graphopt.passes.dead_rows.technique import DeadRows

__all__ = ["DeadRows"]

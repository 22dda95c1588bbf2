"""Logits of a language model, and their gradients, for a few tokens at a time.

Map: `technique` (what it decides), `heads` (where, after `matrices`), `rewrite` (the same in chunks), `program` (of one chunk).
"""

from graphopt.passes.linear_cross_entropy.technique import LinearCrossEntropy

__all__ = ["LinearCrossEntropy"]

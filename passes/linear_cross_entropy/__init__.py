"""Logits of a language model, and their gradients, for a few tokens at a time.

Map: `technique` (what it decides), `heads` (where), `rewrite` (the same in chunks of tokens), `ops` (their order).
"""

from graphopt.passes.linear_cross_entropy.technique import LinearCrossEntropy

__all__ = ["LinearCrossEntropy"]

"""RunLoRA: the products of layers with adapters, in the order that costs least.

Map: `technique` (decisions), `rewrite` (the pass), `sites` (where), `orders` (what an order costs), `choose`.
"""

from graphopt.passes.runlora.technique import MergeErrors, RunLora

__all__ = ["MergeErrors", "RunLora"]

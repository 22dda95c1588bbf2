"""VCAS: rows of the backward are left out without bias.

Map: `technique` (refusals, decisions), `rewrite` (the pass), `sliced_backward` (B rows become k), `own_rows` (samples that are
picked by number), `boundaries` and `products` (where), `independence` (whether samples mix), `ops` (which rows). Adapting ratios:
`controller`, `calibration`, `ratios`, `variance_probe` and `measuring`.
"""

from graphopt.passes.vcas.rewrite import ROWS, TOKENS
from graphopt.passes.vcas.technique import Ratios, SampleSizes, Vcas

__all__ = ["ROWS", "TOKENS", "Ratios", "SampleSizes", "Vcas"]

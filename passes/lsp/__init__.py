"""LSP: weight gradients in a subspace, stepped there, on the host if that is asked for.

Map: `technique` (refusals, decisions), `compressor` (the rewriting), `weight_gradients` (where), `choose` (in which order P'GQ is
computed); training: `subspaces`, `compressed_weight`, `projectors`, `learning`, `cleared`, `optimizer`; the host: `offload`,
`host_adam`, `transfer`.
"""

from graphopt.passes.lsp.technique import Compressed, Lsp

__all__ = ["Compressed", "Lsp"]

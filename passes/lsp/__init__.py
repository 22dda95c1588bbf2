"""LSP: weight gradients in a subspace, stepped there, on the host if that is asked for.

Map: `technique` (refusals, decisions), `compressor` (the rewriting), `weight_gradients` (where), `orders` and `choose` (in which
order P'GQ is computed); training: `subspaces`, `projectors`, `learning`, `optimizer`, `subspaces_state`; the host: `offload`,
`offload_nodes`, `host_adam`, `workers`, `transfer`, `transition`.
"""

from graphopt.passes.lsp.technique import Compressed, Lsp

__all__ = ["Compressed", "Lsp"]

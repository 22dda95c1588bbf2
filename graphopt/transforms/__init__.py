"""Joint graphs, changed: into the form that passes know, for the gradients that exist, and into a forward and a backward.

Map: `canonicalize`, `edit` (nodes in and out, in order), `symbolic_zeros` (gradients that do not exist), `verify`, `partition`.
"""

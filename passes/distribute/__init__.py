"""Data parallel training in the graph: the gradients that remain are averaged over ranks, in buckets, inside the backward.

`technique` plans, `rewrite` has the order of collectives and puts them into a graph, `reduction` averages what no graph has
averaged: after `no_sync()`, and where a step is not one graph.
"""

from graphopt.passes.distribute.technique import Distribute as Distribute, Reduced as Reduced

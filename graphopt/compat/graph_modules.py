"""Graph modules that generate their Python code when it is first asked for.

Most are rewritten and interpreted, or read by Inductor: nobody runs or prints their code, which takes about a quarter of the time
of a rewrite.
"""

from __future__ import annotations

import contextlib

from torch import fx, nn
from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module


def graph_module(root: nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """A module of `graph` with the attributes of `root` that it reads."""
    return _LazyGraphModule(root, graph)


def lazy_graph_modules() -> contextlib.AbstractContextManager[None]:
    """torch's own functions make such modules, too."""
    return _use_lazy_graph_module(True)


def copied(graph: fx.Graph) -> fx.Graph:
    """A copy that keeps metadata."""
    copy = fx.Graph()
    result = copy.output(copy.graph_copy(graph, {}))
    result.meta = dict(graph.output_node().meta)
    return copy

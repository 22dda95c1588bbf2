"""Verification of a rewritten graph: structure, and every recorded shape against a fresh propagation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from graphopt import compat
from graphopt.compat import pytree
from graphopt.errors import PassError
from graphopt.graph import TrainingGraph
from graphopt.specialise import concrete_inputs


def verify(graph: TrainingGraph, before: TrainingGraph | None = None) -> None:
    """Check that `graph` is consistent: nodes in order, descriptors matching, and shapes and dtypes as recorded.

    Shapes are compared at the captured batch size, with tensors that have no memory.

    Args:
        before: a consistent graph that this one was cloned from; nodes that compute the same in both are not computed again.
    Raises:
        PassError: names the first node that is wrong.
    """
    try:
        graph.graph.lint()
    except RuntimeError as error:
        raise PassError(f"the rewritten graph is malformed: {error}") from error
    if len(graph.placeholders) != len(graph.inputs) or len(graph.results) != len(graph.outputs):
        raise PassError("the rewritten graph's inputs or outputs no longer match their descriptors.")
    mode = compat.new_fake_mode()
    with mode, torch.no_grad(), compat.no_autocast():
        _Checker(graph, before).run(*concrete_inputs(graph, graph.batch_size, mode))


class _Checker(fx.Interpreter):
    """Runs the graph on fake tensors and compares each result with the node's metadata."""

    def __init__(self, graph: TrainingGraph, before: TrainingGraph | None) -> None:
        super().__init__(graph.module)
        self.training_graph = graph
        self.before = {} if before is None else {node.name: node for node in before.graph.nodes}

    def run_node(self, n: fx.Node) -> Any:
        """Run one node; raises `PassError` if it disagrees with its metadata."""
        recorded = n.meta.get("val")
        if isinstance(recorded, Tensor) and self._known(n):
            at, batch_size = self.training_graph.at, self.training_graph.batch_size
            shape, strides = ([at(s, batch_size) for s in sizes] for sizes in (recorded.shape, recorded.stride()))
            return torch.empty_strided(shape, strides, dtype=recorded.dtype, device=recorded.device)
        if isinstance(recorded, torch.SymFloat) and self._known(n):
            return 1.0  # read off a tensor, which has no memory here; no shape depends on it
        try:
            result = super().run_node(n)
        except Exception as error:
            raise PassError(f"node {n.name} ({n.target}) cannot run: {error}") from error
        if n.op == "call_function" and "val" in n.meta:
            expected, actual = pytree.tree_leaves(n.meta["val"]), pytree.tree_leaves(result)
            for recorded, computed in zip(expected, actual, strict=False):
                self._compare(n, recorded, computed)
        return result

    def _known(self, node: fx.Node) -> bool:
        """Whether a node does what it did before, with what the same nodes give it."""
        pairs = [(n, self.before.get(n.name)) for n in (node, *node.all_input_nodes)]
        if node.op != "call_function" or any(b is None or n.meta.get("val") is not b.meta.get("val") for n, b in pairs):
            return False
        was = self.before[node.name]
        return node.target is was.target and repr((node.args, node.kwargs)) == repr((was.args, was.kwargs))

    def _compare(self, node: fx.Node, recorded: Any, computed: Any) -> None:
        if not (isinstance(recorded, Tensor) and isinstance(computed, Tensor)):
            return
        at = self.training_graph.at
        shape = tuple(at(s, self.training_graph.batch_size) for s in recorded.shape)
        if shape != tuple(computed.shape) or recorded.dtype != computed.dtype:
            raise PassError(
                f"node {node.name} ({node.target}) is recorded as {recorded.dtype}{list(shape)} but computes "
                f"{computed.dtype}{list(computed.shape)}."
            )

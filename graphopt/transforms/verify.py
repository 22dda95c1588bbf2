"""Verification of a rewritten graph: structure, and every recorded shape against a fresh propagation."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from graphopt import compat
from graphopt.compat import pytree
from graphopt.errors import PassError
from graphopt.graph import TrainingGraph
from graphopt.specialise import concrete, concrete_inputs

_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)
"""Types of what is read off sizes, or off tensors."""


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
        _check_values(graph, before, concrete_inputs(graph, graph.batch_size, mode))


def _check_values(graph: TrainingGraph, before: TrainingGraph | None, inputs: Sequence[Any]) -> None:
    """Compute the nodes that are new on tensors without memory, and compare each result with the node's metadata.

    What a node does that was there before is known; it gets a value only where a new node reads it.
    """
    earlier = {} if before is None else {node.name: node for node in before.graph.nodes}
    new = {n for n in graph.graph.nodes if n.op not in ("placeholder", "output") and not _known(n, earlier)}
    read = {n for node in new for n in node.all_input_nodes}
    values: dict[fx.Node, Any] = dict(zip(graph.placeholders, inputs, strict=True))
    for node in graph.graph.nodes:
        if node in new:
            values[node] = _computed(graph, node, values)
        elif node in read and node not in values:
            values[node] = _recorded(graph, node.meta["val"])


def _computed(graph: TrainingGraph, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    """The result of a node; raises `PassError` if it disagrees with its metadata."""
    if node.op == "get_attr":
        return operator.attrgetter(str(node.target))(graph.module)
    operation: Any = node.target
    args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
    try:
        result = operation(*args, **kwargs)
    except Exception as error:
        raise PassError(f"node {node.name} ({node.target}) cannot run: {error}") from error
    if "val" in node.meta:
        for recorded, computed in zip(pytree.tree_leaves(node.meta["val"]), pytree.tree_leaves(result), strict=False):
            _compare(graph, node, recorded, computed)
    return result


def _recorded(graph: TrainingGraph, value: Any) -> Any:
    """What a known node gives: an empty tensor, or a number that no shape depends on."""
    if isinstance(value, (torch.SymFloat, torch.SymBool)):
        return 1.0 if isinstance(value, torch.SymFloat) else True  # read off a tensor, which has no memory here
    return concrete(graph, value, graph.batch_size)


def _known(node: fx.Node, earlier: Mapping[str, fx.Node]) -> bool:
    """Whether a node does what it did before, with what the same nodes give it; only of nodes with one result."""
    if node.op != "call_function" or not isinstance(node.meta.get("val"), (Tensor, *_NUMBERS)):
        return False
    pairs = [(n, earlier.get(n.name)) for n in (node, *node.all_input_nodes)]
    if any(b is None or n.meta.get("val") is not b.meta.get("val") for n, b in pairs):
        return False
    was = earlier[node.name]
    return node.target is was.target and repr((node.args, node.kwargs)) == repr((was.args, was.kwargs))


def _compare(graph: TrainingGraph, node: fx.Node, recorded: Any, computed: Any) -> None:
    if not (isinstance(recorded, Tensor) and isinstance(computed, Tensor)):
        return
    shape = tuple(graph.at(s, graph.batch_size) for s in recorded.shape)
    if shape != tuple(computed.shape) or recorded.dtype != computed.dtype:
        raise PassError(
            f"node {node.name} ({node.target}) is recorded as {recorded.dtype}{list(shape)} but computes "
            f"{computed.dtype}{list(computed.shape)}."
        )

"""Substitution of the batch symbol: the symbolic joint graph becomes a static one for the batch at hand, without a trace
of the user's model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from graphopt import compat
from graphopt.errors import PassError
from graphopt.graph import TrainingGraph


def concrete_inputs(graph: TrainingGraph, batch_size: int, fake_mode: object) -> list[Any]:
    """Fake tensors and numbers for every placeholder of `graph`, with `B` set to `batch_size`."""
    with fake_mode:  # type: ignore[attr-defined]
        return [concrete(graph, node.meta.get("val"), batch_size) for node in graph.placeholders]


def concrete(graph: TrainingGraph, value: Any, batch_size: int) -> Any:
    """An empty tensor like one of `graph`, or a number of it, with `B` set to `batch_size`."""
    if not isinstance(value, Tensor):
        return graph.at(value, batch_size) if isinstance(value, torch.SymInt) else value
    shape, strides = ([graph.at(s, batch_size) for s in sizes] for sizes in (value.shape, value.stride()))
    return torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device)


def specialise(graph: TrainingGraph, batch_size: int) -> TrainingGraph:
    """A static copy of `graph` for one batch size.

    Args:
        batch_size: samples; must satisfy `graph.accepts`.
    Raises:
        PassError: the graph's trace relied on a condition that this batch size does not meet.
    """
    if not graph.accepts(batch_size):
        raise PassError(f"the captured graph is not valid for a batch of {batch_size}; capture the model again.")
    fake_mode = compat.new_fake_mode()
    module = compat.retrace(graph.module, concrete_inputs(graph, batch_size, fake_mode), fake_mode, False)
    _name_placeholders(graph, module)
    return replace(graph, module=module, symbols=frozenset(), batch_size=batch_size, guards=(), minimum_batch=1)


def symbolic(graph: TrainingGraph, decompose: bool = False) -> TrainingGraph:
    """A copy of `graph` that can be partitioned as `specialise`'s can, with shapes still in terms of `B`.

    Args:
        decompose: also rewrite operators to those that Inductor lowers.
    """
    if decompose:
        values = [node.meta["val"] for node in graph.placeholders]
        module = compat.retrace(graph.module, values, compat.fake_mode_of(values), decompose)
    else:
        module = graph.clone().module
        module.graph.output_node().meta.pop("desc", None)  # it lacks what passes have added, which the partitioner then drops
    _name_placeholders(graph, module)
    return replace(graph, module=module)


def _name_placeholders(graph: TrainingGraph, module: fx.GraphModule) -> None:
    """The partitioner tells inputs from tangents by these names."""
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    for position, (desc, node) in enumerate(zip(graph.inputs, placeholders, strict=True)):
        node.name = node.target = f"{'tangents' if desc.kind == 'tangent' else 'primals'}_{position + 1}"
        node.meta.pop("partitioner_tag", None)
    module.recompile()

"""Copies that Inductor makes to run convolutions on channels-last tensors.

On the CPU every convolution runs channels-last: operands that come in another layout are copied first, and what was copied is
what the backward gets. Pointwise operators keep the layout, so a view that merges channels with something else has to copy.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
from torch import Tensor, fx

from graphopt.analysis.fusion import is_pointwise

aten = torch.ops.aten


def copied_operands(forward: fx.GraphModule) -> dict[str, tuple[int, int]]:
    """Graph inputs that a convolution needs a channels-last copy of: first and last position of such a convolution."""
    spans: dict[str, tuple[int, int]] = {}
    calls = [n for n in forward.graph.nodes if n.op == "call_function" and n.target is not operator.getitem]
    for position, node in enumerate(calls):
        if node.target is not aten.convolution.default or not _on_cpu(node):
            continue
        for operand in node.args[:2]:
            if isinstance(operand, fx.Node) and operand.op == "placeholder" and not _is_channels_last(operand.meta["val"]):
                first, _ = spans.get(operand.name, (position, position))
                spans[operand.name] = (first, position)
    return spans


def channels_last_nodes(module: fx.GraphModule, inputs: Iterable[str]) -> set[fx.Node]:
    """Nodes whose result is channels-last: of convolutions, and of pointwise operators on such.

    Args:
        inputs: names of placeholders that are.
    """
    names = set(inputs)
    found: set[fx.Node] = set()
    for node in module.graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder":
            if node.name in names:
                found.add(node)
        elif node.target is operator.getitem:
            if node.args[0] in found:
                found.add(node)
        elif node.target in (aten.convolution.default, aten.convolution_backward.default):
            if _on_cpu(node):
                found.add(node)
        elif isinstance(value, Tensor) and value.dim() == 4 and is_pointwise(node) and found.intersection(node.all_input_nodes):
            found.add(node)
    return found


def copied_views(module: fx.GraphModule, channels_last: set[fx.Node]) -> set[fx.Node]:
    """Reshapes that are no views, because what they reshape is channels-last."""
    return {
        node
        for node in module.graph.nodes
        if node.target in (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
        and node.args[0] in channels_last
        and node.meta["val"].dim() != 4
        and _has_space(node.args[0].meta["val"])
    }


def _has_space(value: Tensor) -> bool:
    return value.dim() == 4 and bool(value.shape[1] != 1) and bool(value.shape[2] != 1 or value.shape[3] != 1)


def _is_channels_last(value: Tensor) -> bool:
    return value.dim() != 4 or value.shape[1] == 1 or bool(value.stride()[1] == 1)


def _on_cpu(node: fx.Node) -> bool:
    return torch.backends.mkldnn.is_available() and node.args[0].meta["val"].device.type == "cpu"  # type: ignore[union-attr]

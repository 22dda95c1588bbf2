"""FLOPs of one operator: torch's own registry, extended where it lacks an operator, and corrected for grouped convolutions.

A multiply-add is 2 FLOPs, as in `torch.utils.flop_counter`. Element-wise work is not counted, there or here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from graphopt.compat import pytree
from graphopt.ops.by_tokens import by_tokens_flops
from graphopt.ops.sparse import combine_rows_flops

aten = torch.ops.aten


def _attention(query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> Any:
    """QK^T and PV: 2 * B * H * S_q * S_k * (D_qk + D_v), with the heads H of the queries (keys may have fewer)."""
    batch, heads, queries, size = query
    return 2 * batch * heads * queries * key[2] * (size + value[3])


def _attention_backward(grad_out: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    """dQ, dK and the recomputed QK^T, dV and dP, as torch counts its CUDA kernels."""
    batch, heads, queries, size = query
    return 2 * batch * heads * queries * key[2] * (3 * size + 2 * value[3])


def _grouped(left: Any, right: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> Any:
    """A product per expert, each of its own tokens: (S, K) x (G, K, N), or for gradients of weights (K, S) x (S, N)."""
    groups = left[0] if len(left) == len(right) == 3 else 1
    return 2 * groups * left[-2] * left[-1] * right[-1]


def _trilinear(first: Any, second: Any, third: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> Any:
    """Of `nn.Bilinear` and of each of its gradients: 2 * B * out * in1 * in2. Each tensor lacks the dimensions in `args`."""
    rank = len(first) + len(args[0])
    sizes: dict[int, Any] = {}
    for shape, lacks in zip((first, second, third), args, strict=False):
        sizes.update(zip((d for d in range(rank) if d not in lacks), shape, strict=True))
    return 2 * math.prod(sizes.values())


def _distances(left: Any, right: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> Any:
    """Of (M, D) and (N, D), as one product of rows with two entries more: 2 * M * N * (D + 2)."""
    return 2 * math.prod(left[:-1]) * right[-2] * (left[-1] + 2)


def _convolution_backward(
    gradient: Any, inputs: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: bool, *args: Any,
    **kwargs: Any,
) -> Any:  # fmt: skip
    """Of each gradient, of input and weight, what the forward takes: 2 * B * places * |W|, where W has inputs of one group.

    torch counts the weight's as many times as there are groups.
    """
    places = inputs if transposed else gradient
    return 2 * inputs[0] * math.prod(places[2:]) * math.prod(weight) * sum(args[-1][:2])


_BY_NAME: dict[str, Callable[..., Any]] = {
    "transformers.grouped_mm_fallback": _grouped,
    "transformers.grouped_mm_fallback_backward": lambda left, right, *_, **__: 2 * _grouped(left, right),  # whichever is needed
}
"""Formulas of operators that exist once a library has been imported."""

ADDED_FORMULAS: dict[Any, Callable[..., Any]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    aten._scaled_dot_product_fused_attention_overrideable: _attention,
    aten._scaled_dot_product_fused_attention_overrideable_backward: _attention_backward,
    aten.mv: lambda matrix, vector, **_: 2 * math.prod(matrix),
    aten.addmv: lambda added, matrix, vector, **_: 2 * math.prod(matrix),
    aten.addbmm: lambda added, left, right, **_: 2 * math.prod(left) * right[2],
    aten.dot: lambda left, right, **_: 2 * left[0],
    aten.vdot: lambda left, right, **_: 2 * left[0],
    aten._grouped_mm: _grouped,
    aten._trilinear: _trilinear,
    aten._euclidean_dist: _distances,
    torch.ops.graphopt.combine_rows: combine_rows_flops,
    torch.ops.graphopt.by_tokens: by_tokens_flops,
}
"""Formulas that torch's registry lacks, or has wrong; `FlopCounterMode(custom_mapping=...)` compares like with like by them."""

for _packet in list(ADDED_FORMULAS):
    if _packet in flop_registry:
        del ADDED_FORMULAS[_packet]
ADDED_FORMULAS[aten.convolution_backward] = _convolution_backward


def _shape(value: Any) -> Any:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else value


def node_flops(node: fx.Node) -> Any:
    """FLOPs of a node of an ATen graph: an int, or a symbolic int where its shapes are symbolic.

    Nodes are read through `meta["val"]`; operators without a formula cost 0. Of those that run graphs, `torch.cond` costs what
    its dearest branch does, `map` and `scan` theirs for every slice, and others, such as `while_loop`, theirs once.
    """
    if node.op != "call_function":
        return 0
    packet = getattr(node.target, "overloadpacket", node.target)
    if (named := _BY_NAME.get(str(packet))) is not None:
        ADDED_FORMULAS[packet] = named  # for those who count with it
    if packet in ADDED_FORMULAS:
        args, kwargs = pytree.tree_map(lambda x: _shape(_value(x)), (node.args, dict(node.kwargs)))
        return ADDED_FORMULAS[packet](*args, **kwargs)
    formula = flop_registry.get(packet)
    if formula is None:
        inner = [sum(map(node_flops, graph.nodes)) for graph in _graphs_of(node)]
        return functools.reduce(torch.sym_max, inner, 0) if str(packet) == "cond" else sum(inner) * _slices(node)
    args, kwargs = pytree.tree_map(_value, (node.args, dict(node.kwargs)))
    return formula(*args, **kwargs, out_val=node.meta["val"])


def _slices(node: fx.Node) -> Any:
    """How often a node runs the graphs that it takes, as far as its arguments say."""
    position = {"map_impl": 1, "scan": 2}.get(str(node.target))
    sliced: Any = () if position is None else node.args[position]
    return sliced[0].meta["val"].shape[0] if sliced else 1


def _graphs_of(node: fx.Node) -> list[fx.Graph]:
    """The graphs that a node takes as arguments, as far as its own graph's module is known."""
    owner = node.graph.owning_module
    names = [str(n.target) for n in node.all_input_nodes if n.op == "get_attr" and owner is not None]
    found = [getattr(owner, name, None) for name in names]
    return [module.graph for module in found if isinstance(module, fx.GraphModule)]


def _value(x: Any) -> Any:
    return x.meta.get("val") if isinstance(x, fx.Node) else x

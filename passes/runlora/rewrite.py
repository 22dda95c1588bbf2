"""Contraction orders of layers with low-rank adapters (RunLoRA, section 3).

A layer Y = XW + c(XA)B and its gradients are chains of matrix products, which can be computed in any order, and W + cAB can
be formed first. Which order costs least depends on rows, sizes and rank; `graphopt.passes.runlora.choose` chooses, this pass
rewrites.

Preserves: EXACT, to the rounding of the products.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from graphopt.passes.base import Changes
from graphopt.passes.runlora.layers import Gradient, LoraLayer
from graphopt.passes.runlora.orders import AUTOGRAD, Order, all_orders, order_flops
from graphopt.passes.runlora.sites import find_lora_sites
from torch import fx

from graphopt.analysis.products import as_matrix, product, same_tensor, value_numbers
from graphopt.analysis.sums import summed_with
from graphopt.compat import RECOMPUTE, SAVE, is_recomputed
from graphopt.errors import PassError
from graphopt.graph import TrainingGraph, ancestors
from graphopt.transforms.edit import CHECKPOINTED, ORIGIN, insert_node, simplify_sizes, sort_nodes

aten = torch.ops.aten


def reorder(graph: TrainingGraph, orders: Mapping[str, Order | None]) -> Changes:
    """Give each layer that is named its order, in place, or where that is None the one with the fewest FLOPs."""
    sites = find_lora_sites(graph)
    layers = {layer.name: layer for layer in sites.layers}
    unknown = sorted(set(orders) - set(layers))
    if unknown:
        raise PassError(f"no layer with adapters that can be reordered: {', '.join(unknown)}.")
    rewriter = _Rewriter(graph)
    changed = []
    for name, layer in layers.items():
        if name not in orders:
            continue
        order = (orders[name] or _fewest_flops(layer, graph.batch_size)).for_layer(layer.shape)
        if order != AUTOGRAD.for_layer(layer.shape):
            rewriter.rewrite(layer, order)
            changed.append(name)
    batched = rewriter.finish([layer for name, layer in layers.items() if name in orders])
    done = {*changed, *batched}
    kept = {name: "autograd's own order is the cheapest" for name in layers if name not in done}
    return Changes(tuple(name for name in layers if name in done), {**sites.left_alone, **kept})


def _fewest_flops(layer: LoraLayer, batch_size: int) -> Order:
    """The legal order with the fewest FLOPs; among equals the first of `all_orders`."""
    shape = layer.shape.at(batch_size)
    return min(legal_orders(layer), key=lambda order: order_flops(order, shape))


def legal_orders(layer: LoraLayer) -> list[Order]:
    """The orders that give the layer's own result."""
    return [o for o in all_orders(layer.shape) if refusal(layer, o) == ""]


def refusal(layer: LoraLayer, order: Order) -> str:
    """Why an order cannot be used for a layer; "" if it can."""
    if order.merges and layer.unmergeable:
        return layer.unmergeable
    if (order.weight_grad_a or order.weight_grad_b) and not layer.shares_input:
        return "the adapter's input is not the layer's, as with dropout: X'dY would not serve both"
    if order.merged_input_grad and layer.grad_input is not None:
        if any(a.grad_input is None for a in layer.adapters):
            return "an adapter has no part in its input's gradient, or one that is not known"
        if any(not a.input_summed for a in layer.adapters):
            return "the parts of its input's gradient are not added up in one place"
    return ""


def _between(first: fx.Node, last: fx.Node) -> list[fx.Node]:
    """`first` and the views of it that `last` reads."""
    reached = ancestors([last])
    nodes = [first]
    for node in nodes:
        nodes += [u for u in node.users if u in reached and u is not last and same_tensor(u)]
    return nodes


class _Rewriter:
    """Carries out orders, layer by layer, on one graph."""

    def __init__(self, graph: TrainingGraph) -> None:
        self.graph = graph
        self.replaced: dict[fx.Node, fx.Node] = {}
        self.order = {node: float(i) for i, node in enumerate(graph.graph.nodes)}

    def rewrite(self, layer: LoraLayer, order: Order) -> None:
        reason = refusal(layer, order)
        if reason:
            raise PassError(f"{layer.name} cannot be computed as {order}: {reason}.")
        merged = self._merged(layer, order) if order.merges else None
        if order.merged_forward:
            assert merged is not None
            layer.base.update_arg(2 if layer.base.target is aten.addmm.default else 1, merged)
            for adapter in layer.adapters:
                self._replace(adapter.total, adapter.chained)
        weight_product: tuple[fx.Node, float] | None = None
        for adapter in layer.adapters:
            a, b = adapter.first.args[1], adapter.second.args[1]
            if adapter.grad_a is not None and order.weight_grad_a:
                weight_product = weight_product or self._weight_product(layer, adapter.grad_a.node)
                self._gradient(adapter.grad_a, b, weight_product[0], weight_product[1])  # dA' = B (dY'X)
            if adapter.grad_b is not None and order.weight_grad_b:
                weight_product = weight_product or self._weight_product(layer, adapter.grad_b.node)
                self._gradient(adapter.grad_b, weight_product[0], a, weight_product[1])  # dB' = (dY'X) A
            if adapter.grad_b is not None and not order.weight_grad_b and order.save != "xa":
                for node in _between(adapter.first, adapter.grad_b.node):
                    if not is_recomputed(node):
                        node.meta.update(RECOMPUTE)
            if order.merged_input_grad and adapter.grad_input is not None:
                total, rest, _ = summed_with(adapter.grad_input.node)  # as it is now: other terms may have left the sum
                self._replace(total, rest)
                self.graph.graph.erase_node(total)  # a dead user would hide what the sum is now
        if order.merged_input_grad and layer.grad_input is not None and merged is not None:
            transposed = self._emit(aten.t.default, (merged,), layer.grad_input)
            layer.grad_input.update_arg(1, transposed)

    def _merged(self, layer: LoraLayer, order: Order) -> fx.Node:
        """W + c AB, in the layout in which W is stored."""
        anchor = layer.base if order.merged_forward else layer.grad_input
        assert anchor is not None
        operands = product(layer.base)
        assert operands is not None
        stored_transposed = operands[1].target is aten.t.default
        merged = self._transposed(operands[1], anchor) if stored_transposed else operands[1]
        for adapter in layer.adapters:
            a, b = adapter.first.args[1], adapter.second.args[1]
            if stored_transposed:
                a, b = self._transposed(b, anchor), self._transposed(a, anchor)
            factor = {} if adapter.scale == 1 else {"alpha": adapter.scale}
            merged = self._emit(aten.addmm.default, (merged, a, b), anchor, factor)
            if order.merged_input_grad and not is_recomputed(merged):
                merged.meta.update(SAVE if order.save == "merged" else RECOMPUTE)
        result = self._emit(aten.t.default, (merged,), anchor) if stored_transposed else merged
        result.meta.update({k: v for k, v in merged.meta.items() if k in RECOMPUTE})
        return result

    def _weight_product(self, layer: LoraLayer, anchor: fx.Node) -> tuple[fx.Node, float]:
        """Z3' = dY'X (o x i) as a node and the number that it is too large by: W's gradient, where W is trained."""
        if layer.grad_weight is not None:
            node = layer.grad_weight.node
            node = node if layer.grad_weight.transposed else self._emit(aten.t.default, (node,), anchor)
            return node, layer.grad_weight.scale
        operands = product(layer.base)
        assert operands is not None
        assert layer.grad_output is not None
        grad = self._rows(layer.grad_output, operands[0], anchor)
        return self._emit(aten.mm.default, (self._emit(aten.t.default, (grad,), anchor), operands[0]), anchor), 1.0

    def _rows(self, node: fx.Node, like: fx.Node, anchor: fx.Node) -> fx.Node:
        """A tensor with all but its last dimension flattened, as many rows as `like` has."""
        if node.meta["val"].dim() == 2:
            return node
        size = like.meta["val"].shape[0]
        rows = size if isinstance(size, int) else self._emit(aten.sym_size.int, (like, 0), anchor)
        return self._emit(aten.reshape.default, (node, [rows, node.meta["val"].shape[-1]]), anchor)  # it may be expanded

    def _gradient(self, gradient: Gradient, left: Any, right: Any, excess: float) -> None:
        """Replace a gradient by scale / excess * left right, of which it is the transpose unless `gradient.transposed`."""
        anchor = gradient.node
        value = self._emit(aten.mm.default, (left, right), anchor)
        if gradient.scale != excess:
            value = self._emit(aten.mul.Tensor, (value, gradient.scale / excess), anchor)
        self._replace(anchor, value if gradient.transposed else self._emit(aten.t.default, (value,), anchor))

    def _transposed(self, node: Any, anchor: fx.Node) -> fx.Node:
        return node.args[0] if node.target is aten.t.default else self._emit(aten.t.default, (node,), anchor)

    def _emit(self, target: Any, args: tuple[Any, ...], anchor: fx.Node, kwargs: dict[str, Any] | None = None) -> fx.Node:
        """A new node that runs just before `anchor`."""
        resolved = fx.map_arg(args, self._current)
        node = insert_node(self.graph.graph, target, resolved, anchor, kwargs, (*ORIGIN, *CHECKPOINTED))
        self.order[node] = self.order[anchor] - 0.5
        return node

    def _current(self, node: fx.Node) -> fx.Node:
        while node in self.replaced:
            node = self.replaced[node]
        return node

    def _replace(self, old: fx.Node, new: fx.Node) -> None:
        new = self._current(new)
        old.replace_all_uses_with(new, propagate_meta=False)
        self.replaced[old] = new

    def finish(self, layers: Collection[LoraLayer]) -> list[str]:
        """Batch products of one input, put the nodes in an order in which they can run, and remove what nothing needs.

        Returns:
            Names of layers whose XA is computed together with another's.
        """
        simplify_sizes(self.graph.graph)
        self.graph.eliminate_dead_code()
        sort_nodes(self.graph.graph, self.order)
        batched = self._batch_shared_inputs(layers)
        if batched:
            self.graph.eliminate_dead_code()
            sort_nodes(self.graph.graph, self.order)
        self.graph.module.recompile()
        return batched

    def _batch_shared_inputs(self, layers: Collection[LoraLayer]) -> list[str]:
        """Compute XA of layers that read the same X (as q, k and v do) as one product X [A1 A2 ...]."""
        alive = set(self.graph.graph.nodes)
        numbers = value_numbers(self.graph.graph)
        groups: dict[tuple[int, bool, float], list[tuple[str, fx.Node]]] = {}
        for layer in layers:
            for adapter in layer.adapters:
                first = adapter.first
                if first in alive and first.target is aten.mm.default:
                    x = as_matrix(first.args[0])  # type: ignore[arg-type]
                    groups.setdefault((numbers[x.leaf], is_recomputed(first), x.scale), []).append((layer.name, first))
        names = []
        for group in groups.values():
            firsts = sorted({first for _, first in group}, key=lambda node: self.order[node])
            if len(firsts) > 1:
                names += [name for name, _ in group]
                self._batch(firsts)
        return names

    def _batch(self, firsts: list[fx.Node]) -> None:
        anchor = firsts[0]
        factors = self._emit(aten.cat.default, ([first.args[1] for first in firsts], 1), anchor)
        together = self._emit(aten.mm.default, (anchor.args[0], factors), anchor)
        start = 0
        for first in firsts:
            end = start + int(first.meta["val"].shape[1])
            self._replace(first, self._emit(aten.slice.Tensor, (together, 1, start, end), anchor))
            start = end

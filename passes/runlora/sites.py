"""Layers with low-rank adapters, found in a joint graph by their structure.

A layer is a product XW, with or without a bias, to which one or more chains c(XA)B are added, where W, A and B do not depend on
the batch. Its products in the backward are known by what they multiply: dY B', (XA)'dY, Z1'X, Z1 A', dY W' and X'dY.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from graphopt.passes.base import numbered
from graphopt.passes.runlora.layers import Adapter, Gradient, LoraLayer, LoraSites
from graphopt.passes.runlora.orders import AdapterShape, LayerShape
from torch import fx

from graphopt.analysis.kept import kept
from graphopt.analysis.products import Matrix, as_matrix, product, same_tensor, value_numbers
from graphopt.analysis.saved import recomputed
from graphopt.analysis.sums import NotASum, below_views, summed_with, tensor_users
from graphopt.graph import TrainingGraph, ancestors, descendants

aten = torch.ops.aten


def lora_sites(graph: TrainingGraph) -> LoraSites:
    """`find_lora_sites` of a graph that is not changed any more."""
    return kept(graph, "lora sites", None, lambda: find_lora_sites(graph))


def find_lora_sites(graph: TrainingGraph) -> LoraSites:
    """Find the layers with adapters of a joint graph."""
    finder = _Finder(graph)
    groups: dict[fx.Node, list[Adapter]] = {}
    left_alone: dict[str, str] = {}
    for node in graph.graph.nodes:
        if node not in finder.forward:
            continue
        if (kind := finder.other_kind(node)) is not None:
            left_alone[kind[0]] = kind[1]
        first = finder.first_of_chain(node)
        if first is None:
            continue
        try:
            adapter, base = finder.adapter(first, node)
        except NotASum as reason:
            if str(reason):
                left_alone[finder.name_of(product(first)[1])] = str(reason)  # type: ignore[index]
            continue
        groups.setdefault(base, []).append(adapter)
    layers: list[LoraLayer] = []
    for base, adapters in groups.items():
        try:
            layer = finder.layer(base, tuple(adapters))
            layers.append(replace(layer, name=numbered(layer.name, (other.name for other in layers))))
        except NotASum as reason:
            left_alone.update({a.name: str(reason) for a in adapters})
    return LoraSites(tuple(layers), left_alone)


class NotALayer(NotASum):
    """Why something that looks like an adapter is left alone; empty if nobody would call it one."""


class _Finder:
    """Looks up the products of a joint graph by what they multiply."""

    def __init__(self, graph: TrainingGraph) -> None:
        self.graph = graph
        self.numbers = value_numbers(graph.graph)
        self.forward = ancestors(graph.forward_results())
        self.recomputed = recomputed(graph, self.forward)
        kinds: dict[str, list[fx.Node]] = {}
        for desc, node in zip(graph.inputs, graph.placeholders, strict=True):
            kinds.setdefault(desc.kind, []).append(node)
        self.backward = descendants(kinds.get("tangent", []))
        self.varying = descendants(kinds.get("input", [])) | self.backward
        self.parameters = graph.parameter_nodes()
        self.trained = {p.name for p in graph.trainable}
        self.products: dict[int, list[tuple[fx.Node, Matrix, Matrix, bool]]] = {}
        for node in graph.graph.nodes:
            if node in self.backward and node.target is aten.mm.default:
                left, right = (as_matrix(n) for n in node.args)
                self.products.setdefault(self.numbers[left.leaf], []).append((node, left, right, True))
                self.products.setdefault(self.numbers[right.leaf], []).append((node, right, left, False))

    def name_of(self, node: fx.Node) -> str:
        """The parameter that a weight comes from, or the node's own name."""
        names = [self.parameters[n] for n in ancestors([node]) if n in self.parameters]
        return names[0] if len(names) == 1 else node.name

    def first_of_chain(self, second: fx.Node) -> fx.Node | None:
        """XA, if `second` is the product (XA)B of factors that do not depend on the batch."""
        operands = product(second)
        if operands is None or operands[1] in self.varying:
            return None
        inner = as_matrix(operands[0])
        outer = product(inner.leaf)
        if inner.transposed or outer is None or outer[1] in self.varying or outer[0] not in self.varying:
            return None
        return inner.leaf

    def other_kind(self, node: fx.Node) -> tuple[str, str] | None:
        """Name and reason, if a node is an adapter's last product of a kind that is not reordered."""
        if node.target is aten.convolution.default and node.args[1] not in self.varying:
            inner = node.args[0]
            if isinstance(inner, fx.Node) and inner.target is aten.convolution.default and self._added(node):
                return self.name_of(inner.args[1]), "adapters of convolutions are left alone"  # type: ignore[arg-type]
        operands = product(node)
        if operands is not None and operands[1] not in self.varying and self._added(node):
            inner = as_matrix(operands[0]).leaf
            if inner.target is aten.embedding.default:
                name = self.name_of(inner.args[0])  # type: ignore[arg-type]
                return name, "adapters of embeddings are left alone: there is no product to merge with"
        return None

    def _added(self, node: fx.Node) -> bool:
        try:
            summed_with(node, self.forward)
        except NotASum:
            return False
        return True

    def adapter(self, first: fx.Node, second: fx.Node) -> tuple[Adapter, fx.Node]:
        """The adapter of a chain, without its gradients, and the product that it is added to."""
        total, chained, factor = summed_with(second, self.forward)
        base = self._base(chained)
        if first.target is not aten.mm.default or second.target is not aten.mm.default:
            raise NotALayer("the adapter has a bias of its own")
        if len({n.meta["val"].dtype for n in (first, second, base, total)}) > 1:
            raise NotALayer("the adapter is computed in another dtype than the layer")
        x, between = as_matrix(first.args[0]), as_matrix(second.args[0])  # type: ignore[arg-type]
        name = self.name_of(first.args[1])  # type: ignore[arg-type]
        return Adapter(name, first, second, total, chained, x.scale * between.scale * factor), base

    def _base(self, node: fx.Node) -> fx.Node:
        """The product of a weight that a chain is added to, below views and other chains' additions."""
        no_product = NotALayer("what the chain is added to is no product of its input with a weight")
        while True:
            if len(tensor_users(node)) != 1:
                raise NotALayer("the layer's own product is used elsewhere too, as DoRA does: merging would change that")
            if (operands := product(node)) is not None:
                break
            if node.target is aten.add.Tensor and not node.kwargs and len(node.all_input_nodes) == 2:
                others = [n for n in node.all_input_nodes if self.first_of_chain(below_views(n)) is None]
                if len(others) != 1:
                    raise no_product
                (node,) = others
            elif same_tensor(node):
                node = node.args[0]  # type: ignore[assignment]
            else:
                raise no_product
        if operands[1] in self.varying or operands[0] not in self.varying:
            raise no_product
        return node

    def layer(self, base: fx.Node, adapters: tuple[Adapter, ...]) -> LoraLayer:
        """The layer with the gradients of its adapters."""
        x_node, w_node = product(base)  # type: ignore[misc]
        x, w = as_matrix(x_node), as_matrix(w_node)
        grads: set[int] = set()
        found, unmergeable, shares_input = [], "", True
        for adapter in adapters:
            own = as_matrix(adapter.first.args[0])  # type: ignore[arg-type]
            if own.transposed:
                raise NotALayer("the chain and the product that it is added to read different inputs")
            if self.numbers[own.leaf] != self.numbers[x.leaf]:
                if x.leaf not in ancestors([own.leaf]):
                    raise NotALayer("the chain and the product that it is added to read different inputs")
                shares_input = False
                unmergeable = "the adapter's input is not the layer's, as with dropout: merging would change the result"
            adapter, grad = self._with_gradients(adapter)
            found.append(adapter)
            if grad is not None:
                grads.add(self.numbers[grad.leaf])
        if len(grads) > 1 or x.transposed or x.scale != 1:
            raise NotALayer("its gradients are computed in a way that is not known")
        grad_output = grad_input = grad_weight = None
        grad_scale = 1.0
        if grads:
            (number,) = grads
            uses = self.products.get(number, [])
            of_weight = [u for u in uses if self.numbers[u[2].leaf] == self.numbers[w.leaf]]
            inputs = [(n, m) for n, m, o, left in of_weight if left and o.transposed != w.transposed]
            weights = [u for u in uses if self.numbers[u[2].leaf] == self.numbers[x.leaf] and _is_outer(*u[1:])]
            if len(inputs) > 1 or len(weights) > 1:
                raise NotALayer("its gradients are computed in a way that is not known")
            for node, gradient in inputs:
                if gradient.transposed:
                    raise NotALayer("its gradients are computed in a way that is not known")
                grad_input, grad_scale = node, gradient.scale
            for node, gradient, other, left in weights:
                grad_weight = Gradient(node, left, gradient.scale * other.scale)
            grad_output = next(m.leaf for _, m, _, _ in uses)
        if grad_input is None and any(a.grad_input is not None for a in found):
            unmergeable = unmergeable or "its input has a gradient through the adapter alone"
        if not unmergeable:
            found = [self._with_input_sum(a, grad_input, grad_scale) for a in found]
        value = base.meta["val"]
        shape = LayerShape(
            rows=self.graph.formula(x_node.meta["val"].shape[0]),
            inputs=int(w_node.meta["val"].shape[0]),
            outputs=int(value.shape[1]),
            adapters=tuple(
                AdapterShape(int(a.first.meta["val"].shape[1]), a.grad_a is not None, a.grad_b is not None) for a in found
            ),
            input_grad=grad_input is not None,
            weight_grad=grad_weight is not None,
            itemsize=value.element_size(),
            recomputed=base in self.recomputed,
        )
        name = self.name_of(w_node)
        return LoraLayer(name, base, tuple(found), grad_output, grad_input, grad_weight, shape, unmergeable, shares_input)

    def _with_gradients(self, adapter: Adapter) -> tuple[Adapter, Matrix | None]:
        """The adapter with its products in the backward, and dY."""
        unknown = NotALayer("its gradients are computed in a way that is not known")
        x, a = (as_matrix(n) for n in adapter.first.args)  # type: ignore[arg-type]
        b = as_matrix(adapter.second.args[1])  # type: ignore[arg-type]
        if 0.0 in (x.scale, a.scale, b.scale):
            raise NotALayer("it is multiplied by zero")
        number = self.numbers
        grad: Matrix | None = None
        grad_b = grad_a = grad_input = None
        of_hidden = self.products.get(number[adapter.first], [])
        if len(of_hidden) > 1 or not all(_is_outer(*use[1:]) for use in of_hidden):
            raise unknown
        for node, hidden, other, left in of_hidden:
            grad, grad_b = other, Gradient(node, not left, hidden.scale * other.scale * x.scale)
        ups = [
            (n, m, o)
            for n, m, o, left in self.products.get(number[b.leaf], [])
            if not left
            and m.transposed != b.transposed
            and not o.transposed
            and (grad is None or number[o.leaf] == number[grad.leaf])
        ]
        if len(ups) > 1:
            raise NotALayer("its factor B takes part in several layers")
        for node, factor, other in ups:
            grad, upstream = other, Gradient(node, False, other.scale * factor.scale / b.scale)
            uses = self.products.get(number[node], [])
            of_x = [
                (n, z.scale * o.scale, left)
                for n, z, o, left in uses
                if number[o.leaf] == number[x.leaf] and _is_outer(z, o, left)
            ]
            of_a = [
                (n, z.scale * o.scale / a.scale)
                for n, z, o, left in uses
                if number[o.leaf] == number[a.leaf] and left and not z.transposed and o.transposed != a.transposed
            ]
            if len(of_x) > 1 or len(of_a) > 1 or len(of_x) + len(of_a) != len(uses):
                raise unknown
            for found, scale, left in of_x:
                grad_a = Gradient(found, left, scale * upstream.scale)
            for found, scale in of_a:
                grad_input = Gradient(found, False, scale * upstream.scale)
        return replace(adapter, grad_a=grad_a, grad_b=grad_b, grad_input=grad_input), grad

    def _with_input_sum(self, adapter: Adapter, grad_input: fx.Node | None, grad_scale: float) -> Adapter:
        """The adapter with the addition of Z1 A' to dY W', if one can be left out and the other stand for both."""
        if adapter.grad_input is None or grad_input is None:
            return adapter
        try:
            total, _, factor = summed_with(adapter.grad_input.node, self.backward)
        except NotASum:
            return adapter
        same = math.isclose(adapter.grad_input.scale * factor, adapter.scale * grad_scale, rel_tol=1e-9)
        if same and (self._summed(total) & self._summed(grad_input)):
            return replace(adapter, input_summed=True)
        return adapter

    def _summed(self, node: fx.Node) -> set[fx.Node]:
        """The additions that a result goes into, unscaled, one after the other; the node itself if it is one."""
        found = {node} if node.target is aten.add.Tensor else set()
        while True:
            try:
                node, _, factor = summed_with(node, self.backward)
            except NotASum:
                return found
            if factor != 1:
                return found
            found.add(node)


def _is_outer(one: Matrix, other: Matrix, one_is_left: bool) -> bool:
    """Whether a product sums over rows, as a weight's gradient does: the left operand is transposed, the right is not."""
    left, right = (one, other) if one_is_left else (other, one)
    return left.transposed and not right.transposed

"""GreenTrainer's own FLOP rules per tensor, for comparison with its published numbers (`cost="paper"`).

The rules are those of the authors' implementation, applied to the structure of the captured graph: what reads a parameter
decides its rule. They count multiply-adds of forward (fp), own gradient (t_dw) and passing on (t_dy):

* a product with a weight: fp = t_dw = t_dy = its multiply-adds; its bias: fp = t_dw = elements of the output, t_dy = 0;
* attention: fp = the two products, t_dy = twice that, on the last parameter read before it (the value projection);
* layer norm: fp = t_dw = t_dy = elements for the weight, fp alone for the bias;
* embedding: fp = elements of the output, t_dw = elements of the table, t_dy = 0; a tied head adds a dense product, whose
  t_dy goes to the tensor nearest the output;
* cross-attention keys and values are counted with the length of the queries, which is an error of the paper's kept here;
* anything else costs nothing.

Source: GreenTrainer, section 3.1, and its reference implementation. Exact counts are in `graphopt.analysis.flops`.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from graphopt.analysis.flop_formulas import node_flops
from graphopt.analysis.flops import FlopProfile, TensorFlops, weight_of
from graphopt.graph import TrainingGraph, ancestors, reached

aten = torch.ops.aten


@dataclass
class _Tally:
    """Multiply-adds per parameter, as the rules are applied.

    Attributes:
        weights: see `weight_of`.
        looked_up: tables of embeddings.
        heads: products with such a table, and their multiply-adds; where their dy belongs is known once the order is.
        last: the parameter that was read last.
    """

    graph: TrainingGraph
    weights: dict[fx.Node, str]
    looked_up: set[str]
    heads: list[tuple[str, sympy.Expr]] = field(default_factory=list)
    last: str = ""
    forward: list[sympy.Expr] = field(default_factory=list)
    own: dict[str, list[sympy.Expr]] = field(default_factory=lambda: defaultdict(list))
    passed: dict[str, list[sympy.Expr]] = field(default_factory=lambda: defaultdict(list))

    def add(self, name: str, fp: Any = 0, dw: Any = 0, dy: Any = 0) -> None:
        self.forward.append(sympy.sympify(fp))
        self.own[name].append(sympy.sympify(dw))
        self.passed[name].append(sympy.sympify(dy))

    def product(self, node: fx.Node, macs: sympy.Expr) -> None:
        """Rules for a matrix product or fused attention."""
        read = [n for n in node.all_input_nodes if n in self.weights]
        operands = [self.weights[n] for n in read if len(_shape_of(n)) > 1]
        if not operands:  # attention: two activations
            if self.last:
                self.add(self.last, fp=macs, dy=2 * macs)
            return
        self.last = name = operands[-1]
        if name in self.looked_up:
            self.add(name, fp=macs, dw=macs)
            self.heads.append((name, macs))
        else:
            self.add(name, fp=macs, dw=macs, dy=macs)
        bias = next((self.weights[n] for n in read if len(_shape_of(n)) == 1), None)
        if bias is not None:
            elements = self._elements(node)
            self.add(bias, fp=elements, dw=elements)
            self.last = bias

    def elementwise(self, node: fx.Node, read: list[str]) -> None:
        """Rules for embeddings, normalisation and separate biases."""
        elements, arguments = self._elements(node), list[Any](node.args)
        if node.target is aten.embedding.default:
            self.add(read[0], fp=elements, dw=sympy.prod(_shape_of(arguments[0])))
        elif node.target is aten.native_layer_norm.default:
            scale, shift = arguments[2:4]
            if scale in self.weights:
                self.add(self.weights[scale], fp=elements, dw=elements, dy=elements)
            if shift in self.weights:
                self.add(self.weights[shift], fp=elements)
        elif node.target is aten.mul.Tensor:  # the scale of an RMS norm
            self.add(read[0], fp=elements, dw=elements, dy=elements)
        elif node.target is aten.add.Tensor:  # a bias added on its own
            self.add(read[0], fp=elements, dw=elements)
        self.last = read[-1]

    def _elements(self, node: fx.Node) -> sympy.Expr:
        return sympy.prod([self.graph.formula(size) for size in _shape_of(node)])


def paper_profile(graph: TrainingGraph) -> FlopProfile:
    """FLOPs of one step by the paper's rules, 2 per multiply-add (its tables count multiply-adds: halve these).

    A selection costs m . t_dw + sigma(m) . t_dy: the chain down to the deepest selected tensor, its own t_dy included.
    `order` is the reverse order of execution, and rows are those of the trainable parameters that the forward reads.
    """
    weights = weight_of(graph)
    forward = ancestors(graph.forward_results())
    nodes = [n for n in graph.graph.nodes if n in forward and n.op == "call_function"]
    shortened = _cross_attention_scale(graph, nodes, weights)
    looked_up = {weights[n.args[0]] for n in nodes if n.target is aten.embedding.default and n.args[0] in weights}
    tally = _Tally(graph, weights, looked_up)
    first_read: dict[str, int] = {}
    for position, node in enumerate(nodes):
        read = [weights[n] for n in node.all_input_nodes if n in weights]
        if read and node in weights:
            continue  # a change of layout of the parameter itself
        macs = graph.formula(node_flops(node)) / 2
        if macs != 0:
            tally.product(node, macs * shortened.get(node, 1))
        elif read:
            tally.elementwise(node, read)
        for name in read:
            first_read.setdefault(name, position)
    shapes = {p.name: p.shape for p in graph.trainable}
    order = tuple(sorted((n for n in first_read if n in shapes), key=lambda n: -first_read[n]))
    for head, macs in tally.heads:
        nearest = next((n for n in order if n != head), head)
        tally.passed[nearest].append(macs)
    own, passed = ({n: 2 * sympy.Add(*parts) for n, parts in of.items()} for of in (tally.own, tally.passed))
    whole, zero = (1 << len(order)) - 1, sympy.Integer(0)
    return FlopProfile(
        batch_size=graph.batch_size,
        forward_formula=2 * sympy.Add(*tally.forward),
        order=order,
        class_formulas=tuple(
            (mask, of.get(name, zero))
            for k, name in enumerate(order)
            for mask, of in ((1 << k, own), (whole & -(1 << k), passed))  # passed on: for itself, too, and for all below
        ),
        rows=tuple(TensorFlops(n, shapes[n], True, own.get(n, zero), passed.get(n, zero)) for n in order),
        symbolic=graph.symbolic,
    )


def _cross_attention_scale(graph: TrainingGraph, nodes: list[fx.Node], weights: dict[fx.Node, str]) -> dict[fx.Node, sympy.Expr]:
    """Factor by which the paper undercounts a product that makes keys or values of another length than the queries."""
    products = {n for n in nodes if node_flops(n) != 0}
    scale: dict[fx.Node, sympy.Expr] = {}
    for node in products:
        if any(n in weights for n in node.all_input_nodes):
            continue
        fused = "attention" in str(node.target)
        factors = node.args[1:] if node.target in (aten.addmm.default, aten.baddbmm.default) else node.args  # the first is added
        if any(len(_shape_of(factor)) < 2 for factor in factors[:2]):
            continue
        queries = graph.formula(_shape_of(factors[0])[-2])
        for operand in factors[1:3] if fused else factors[1:2]:
            source = _made_by(operand, products)
            if source is None:
                continue
            # In an unfused Q K^T the keys stand in the columns.
            keys = graph.formula(_shape_of(operand)[-1 if not fused and _is_key(node) else -2])
            if keys != queries:
                scale[source] = queries / keys
    return scale


def _is_key(node: fx.Node) -> bool:
    """Whether an unfused product's result goes on to a softmax, so that it is Q K^T and not P V."""
    readers = reached(node.users, lambda user: user.users if node_flops(user) == 0 else ())
    return any(user.target is aten._softmax.default for user in readers)


def _made_by(operand: Any, products: set[fx.Node]) -> fx.Node | None:
    """The product whose result `operand` is, seen through changes of layout, dtype and scale."""
    while isinstance(operand, fx.Node) and operand not in products:
        inputs = operand.all_input_nodes
        tensors = [n for n in inputs if isinstance(n.meta.get("val"), Tensor)]
        if len(tensors) != 1:
            return None
        operand = tensors[0]
    return operand if isinstance(operand, fx.Node) else None


def _shape_of(node: Any) -> tuple[Any, ...]:
    value = node.meta.get("val")
    value = value[0] if isinstance(value, (tuple, list)) else value
    return tuple(value.shape) if isinstance(value, Tensor) else ()

"""Backward graphs for outputs whose gradient never comes.

A model returns its loss and its logits; training differentiates the loss alone. Autograd then has no gradient for the logits,
which is not the same as a gradient of zeros: filling in zeros costs a tensor as large as the logits and an addition, and
gives parameters that only the logits depend on a gradient of zeros where eager mode leaves None.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from graphopt.analysis.flop_formulas import node_flops
from graphopt.analysis.row_rules import SUMS
from graphopt.compat import OutputDesc, expression, graph_module, output_list, pytree
from graphopt.compat.graph_modules import copied
from graphopt.errors import LossNotFirst, PassError
from graphopt.graph import TrainingGraph, remove_dead_nodes

aten = torch.ops.aten


def without_tangents(backward: fx.GraphModule, absent: Collection[str], tangents: Collection[str]) -> fx.GraphModule:
    """A copy of a backward graph for when some tangents do not exist.

    A backward is linear in its tangents, and autograd calls no function whose output has no gradient. So what reads absent
    tangents alone is absent; a sum loses the absent term; any other operator that reads gradients that are there is given zeros
    for the others, as by autograd. Absent gradients are returned as None.

    Args:
        absent: names of tangent placeholders; the copy does not take them. Saved tensors all stay, read or not.
        tangents: names of all.
    """
    graph = copied(backward.graph)
    module = graph_module(backward, graph)
    carrying = {node for node in graph.find_nodes(op="placeholder") if node.name in tangents}
    gone = {node for node in carrying if node.name in absent}
    for node in list(graph.nodes):
        reads = [n for n in node.all_input_nodes if n in carrying]
        missing = [n for n in reads if n in gone]
        if node.op == "output" or not reads:
            continue
        is_size = isinstance(node.meta.get("val"), (int, torch.SymInt))
        if not is_size:
            carrying.add(node)
        if len(missing) == len(reads) and not is_size:
            gone.add(node)
        elif missing and node.target in SUMS:
            _drop_term(node, gone)
        else:
            for term in missing:
                node.replace_input_with(term, _zeros(graph, term, node, gone))
    graph.output_node().args = (tuple(None if node in gone else node for node in output_list(module)),)
    remove_dead_nodes(module)
    for node in reversed(graph.nodes):  # its inputs, and what writes to somewhere else
        if node in gone:
            graph.erase_node(node)
    module.recompile()
    return module


def tangent_results(graph: TrainingGraph) -> dict[str, int]:
    """By tangent placeholder, the position among the model's results (outputs, then bases) that it is the gradient of.

    The number of results stands for what is none of them: an input that was changed, or a result of one of several graphs.
    """
    position = {(desc.kind, desc.target): i for i, desc in enumerate(_results(graph))}
    tangents = [(desc.target, n.name) for desc, n in zip(graph.inputs, graph.placeholders, strict=True) if desc.kind == "tangent"]
    return {name: position.get((of.kind, of.target), len(position)) for of, name in tangents}


def _results(graph: TrainingGraph) -> list[OutputDesc]:
    return [desc for desc in graph.outputs if desc.kind in ("output", "base")]


def expected_results(graph: TrainingGraph) -> frozenset[int]:
    """Results that training most likely differentiates: the first, if it is a scalar (the loss); else all.

    What is no result of its own is always among them: nothing tells that it is not differentiated.
    """
    tangents, other = tangent_results(graph), len(_results(graph))
    first = min(tangents.values(), default=None)
    values = {node.name: node.meta["val"] for node in graph.placeholders if node.name in tangents}  # others may have none
    is_loss = any(values[name].dim() == 0 for name, i in tangents.items() if i == first)
    return frozenset(i for i in tangents.values() if not is_loss or i in (first, other))


def for_loss_alone(graph: TrainingGraph) -> TrainingGraph:
    """The joint graph without the gradients of results that training is not expected to differentiate.

    They become `TrainingGraph.refused`: a backward that brings one of them is an error.
    """
    expected = expected_results(graph)
    tangents = tangent_results(graph)
    absent = {name for name, i in tangents.items() if i not in expected}
    if not absent:
        return graph
    kept = [(d, node.name not in absent) for d, node in zip(graph.inputs, graph.placeholders, strict=True)]
    return replace(
        graph,
        module=without_tangents(graph.module, absent, tangents),
        inputs=tuple(desc for desc, keep in kept if keep),
        refused=(*graph.refused, *(desc.target for desc, keep in kept if not keep)),
    )


def as_differentiated(graph: TrainingGraph) -> TrainingGraph:
    """The joint graph for the loss alone where gradients of other results take FLOPs or reach parameters that the loss does not.

    Elsewhere they change nothing that a plan counts, and the graph is returned as it is.
    """
    expected, results, gradients = expected_results(graph), tangent_results(graph), set(graph.gradients().values())
    sources: dict[fx.Node, set[bool]] = {}
    for node in graph.graph.nodes:
        if node.name in results:
            sources[node] = {results[node.name] in expected}
        else:
            sources[node] = set().union(*(sources[read] for read in node.all_input_nodes))
        if sources[node] == {False} and (node in gradients or node_flops(node) != 0):
            return for_loss_alone(graph)
    return graph


def planned_names(graph: TrainingGraph) -> frozenset[str]:
    """The parameters that a plan made on a graph knows of: not those that only the results lead to that it leaves out."""
    if not graph.refused:  # asked for every parameter in every step that hooks watch over
        return frozenset(p.name for p in graph.parameters)
    reached = graph.gradients()
    return frozenset(p.name for p in graph.parameters if not p.trainable or p.name in reached)


def without_other_outputs(graph: TrainingGraph) -> TrainingGraph:
    """The joint graph of a step that returns the loss alone.

    Raises:
        LossNotFirst: the first output is no scalar, or another is named "loss".
    """
    if graph.out_spec is not None:
        places = list(range(graph.out_spec.num_leaves))
        if named_otherwise(pytree.tree_unflatten(places, graph.out_spec), 0):
            raise LossNotFirst(NO_LOSS)
    alone = for_loss_alone(graph)
    descs = list(zip(alone.outputs, alone.results, strict=True))
    loss = next((node for desc, node in descs if desc.kind == "output" and desc.target == 0), None)
    if not isinstance(loss, fx.Node) or loss.meta["val"].dim() or not loss.meta["val"].dtype.is_floating_point:
        raise LossNotFirst(NO_LOSS)
    alone = replace(alone.clone(), refused=(), out_spec=pytree.tree_structure(0.0))
    kept = [(d, node) for d, node in descs if d.kind not in ("output", "base") or (d.kind == "output" and d.target == 0)]
    names = {node.name: node for node in alone.graph.nodes}
    results = tuple(names[node.name] if isinstance(node, fx.Node) else node for _, node in kept)
    alone.outputs = tuple(desc for desc, _ in kept)
    alone.graph.output_node().args = (results,)
    alone.eliminate_dead_code()
    return alone


def named_otherwise(output: Any, first: Any) -> bool:
    """Whether an output has a name for its loss, by which training loops read it, and that is not the first."""
    return isinstance(output, dict) and output.get("loss", first) is not first


NO_LOSS = (
    "outputs='loss': the first output of the model is no scalar that could be the loss, or another is named 'loss'. Pass "
    "labels, if the model computes its loss from them, have it return the loss first, or leave outputs out."
)


def _drop_term(node: fx.Node, gone: set[fx.Node]) -> None:
    """Replace a sum by the term that is there; where that would change shape, dtype, sign or scale, give it zeros instead."""
    left, right = node.args[:2]
    kept, term = (right, left) if left in gone else (left, right)
    assert isinstance(term, fx.Node)
    unscaled = term is right or (node.target is aten.add.Tensor and not node.kwargs)
    if isinstance(kept, fx.Node) and _same(kept.meta["val"], node.meta["val"]) and unscaled:
        node.replace_all_uses_with(kept)
    else:
        node.replace_input_with(term, _zeros(node.graph, term, node, gone))


def _same(a: Any, b: Any) -> bool:
    return isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape and a.dtype == b.dtype


def _zeros(graph: fx.Graph, like: fx.Node, before: fx.Node, gone: set[fx.Node]) -> fx.Node:
    value: Tensor = like.meta["val"]
    shape = [_size(graph, size, before, gone) for size in value.shape]
    with graph.inserting_before(before):
        node = graph.call_function(
            aten.full.default, (shape, 0), {"dtype": value.dtype, "device": value.device, "pin_memory": False}
        )
    node.meta["val"] = value
    return node


def _size(graph: fx.Graph, size: Any, before: fx.Node, gone: set[fx.Node]) -> Any:
    """A size as an argument of a node: itself, or a node that computes it from that of an input which is there."""
    if not isinstance(size, torch.SymInt):
        return size
    wanted = expression(size)
    for source in graph.nodes:
        value, given = source.meta.get("val"), source.op == "placeholder" and source not in gone
        for dim, symbol in enumerate(value.shape if given and isinstance(value, Tensor) else ()):
            factor = sympy.cancel(wanted / expression(symbol)) if isinstance(symbol, torch.SymInt) else None
            if factor is not None and factor.is_Integer:
                with graph.inserting_before(before):
                    node = graph.call_function(aten.sym_size.int, (source, dim))
                    node.meta["val"] = symbol
                    if factor != 1:
                        node = graph.call_function(operator.mul, (node, int(factor)))
                        node.meta["val"] = size
                return node
    raise PassError(f"no input has a size from which {wanted} could be computed.")

"""A region: one graph of Dynamo's, and its joint graph as a `TrainingGraph`.

A model without graph breaks is one region. Its parameters are recognised by identity: a tensor that Dynamo traced with is a
parameter of the model if it is that very object.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import SymInt, Tensor, fx, nn

from graphopt.compat import InputDesc, OutputDesc, describe_joint, expression, functions_behind
from graphopt.compat.aot import ABSENT
from graphopt.compat.distributed import local_part
from graphopt.compat.dynamo import source_of, traced_size
from graphopt.compat.fsdp import held_parameters, passes_gradients_on
from graphopt.graph import Parameter, TrainingGraph
from graphopt.transforms.canonicalize import normalise

aten = torch.ops.aten


@dataclass(frozen=True)
class Region:
    """What is known of a graph of Dynamo's before its backward is traced.

    Attributes:
        names: per placeholder, the name of the parameter or buffer; None for other inputs.
        parameters: those among them.
    """

    names: tuple[str | None, ...]
    parameters: tuple[Parameter, ...]

    def describe(self, desc: InputDesc) -> InputDesc:
        """An input of the joint graph, by name where it has one."""
        if desc.kind != "input" or not isinstance(desc.target, int) or (name := self.names[desc.target]) is None:
            return desc
        return InputDesc("parameter" if any(p.name == name for p in self.parameters) else "buffer", name)

    @property
    def trainable(self) -> frozenset[str]:
        """Parameters that require a gradient."""
        return frozenset(p.name for p in self.parameters if p.trainable)


def tensor_names(model: nn.Module) -> dict[int, tuple[str, ...]]:
    """All names of each parameter and buffer of a model, by the tensor's `id`."""
    names: dict[int, tuple[str, ...]] = {}
    for named in (model.named_parameters, model.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            names[id(tensor)] = (*names.get(id(tensor), ()), name)
    for held in held_parameters(model):  # a part of the model has them gathered, others not
        names |= {id(form): held.names for form in (held.sharded, held.whole) if form is not None}
    return names


def frozen_names(model: nn.Module) -> frozenset[str]:
    """Names of the parameters that require no gradient."""
    return frozenset(name for name, p in model.named_parameters() if not p.requires_grad)


def needs_gradient(tensor: Tensor, wanted: Callable[[Tensor], bool]) -> bool:
    """Whether a gradient of a region's input goes on to a leaf that is `wanted`.

    Where that cannot be seen, because a Python function is on the way, it does, and so where the tensor itself has a hook.
    """
    if not tensor.requires_grad:
        return False
    if tensor.retains_grad or tensor._backward_hooks:
        return True
    if tensor.grad_fn is None:
        return wanted(tensor)
    for node in functions_behind([tensor]):
        if isinstance(node, torch.autograd.function.BackwardCFunction) and not passes_gradients_on(node):
            return True  # compiled parts, which are cut themselves, among them
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor) and wanted(leaf):
            return True
    return False


def region_of(placeholders: Sequence[fx.Node], values: Sequence[Any], names: Mapping[int, Sequence[str]]) -> Region:
    """The region of a graph of Dynamo's that is given these values.

    Args:
        names: see `tensor_names`. Trainable tensors that are no registered parameters are named by where they were found.
    """
    found: list[str | None] = []
    parameters: list[Parameter] = []
    for node, tensor in zip(placeholders, values, strict=True):
        own = names.get(id(tensor), ())
        name = own[0] if own else None
        if name is None and isinstance(tensor, nn.Parameter):
            place = _place(source_of(node)) or node.name
            name = node.name if place in found or any(place in taken for taken in names.values()) else place
        found.append(name)
        if name is not None and isinstance(tensor, nn.Parameter):
            shape = tuple(local_part(tensor).shape)
            parameters.append(Parameter(name, shape, tensor.dtype, tensor.requires_grad, tuple(own[1:])))
    return Region(tuple(found), tuple(parameters))


def training_graph(
    region: Region, joint: fx.GraphModule, num_forward: int, batch_size: int = 1, dims: Sequence[int | None] = ()
) -> TrainingGraph:
    """The joint graph of a region, which AOTAutograd has traced, in the form that passes know; `joint` itself is changed.

    Args:
        num_forward: how many of its outputs are the forward's.
        batch_size: samples in the call for which it was traced.
        dims: per placeholder of Dynamo's graph, the dimension that is the batch; where all are symbols, the graph's shapes
            are formulas of the batch.
    """
    inputs, outputs = describe_joint(joint, num_forward)
    graph = TrainingGraph(
        module=joint,
        inputs=tuple(map(region.describe, inputs)),
        outputs=tuple(replace(d, target=region.describe(d.target)) if isinstance(d.target, InputDesc) else d for d in outputs),
        parameters=region.parameters,
        out_spec=None,
        symbols=frozenset(),
        batch_size=batch_size,
        static_reason="torch.compile has traced it for the sizes at hand",
        sizes=_sizes(joint),
    )
    _return_mutations(graph)
    if any(dim is not None for dim in dims):
        _have_symbolic_batch(graph, dims)
    normalise(graph)
    return graph


def _have_symbolic_batch(graph: TrainingGraph, dims: Sequence[int | None]) -> None:
    """Note which symbols are the batch, and read every size off a tensor: passes do not know of sizes that are inputs."""
    symbols: set[Any] = set()
    inputs: dict[sympy.Expr, tuple[fx.Node, int]] = {}
    for desc, node in zip(graph.inputs, graph.placeholders, strict=True):
        value = node.meta.get("val")
        if desc.kind not in ("input", "parameter", "buffer") or not isinstance(value, Tensor):
            continue
        for dim, size in enumerate(value.shape):
            inputs.setdefault(expression(size), (node, dim))
        if desc.kind == "input" and isinstance(desc.target, int) and (batch := dims[desc.target]) is not None:
            symbols.add(expression(value.shape[batch]))
    anchor = next(node for node in graph.graph.nodes if node.op != "placeholder")
    for node in graph.placeholders:
        value = node.meta.get("val")
        if isinstance(value, SymInt) and node.users and expression(value) in inputs:
            with graph.graph.inserting_before(anchor):
                read = graph.graph.call_function(aten.sym_size.int, inputs[expression(value)])
            read.meta = {"val": value}
            node.replace_all_uses_with(read)
    graph.batch_dims = tuple(dims)
    if symbols and all(s.is_Symbol for s in symbols):
        graph.symbols, graph.static_reason, graph.minimum_batch = frozenset(symbols), "", 2
        graph.sizes = {symbol: size for symbol, size in graph.sizes.items() if symbol not in symbols}


def fix_sizes(graph: TrainingGraph) -> None:
    """Have every size be the number that it is in the call under way: for calls of other sizes, Dynamo traces anew."""
    for node in graph.placeholders:
        value = node.meta.get("val")
        for size in value.shape if isinstance(value, Tensor) else (value,):
            if isinstance(size, SymInt):
                int(size)


_IN_BACKWARD = "must_be_in_backward"
"""AOTAutograd's mark of what an operator's own backward writes, such as a statistic of gradients."""


def _return_mutations(graph: TrainingGraph) -> None:
    """Have the graph return what it writes to its inputs at the end, so that passes may move its nodes; see `write_mutations`."""
    descs = dict(zip(graph.placeholders, graph.inputs, strict=True))
    results = list(graph.results)
    for node in list(graph.graph.nodes):
        if node.target is aten.copy_.default and node.args[0] in descs and not node.users:
            kind = "backward mutation" if node.meta.get("partitioner_tag") == _IN_BACKWARD else "mutation"
            graph.outputs = (*graph.outputs, OutputDesc(kind, descs[node.args[0]]))
            results.append(node.args[1])
            graph.graph.erase_node(node)
    graph.graph.output_node().args = (tuple(results),)


def write_mutations(graph: TrainingGraph, num_outputs: int) -> None:
    """Write what a graph returns beyond its `num_outputs` to its inputs again, after everything that reads them.

    What the backward writes comes last, as AOTAutograd has it; what is computed of gradients that never come is not written.
    """
    placeholders = dict(zip(graph.inputs, graph.placeholders, strict=True))
    results, output = list(graph.results), graph.graph.output_node()
    output.args = (tuple(results[:num_outputs]),)
    written = zip(graph.outputs[num_outputs:], results[num_outputs:], strict=True)
    for desc, value in sorted(written, key=lambda pair: pair[0].kind != "mutation"):
        target = placeholders[desc.target]
        if value is None:
            continue
        with graph.graph.inserting_before(output):
            node = graph.graph.call_function(aten.copy_.default, (target, value))
        half = "must_be_in_forward" if desc.kind == "mutation" else _IN_BACKWARD
        node.meta = {"val": target.meta["val"], "partitioner_tag": half}
    graph.outputs = graph.outputs[:num_outputs]
    graph.module.recompile()


def take_tangents_out(graph: TrainingGraph, unasked: Sequence[int]) -> list[tuple[int, fx.Node]]:
    """Take the tangents of outputs without a backward, at positions `unasked`, out of a graph: passes know nothing of them.

    Returns:
        The position among the placeholders, and the node, of each.
    """
    absent = {InputDesc("tangent", OutputDesc("output", i)) for i in unasked}
    found = [(i, node) for i, (d, node) in enumerate(zip(graph.inputs, graph.placeholders, strict=True)) if d in absent]
    for _, node in found:
        graph.graph.erase_node(node)
    graph.inputs = tuple(desc for desc in graph.inputs if desc not in absent)
    return found


def put_tangents_back(joint: fx.GraphModule, taken: Sequence[tuple[int, fx.Node]]) -> None:
    """Have a graph take again what `take_tangents_out` took out, as AOTAutograd calls it."""
    for position, node in taken:
        placeholders = joint.graph.find_nodes(op="placeholder")
        after = placeholders[position] if position < len(placeholders) else placeholders[-1].next
        with joint.graph.inserting_before(after):
            joint.graph.placeholder(str(node.target)).meta = {**node.meta, ABSENT: True}
    joint.recompile()


def _sizes(joint: fx.GraphModule) -> dict[sympy.Symbol, int]:
    """The sizes that a graph was traced with, for every symbol of its inputs' shapes."""
    found: dict[sympy.Symbol, int] = {}
    for node in joint.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        for size in (*value.shape, *value.stride()) if isinstance(value, Tensor) else (value,):
            for symbol in expression(size).free_symbols if hasattr(size, "node") else ():
                if symbol not in found and (traced := traced_size(size, symbol)) is not None:
                    found[symbol] = traced
    return found


def drop_gradients(graph: TrainingGraph, inputs: Collection[InputDesc]) -> None:
    """Have a joint graph return no gradient for some of its inputs, nor compute one."""
    returned = zip(graph.outputs, graph.results, strict=True)
    results = tuple(None if desc.kind == "gradient" and desc.target in inputs else node for desc, node in returned)
    graph.graph.output_node().args = (results,)
    graph.eliminate_dead_code()


def _place(source: str) -> str:
    """`L['self']._modules['fc']._parameters['weight']` is `fc.weight`."""
    parts = re.findall(r"\['([^']+)'\]|\.(?!_modules|_parameters|_buffers)(\w+)|\[(\d+)\]", source)
    return ".".join("".join(part) for part in parts[1:])

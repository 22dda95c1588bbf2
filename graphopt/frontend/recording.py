"""Recording: the joint graph of every region of a model that is not one graph, from one run, and all of them as one graph.

The model runs once, forward alone, on a copy. Whatever a region returns and a
later one takes is the same tensor; by that the joint graphs are joined, forwards in order and backwards in reverse, so that
analyses and planner see one training step.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from graphopt import compat
from graphopt.calls import BatchDim, batch_dims_of, batch_size_of, flatten_call
from graphopt.capture import TRACING, no_generation_cache, twin, unchanged_draws
from graphopt.compat import InputDesc, OutputDesc, pytree
from graphopt.compat.dynamo import compiled_by, differentiates, is_restart, joint_graph, statically
from graphopt.compat.graph_modules import copied, graph_module
from graphopt.errors import CaptureError, InputError, NothingToPlan, first_line
from graphopt.frontend.region import Region, region_of, tensor_names, training_graph
from graphopt.graph import Parameter, TrainingGraph, ancestors, descendants
from graphopt.specialise import specialise

logger = logging.getLogger(__name__)


@dataclass
class RecordedRegion:
    """A region as it ran.

    Attributes:
        region: its parameters.
        graph: the joint graph; None where there is no backward, or where none could be traced.
        inputs: per placeholder of Dynamo's graph, the tensor that it was given; None for other values.
        outputs: what it returned.
    """

    region: Region
    graph: TrainingGraph | None
    inputs: list[Any] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class Recording:
    """What a run of a model showed.

    Attributes:
        graph: all regions as one.
        unplanned: what could not be traced, for the report.
    """

    graph: TrainingGraph
    unplanned: tuple[str, ...]


def record(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], batch_dim: BatchDim, reason: str) -> Recording:
    """Run `model` once and join the joint graphs of its regions.

    Args:
        reason: why it is not one graph.
    Raises:
        NothingToPlan: no part of it has a joint graph.
    """
    with TRACING:
        return _record(model, args, kwargs, batch_dim, reason)


def _record(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], batch_dim: BatchDim, reason: str) -> Recording:
    inputs = flatten_call(args, kwargs)
    regions: list[RecordedRegion] = []
    unplanned: list[str] = []
    running = _without_side_effects(model)
    names = tensor_names(running)

    def backend(module: fx.GraphModule, examples: list[Any]) -> Any:
        placeholders = module.graph.find_nodes(op="placeholder")
        traced: tuple[fx.GraphModule, int] | None = None
        if differentiates(module):
            try:
                traced = _traced(module, examples)
            except Exception as error:
                if is_restart(error):
                    raise
                unplanned.append(f"a part of the model cannot be planned ({first_line(error)})")

        def run(*values: Any) -> Any:
            outputs = module(*values)
            region = region_of(placeholders, values, names)  # Dynamo runs one graph for all layers that look alike
            graph = None
            if traced is not None:
                graph = training_graph(region, graph_module(traced[0], copied(traced[0].graph)), traced[1])
            regions.append(RecordedRegion(region, graph, list(values), list(pytree.tree_leaves(outputs))))
            return outputs

        return run

    args, kwargs = pytree.tree_map_only(Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), (args, kwargs))
    with unchanged_draws(inputs.tensors), no_generation_cache(running), statically(), torch.enable_grad():
        output = compiled_by(lambda *a, **k: running(*a, **k), backend, False)(*args, **kwargs)
    returned = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
    planned = [region for region in regions if region.graph is not None]
    if not planned:
        why = unplanned[0] if unplanned else "torch.compile traces no part of it that has a backward"
        raise NothingToPlan(f"nothing of the model can be planned: {why}; {reason}")
    try:
        batch_size = batch_size_of(inputs, batch_dims_of(inputs, batch_dim)) or 1
    except InputError:  # nested targets, packed positions
        batch_size = 1
    joined = _join(planned, returned, batch_size, reason)
    order = {name: i for i, (name, _) in enumerate(model.named_parameters())}
    joined = replace(joined, parameters=tuple(sorted(joined.parameters, key=lambda p: order.get(p.name, len(order)))))
    if not joined.trainable:
        raise NothingToPlan(f"nothing of the model can be planned: what torch.compile traces has no parameters; {reason}")
    return Recording(joined, tuple(dict.fromkeys(unplanned)))


def _traced(module: fx.GraphModule, examples: Sequence[Any]) -> tuple[fx.GraphModule, int]:
    """See `joint_graph`; where all outputs are views of inputs, which AOTAutograd does not trace, copies of them are returned."""
    try:
        return joint_graph(module, examples)
    except CaptureError:
        copies = graph_module(module, copied(module.graph))
        output = copies.graph.output_node()
        for node in output.all_input_nodes:
            if isinstance(node.meta.get("example_value"), Tensor):
                with copies.graph.inserting_before(output):
                    copy_of_node = copies.graph.call_method("clone", (node,))
                copy_of_node.meta = dict(node.meta)
                output.replace_input_with(node, copy_of_node)
        copies.recompile()
        return joint_graph(copies, examples)


def runs(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a model runs on these inputs in eager mode, and returns something that can be differentiated."""
    inputs = flatten_call(args, kwargs).tensors
    args, kwargs = pytree.tree_map_only(Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), (args, kwargs))
    try:
        with unchanged_draws(inputs), torch.enable_grad():
            output = _without_side_effects(model)(*args, **kwargs)
    except Exception as error:
        logger.debug("the model does not run", exc_info=error)
        return False
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves(output))


def _without_side_effects(model: nn.Module) -> nn.Module:
    """A copy of a model; the model itself where it has none."""
    try:
        return twin(model)
    except Exception as error:
        logger.info("a model that cannot be copied is run once (%s)", first_line(error))
        return model


def _join(regions: Sequence[RecordedRegion], returned: Sequence[Tensor], batch_size: int, reason: str) -> TrainingGraph:
    joined = _Joined(regions, returned)
    graph = TrainingGraph(
        module=joined.module(),
        inputs=tuple(joined.inputs),
        outputs=tuple(joined.outputs),
        parameters=tuple(joined.parameters.values()),
        aliases=(),
        out_spec=None,
        symbols=frozenset(),
        batch_size=batch_size,
        static_reason=reason,
    )
    return specialise(graph, batch_size)  # one fake mode for all


class _Joined:
    """Builds the graph of all regions."""

    def __init__(self, regions: Sequence[RecordedRegion], returned: Sequence[Tensor]) -> None:
        self.graph = fx.Graph()
        self.inputs: list[InputDesc] = []
        self.parameters: dict[str, Parameter] = {}
        self.root = nn.Module()
        self._returned = {id(value) for value in returned}
        self._placeholders: dict[Any, fx.Node] = {}
        self._descs: dict[fx.Node, InputDesc] = {}
        self._made: dict[int, fx.Node] = {}
        self._gradients: dict[int, list[fx.Node]] = {}
        self._leaf_gradients: dict[InputDesc, list[fx.Node]] = {}
        self._maps: list[dict[fx.Node, fx.Node]] = []
        self._hold_inputs(regions)
        for number, region in enumerate(regions):
            self._forward(number, region)
        self._hold_tangents(regions)
        for number in reversed(range(len(regions))):
            self._backward(number, regions[number])
        self._finish()

    def module(self) -> fx.GraphModule:
        """The graph, with the constants of all regions."""
        module = fx.GraphModule(self.root, self.graph)
        return module

    def _placeholder(self, key: Any, desc: InputDesc, like: fx.Node) -> fx.Node:
        if key not in self._placeholders:
            node = self.graph.placeholder(f"input_{len(self.inputs)}")
            node.meta = {"val": like.meta["val"]}
            self.inputs.append(desc)
            self._placeholders[key], self._descs[node] = node, desc
        return self._placeholders[key]

    def _hold_inputs(self, regions: Sequence[RecordedRegion]) -> None:
        """Placeholders of everything that no region makes."""
        made: set[int] = set()
        for number, region in enumerate(regions):
            assert region.graph is not None
            mapping: dict[fx.Node, fx.Node] = {}
            for parameter in region.region.parameters:
                self.parameters.setdefault(parameter.name, parameter)
            for desc, node in zip(region.graph.inputs, region.graph.placeholders, strict=True):
                value = self._value(region, desc)
                if desc.kind == "parameter":
                    mapping[node] = self._placeholder(("parameter", desc.target), desc, node)
                elif desc.kind == "buffer":
                    mapping[node] = self._placeholder(("buffer", desc.target), desc, node)
                elif desc.kind != "tangent" and not (isinstance(value, Tensor) and id(value) in made):
                    key = ("input", id(value)) if isinstance(value, Tensor) else ("value", number, node.name)
                    mapping[node] = self._placeholder(key, InputDesc("input", len(self.inputs)), node)
            self._maps.append(mapping)
            made |= {id(value) for value in region.outputs if isinstance(value, Tensor)}

    @staticmethod
    def _value(region: RecordedRegion, desc: InputDesc) -> Any:
        return region.inputs[desc.target] if desc.kind == "input" and isinstance(desc.target, int) else None

    def _copy(self, node: fx.Node, region: RecordedRegion, mapping: dict[fx.Node, fx.Node]) -> None:
        if node.op == "get_attr":
            assert region.graph is not None
            value = getattr(region.graph.module, str(node.target))
            name = f"constant_{len(self.root._buffers) + len(self.root._modules)}"
            if isinstance(value, Tensor):
                self.root.register_buffer(name, value)
            else:
                self.root.add_module(name, value)
            copied = self.graph.get_attr(name)
        else:
            copied = self.graph.node_copy(node, lambda n: mapping[n])
        copied.meta = dict(node.meta)
        mapping[node] = copied

    def _forward(self, number: int, region: RecordedRegion) -> None:
        assert region.graph is not None
        mapping, graph = self._maps[number], region.graph
        for desc, node in zip(graph.inputs, graph.placeholders, strict=True):
            if node not in mapping and desc.kind != "tangent":
                mapping[node] = self._laid_out(self._made[id(self._value(region, desc))], node)
        needed = ancestors([*graph.forward_results(), *(n for n in graph.graph.nodes if compat.has_effect(n))])
        tangents = {n for d, n in zip(graph.inputs, graph.placeholders, strict=True) if d.kind == "tangent"}
        later = descendants(tangents)
        for node in graph.graph.nodes:
            if node in needed and node not in later and node.op not in ("placeholder", "output"):
                self._copy(node, region, mapping)
        for made, result in zip(graph.outputs, graph.results, strict=True):
            if made.kind != "output" or not isinstance(made.target, int) or not isinstance(result, fx.Node):
                continue
            value = region.outputs[made.target]
            if isinstance(value, Tensor):
                self._made[id(value)] = mapping[result]

    def _hold_tangents(self, regions: Sequence[RecordedRegion]) -> None:
        """A gradient from outside for what no later region takes."""
        taken = {id(value) for region in regions for value in region.inputs if isinstance(value, Tensor)}
        for number, region in enumerate(regions):
            assert region.graph is not None
            for desc, node in zip(region.graph.inputs, region.graph.placeholders, strict=True):
                value = self._output(region, desc)
                if desc.kind == "tangent" and (value is None or id(value) in self._returned or id(value) not in taken):
                    anchor = next(n for n in self.graph.nodes if n.op != "placeholder")
                    with self.graph.inserting_before(anchor):
                        held = self._placeholder(("tangent", number, node.name), desc, node)
                    if value is not None:
                        self._gradients.setdefault(id(value), []).append(held)
                    else:
                        self._maps[number][node] = held

    @staticmethod
    def _output(region: RecordedRegion, desc: InputDesc) -> Any:
        target = getattr(desc.target, "target", None)
        own = desc.kind == "tangent" and getattr(desc.target, "kind", "") == "output" and isinstance(target, int)
        return region.outputs[target] if own and target is not None else None

    def _backward(self, number: int, region: RecordedRegion) -> None:
        assert region.graph is not None
        mapping, graph = self._maps[number], region.graph
        for desc, node in zip(graph.inputs, graph.placeholders, strict=True):
            if desc.kind == "tangent" and node not in mapping:
                terms = self._gradients.get(id(self._output(region, desc)), [])
                mapping[node] = self._laid_out(self._sum(terms), node) if terms else self._zeros(node)
        for node in graph.graph.nodes:
            if node not in mapping and node.op not in ("placeholder", "output"):
                self._copy(node, region, mapping)
        places = dict(zip(graph.inputs, graph.placeholders, strict=True))
        for returned, result in zip(graph.outputs, graph.results, strict=True):
            if returned.kind != "gradient" or not isinstance(result, fx.Node):
                continue
            value = self._value(region, returned.target)
            if returned.target.kind == "parameter":
                self._leaf_gradients.setdefault(returned.target, []).append(mapping[result])
            elif isinstance(value, Tensor) and id(value) in self._made:
                self._gradients.setdefault(id(value), []).append(mapping[result])
            else:  # of an input of the caller's, or of what was computed between regions: always needed
                own = self._descs[mapping[places[returned.target]]] if returned.target in places else returned.target
                self._leaf_gradients.setdefault(own, []).append(mapping[result])

    def _laid_out(self, node: fx.Node, like: fx.Node) -> fx.Node:
        """A tensor in the memory layout with which the next region was traced: what it does with views depends on that."""
        value, wanted = node.meta["val"], like.meta["val"]
        if value.stride() == wanted.stride():
            return node
        order = sorted(range(wanted.dim()), key=lambda d: (-wanted.stride(d), -wanted.shape[d]))
        back = sorted(range(len(order)), key=order.__getitem__)
        steps: tuple[tuple[Any, tuple[Any, ...], dict[str, Any]], ...] = (
            (torch.ops.aten.permute.default, (order,), {}),
            (torch.ops.aten.clone.default, (), {"memory_format": torch.contiguous_format}),
            (torch.ops.aten.permute.default, (back,), {}),
        )
        for target, args, options in steps:
            meta = {"val": target(node.meta["val"], *args, **options)}
            node = self.graph.call_function(target, (node, *args), options)
            node.meta = meta
        return node

    def _sum(self, terms: Sequence[fx.Node]) -> fx.Node:
        total = terms[0]
        for term in terms[1:]:
            meta = {"val": total.meta["val"]}
            total = self.graph.call_function(torch.ops.aten.add.Tensor, (total, term))
            total.meta = meta
        return total

    def _zeros(self, like: fx.Node) -> fx.Node:
        value = like.meta["val"]
        options = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
        node = self.graph.call_function(torch.ops.aten.full.default, (list(value.shape), 0), options)
        node.meta = {"val": value}
        return node

    def _finish(self) -> None:
        """The order that every training graph has: outputs, then gradients."""
        forward = [(OutputDesc("output", i), node) for i, node in enumerate(dict.fromkeys(self._made.values()))]
        gradients = [(OutputDesc("gradient", desc), self._sum(terms)) for desc, terms in self._leaf_gradients.items()]
        self.outputs = [desc for desc, _ in (*forward, *gradients)]
        self.graph.output(tuple(node for _, node in (*forward, *gradients)))

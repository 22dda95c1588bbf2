"""The joint graphs of a model's regions as one.

Whatever a region returns and a later one takes is the same tensor; by that they are joined. Where eager mode computes something
in between, autograd knows of what, so that a gradient can be passed on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from graphopt import compat
from graphopt.compat import InputDesc, OutputDesc
from graphopt.frontend.region import Region
from graphopt.graph import Parameter, TrainingGraph, ancestors, descendants
from graphopt.specialise import specialise


@dataclass
class RecordedRegion:
    """A region as it ran.

    Attributes:
        region: its parameters.
        graph: the joint graph, or the forward alone where there is no backward.
        inputs: per placeholder of Dynamo's graph, what it was given.
        outputs: what it returned.
        places: where autograd computed each of these (`place_of`), before anything changed it in place.
    """

    region: Region
    graph: TrainingGraph
    inputs: Sequence[Any]
    outputs: Sequence[Any]
    places: Sequence[Any]


def place_of(value: Any) -> tuple[Any, int] | None:
    """Where autograd computes a tensor: a node, and which of its outputs it is; None if nowhere."""
    return (value.grad_fn, value.output_nr) if isinstance(value, Tensor) and value.grad_fn is not None else None


def joined_graph(regions: Sequence[RecordedRegion], returned: Sequence[Tensor], batch_size: int, reason: str) -> TrainingGraph:
    """The joint graphs of a model's regions as one, of a model that `returned` this: forwards in order, backwards in reverse."""
    joined = _Joined(regions, returned)
    graph = TrainingGraph(
        module=fx.GraphModule(joined.root, joined.graph),
        inputs=tuple(joined.inputs),
        outputs=tuple(joined.outputs),
        parameters=tuple(joined.parameters.values()),
        out_spec=None,
        symbols=frozenset(),
        batch_size=batch_size,
        static_reason=reason,
    )
    return specialise(graph, batch_size)  # one fake mode for all


class _Joined:
    """Builds the graph of all regions; `root` has the constants of all."""

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
        self._outside: dict[tuple[int, fx.Node], fx.Node] = {}
        self._leaf_gradients: dict[InputDesc, list[fx.Node]] = {}
        self._maps: list[dict[fx.Node, fx.Node]] = []
        returned_by_regions = [pair for region in regions for pair in zip(region.places, region.outputs, strict=True)]
        self._outputs = {place: value for place, value in returned_by_regions if place is not None}
        self._hold_inputs(regions)
        for number, region in enumerate(regions):
            self._forward(number, region)
        self._hold_tangents(regions)
        for number in reversed(range(len(regions))):
            self._backward(number, regions[number])
        self._finish()

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
            mapping: dict[fx.Node, fx.Node] = {}
            for parameter in region.region.parameters:
                self.parameters.setdefault(parameter.name, parameter)
            for desc, node in zip(region.graph.inputs, region.graph.placeholders, strict=True):
                value = self._value(region, desc)
                if desc.kind in ("parameter", "buffer"):
                    mapping[node] = self._placeholder((desc.kind, desc.target), desc, node)
                elif desc.kind != "tangent" and not (isinstance(value, Tensor) and id(value) in made):
                    key = ("input", id(value)) if isinstance(value, Tensor) else ("value", number, node.name)
                    mapping[node] = self._placeholder(key, InputDesc("input", len(self.inputs)), node)
            self._maps.append(mapping)
            made |= {id(value) for value in region.outputs if isinstance(value, Tensor)}

    @staticmethod
    def _value(region: RecordedRegion, desc: InputDesc) -> Any:
        return region.inputs[desc.target] if desc.kind == "input" and isinstance(desc.target, int) else None

    def _copy(self, node: fx.Node, region: RecordedRegion, number: int) -> None:
        mapping = self._maps[number]
        if node.op == "get_attr":
            value = getattr(region.graph.module, str(node.target))
            name = f"constant_{len(self.root._buffers) + len(self.root._modules)}"
            if isinstance(value, Tensor):
                self.root.register_buffer(name, value)
            else:
                self.root.add_module(name, value)
            copied = self.graph.get_attr(name)
        else:
            copied = self.graph.node_copy(node, lambda n: mapping[n])
        copied.meta = {**node.meta, "custom": {**node.meta.get("custom", {}), "region": number}}
        mapping[node] = copied

    def _forward(self, number: int, region: RecordedRegion) -> None:
        mapping, graph = self._maps[number], region.graph
        for desc, node in zip(graph.inputs, graph.placeholders, strict=True):
            if node not in mapping and desc.kind != "tangent":
                mapping[node] = self._laid_out(self._made[id(self._value(region, desc))], node)
        needed = ancestors([*graph.forward_results(), *(n for n in graph.graph.nodes if compat.has_effect(n))])
        tangents = {n for d, n in zip(graph.inputs, graph.placeholders, strict=True) if d.kind == "tangent"}
        later = descendants(tangents)
        for node in graph.graph.nodes:
            if node in needed and node not in later and node.op not in ("placeholder", "output"):
                self._copy(node, region, number)
        for made, result in zip(graph.outputs, graph.results, strict=True):
            if made.kind != "output" or not isinstance(made.target, int) or not isinstance(result, fx.Node):
                continue
            value = region.outputs[made.target]
            if isinstance(value, Tensor):
                self._made[id(value)] = mapping[result]

    def _hold_tangents(self, regions: Sequence[RecordedRegion]) -> None:
        """A gradient from outside for what no later region takes."""
        inputs = [value for region in regions for value in region.inputs if isinstance(value, Tensor)]
        taken = {id(value) for value in (*inputs, *(made for value in inputs for made in self._computed_of(value)))}
        for number, region in enumerate(regions):
            for desc, node in zip(region.graph.inputs, region.graph.placeholders, strict=True):
                values = self._differentiated(region, desc)
                used = all(id(value) in taken and id(value) not in self._returned for value in values)
                if desc.kind == "tangent" and not (values and used):
                    anchor = next(n for n in self.graph.nodes if n.op != "placeholder")
                    with self.graph.inserting_before(anchor):
                        key = ("tangent", number, node.name)  # of several graphs, every output has a backward
                        held = self._placeholder(key, InputDesc("tangent", OutputDesc("part", f"{number} {node.name}")), node)
                    self._outside[number, node] = held

    @staticmethod
    def _differentiated(region: RecordedRegion, desc: InputDesc) -> list[Tensor]:
        """What a region returned of which a tangent is the gradient: one tensor, or all those that are views of one."""
        if desc.kind != "tangent" or not isinstance(desc.target, OutputDesc):
            return []
        results = dict(zip(region.graph.outputs, region.graph.results, strict=True))
        if desc.target.kind == "output":
            found = [desc.target]
        elif desc.target.kind == "base" and (base := results.get(desc.target)) is not None:
            own = {other.target for other in region.graph.inputs if other.kind == "tangent"}
            below = descendants([base])
            found = [made for made, result in results.items() if made.kind == "output" and made not in own and result in below]
        else:
            found = []
        values = [region.outputs[made.target] for made in found if isinstance(made.target, int)]
        return [value for value in values if isinstance(value, Tensor)]

    def _backward(self, number: int, region: RecordedRegion) -> None:
        mapping, graph = self._maps[number], region.graph
        for desc, node in zip(graph.inputs, graph.placeholders, strict=True):
            if desc.kind == "tangent":
                terms = [term for value in self._differentiated(region, desc) for term in self._gradients.get(id(value), [])]
                if getattr(desc.target, "kind", "") == "base":
                    terms = [self._passed_on(term, node) for term in terms]
                if (number, node) in self._outside:
                    terms.append(self._outside[number, node])
                mapping[node] = self._laid_out(self._sum(terms), node) if terms else self._zeros(node)
        for node in graph.graph.nodes:
            if node not in mapping and node.op not in ("placeholder", "output"):
                self._copy(node, region, number)
        places = dict(zip(graph.inputs, graph.placeholders, strict=True))
        for returned, result in zip(graph.outputs, graph.results, strict=True):
            if returned.kind != "gradient" or not isinstance(result, fx.Node):
                continue
            value = self._value(region, returned.target)
            if returned.target.kind == "parameter":
                self._leaf_gradients.setdefault(returned.target, []).append(mapping[result])
            elif isinstance(value, Tensor) and id(value) in self._made:
                self._gradients.setdefault(id(value), []).append(mapping[result])
            elif isinstance(value, Tensor) and (made := self._computed_of(value)):
                for output in made:
                    self._gradients.setdefault(id(output), []).append(self._passed_on(mapping[result], self._made[id(output)]))
            else:  # of an input of the caller's, or of what eager mode trains between regions: always needed
                own = self._descs[mapping[places[returned.target]]] if returned.target in places else returned.target
                self._leaf_gradients.setdefault(own, []).append(mapping[result])

    def _computed_of(self, value: Tensor) -> list[Tensor]:
        """Outputs of regions that eager mode computed a tensor of; none where its gradient leads to anything else, too."""
        if id(value) in self._made or value.grad_fn is None:
            return []
        found: dict[int, Tensor] = {}
        waiting, seen = [place_of(value)], set()
        while waiting:
            place = waiting.pop()
            if place is None or place[0] is None or place in seen:
                continue
            seen.add(place)
            if place in self._outputs:
                found[id(self._outputs[place])] = self._outputs[place]
            elif getattr(place[0], "variable", None) is not None:
                return []
            else:
                waiting += place[0].next_functions
        return list(found.values())

    def _passed_on(self, gradient: fx.Node, output: fx.Node) -> fx.Node:
        """The gradient of an output that eager mode computes of another. Nothing is known of it but what it depends on."""
        value = output.meta["val"]
        options = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
        return self._call(torch.ops.aten.new_empty.default, (gradient, list(value.shape)), options)

    def _laid_out(self, node: fx.Node, like: fx.Node) -> fx.Node:
        """A tensor in the memory layout with which the next region was traced: what it does with views depends on that."""
        value, wanted = node.meta["val"], like.meta["val"]
        if value.stride() == wanted.stride():
            return node
        order = sorted(range(wanted.dim()), key=lambda d: (-wanted.stride(d), -wanted.shape[d]))
        back = sorted(range(len(order)), key=order.__getitem__)
        node = self._call(torch.ops.aten.permute.default, (node, order), {})
        node = self._call(torch.ops.aten.clone.default, (node,), {"memory_format": torch.contiguous_format})
        return self._call(torch.ops.aten.permute.default, (node, back), {})

    def _call(self, target: Any, args: tuple[Any, ...], options: dict[str, Any]) -> fx.Node:
        node = self.graph.call_function(target, args, options)
        node.meta = {"val": compat.run_on_metadata(target, args, options)}
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

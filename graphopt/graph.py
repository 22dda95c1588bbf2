"""TrainingGraph: a typed view of a joint forward and backward FX graph.

The joint graph takes every parameter, buffer, flat input and tangent (the gradient of an output) and returns updated
buffers, the model's outputs and one gradient per parameter. Shapes are expressions of one batch symbol `B`, so everything
that is read off the graph (FLOPs, bytes) is a formula in `B`. Passes rewrite a clone, through the few methods here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import sympy
import torch
from torch import fx

from graphopt.compat import FORWARD, InputDesc, OutputDesc, expression, graph_module, has_effect, output_list, pytree
from graphopt.compat.graph_modules import copied
from graphopt.errors import PassError

T = TypeVar("T")

BATCH = sympy.Symbol("B", integer=True, positive=True)
"""The batch symbol in every formula that graphopt hands out."""


@dataclass(frozen=True)
class Parameter:
    """One parameter of the model as the graph sees it.

    Attributes:
        name: qualified name, as in `model.named_parameters()`.
        aliases: further names of the same tensor (tied weights).
        shape, dtype: of the tensor.
        trainable: its `requires_grad` was set when the model was captured.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    aliases: tuple[str, ...] = ()


@dataclass
class TrainingGraph:
    """A joint graph and the meaning of its inputs and outputs.

    Attributes:
        module: the FX graph module; placeholders and outputs are in the order of `inputs` and `outputs`.
        parameters: every parameter once; aliases of tied weights are merged.
        out_spec: pytree structure of the model's output.
        symbols: the batch symbols inside the graph's shapes (inputs may have one each); empty for a static graph.
        batch_size: the batch of the example inputs.
        static_reason: why the batch is not symbolic, or "".
        refused: outputs whose gradient this graph cannot take, although the model's own backward could.
        sizes: values of the other symbols in the graph's shapes, by which FLOPs and bytes are counted.
        hands_out: forward() gives others results that the graph does not return, such as to a hook that collects activations.
    """

    module: fx.GraphModule
    inputs: tuple[InputDesc, ...]
    outputs: tuple[OutputDesc, ...]
    parameters: tuple[Parameter, ...]
    out_spec: Any
    symbols: frozenset[sympy.Symbol]
    batch_size: int
    batch_dims: tuple[int | None, ...] = ()
    static_reason: str = ""
    guards: tuple[sympy.Basic, ...] = ()
    minimum_batch: int = 1
    refused: tuple[OutputDesc, ...] = ()
    sizes: Mapping[sympy.Symbol, int] = field(default_factory=dict, repr=False, compare=False)
    hands_out: bool = False

    @property
    def symbolic(self) -> bool:
        """Whether the graph holds for more than one batch size."""
        return bool(self.symbols)

    @property
    def graph(self) -> fx.Graph:
        """The FX graph."""
        return self.module.graph

    @property
    def placeholders(self) -> list[fx.Node]:
        """Input nodes, in the order of `inputs`."""
        return [node for node in self.graph.nodes if node.op == "placeholder"]

    @property
    def example(self) -> torch.Tensor:
        """What some input records: a fake tensor, for its device and mode."""
        values = (node.meta.get("val") for node in self.placeholders)
        return next(value for value in values if isinstance(value, torch.Tensor))

    @property
    def results(self) -> tuple[fx.Node | None, ...]:
        """Output nodes, in the order of `outputs`; None for a gradient that is not computed."""
        return tuple(output_list(self.module))

    @property
    def trainable(self) -> tuple[Parameter, ...]:
        """Parameters whose gradient the graph computes now."""
        computed = self.gradients()
        return tuple(p for p in self.parameters if p.name in computed)

    def gradients(self) -> dict[str, fx.Node]:
        """Gradient node by parameter name, for every gradient that the graph computes, be it compressed."""
        return {
            desc.target.target: node
            for desc, node in zip(self.outputs, self.results, strict=True)
            if desc.kind == "gradient" and desc.target.kind in ("parameter", "compressed") and node is not None
        }

    @property
    def compressed(self) -> frozenset[str]:
        """Parameters whose gradient the graph returns in compressed form, as that of an input of kind "compressed"."""
        return frozenset(d.target.target for d in self.outputs if d.kind == "gradient" and d.target.kind == "compressed")

    def forward_results(self) -> list[fx.Node]:
        """Nodes that the forward alone must produce: updated buffers, outputs and their bases."""
        return [
            node
            for desc, node in zip(self.outputs, self.results, strict=True)
            if desc.kind in FORWARD and isinstance(node, fx.Node)
        ]

    def parameter_nodes(self) -> dict[fx.Node, str]:
        """Parameter name by placeholder."""
        return {node: desc.target for desc, node in zip(self.inputs, self.placeholders, strict=True) if desc.kind == "parameter"}

    def formula(self, value: Any) -> sympy.Expr:
        """An int, a symbolic int or an expression of this graph's symbols as an expression of `BATCH`."""
        return expression(value).subs({**self.sizes, **dict.fromkeys(self.symbols, BATCH)})

    def at(self, value: Any, batch_size: int) -> int:
        """An int or symbolic int of this graph at a concrete batch size."""
        if isinstance(value, int):
            return value
        if self.sizes:
            return int(expression(value).subs({**self.sizes, **dict.fromkeys(self.symbols, batch_size)}))
        return _at(expression(value), self.symbols, batch_size)

    def bytes_of(self, value: Any) -> int:
        """Bytes of all tensors in a value, each as if contiguous, at the captured batch size."""
        tensors = (t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor))
        return sum(math.prod(self.at(size, self.batch_size) for size in t.shape) * t.element_size() for t in tensors)

    def accepts(self, batch_size: int) -> bool:
        """Whether the graph is valid for `batch_size`: every condition the trace relied on holds there."""
        if not self.symbolic:
            return batch_size == self.batch_size
        if batch_size < self.minimum_batch:
            return False
        values = dict.fromkeys(self.symbols, batch_size)
        return all(guard.subs(values) != sympy.false for guard in self.guards)

    def __deepcopy__(self, memo: Any) -> TrainingGraph:
        """The graph itself: what rewrites it takes a clone."""
        return self

    def clone(self) -> TrainingGraph:
        """A copy whose graph can be rewritten without touching this one; tensors and metadata are shared."""
        return replace(self, module=graph_module(self.module, copied(self.graph)))

    def drop_gradient(self, name: str) -> None:
        """Stop returning the gradient of parameter `name`; `eliminate_dead_code` removes what only it needed.

        Raises:
            PassError: the graph has no gradient for `name`.
        """
        results = list(self.results)
        for position, desc in enumerate(self.outputs):
            if desc.kind == "gradient" and desc.target.target == name and results[position] is not None:
                results[position] = None
                self.graph.output_node().args = (tuple(results),)
                return
        raise PassError(f"the graph computes no gradient for {name!r}; it may be frozen or unused")

    def compress_gradient(self, name: str, node: fx.Node) -> None:
        """Return `node` instead of the gradient of parameter `name`, as the gradient of the input "compressed"."""
        desc = InputDesc("compressed", name)
        position = self.outputs.index(OutputDesc("gradient", InputDesc("parameter", name)))
        self.outputs = (*self.outputs[:position], OutputDesc("gradient", desc), *self.outputs[position + 1 :])
        results = list(self.results)
        results[position] = node
        self.graph.output_node().args = (tuple(results),)

    def add_input(self, desc: InputDesc, value: Any) -> fx.Node:
        """A further input of the forward, which records `value` (a fake tensor)."""
        position = next((i for i, d in enumerate(self.inputs) if d.kind == "tangent"), len(self.inputs))
        tangents = self.placeholders[position:]
        anchor = tangents[0] if tangents else next(n for n in self.graph.nodes if n.op != "placeholder")
        with self.graph.inserting_before(anchor):
            node = self.graph.placeholder(f"{desc.kind}_{position}")
        node.meta["val"] = value
        self.inputs = (*self.inputs[:position], desc, *self.inputs[position:])
        return node

    def add_backward_output(self, name: str, node: fx.Node) -> None:
        """Have the backward return `node`, too; the pass that adds it gets its value in each backward."""
        self.outputs = (*self.outputs, OutputDesc("slot", name))
        self.graph.output_node().args = ((*self.results, node),)

    def eliminate_dead_code(self) -> None:
        """Remove nodes that no output needs."""
        remove_dead_nodes(self.module)


@functools.lru_cache(maxsize=10_000)  # the same few formulas, tens of thousands of times
def _at(formula: sympy.Expr, symbols: frozenset[sympy.Symbol], batch_size: int) -> int:
    return int(formula.subs(dict.fromkeys(symbols, batch_size)))


def remove_dead_nodes(module: fx.GraphModule) -> None:
    """Remove nodes that no output of a graph needs and that change nothing.

    Unlike FX's own dead-code elimination this also removes random operators, attention with dropout among them.
    """
    graph = module.graph
    lasting = [node for node in graph.nodes if node.op not in ("placeholder", "output") and has_effect(node)]
    needed = ancestors([*graph.output_node().all_input_nodes, *lasting])
    for node in reversed(list(graph.nodes)):
        if node.op not in ("placeholder", "output") and node not in needed:
            graph.erase_node(node)
    module.recompile()


def ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """`nodes` and everything that they are computed from."""
    return set(reached(nodes, lambda node: node.all_input_nodes))


def descendants(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """`nodes` and everything that is computed from them."""
    return set(reached(nodes, lambda node: node.users))


def reached(starts: Iterable[T], onward: Callable[[T], Iterable[T]]) -> Iterator[T]:
    """`starts` and everything that is reached from them, each once, where `onward` says where one leads."""
    seen: set[T] = set()
    waiting = list(starts)
    while waiting:
        current = waiting.pop()
        if current not in seen:
            seen.add(current)
            yield current
            waiting.extend(onward(current))


def parameters_read(node: fx.Node, parameters: Container[fx.Node]) -> list[fx.Node]:
    """Those of `parameters` that a node reads as they are, transposed or cast; the one of most dimensions first."""
    found = []
    for read in node.all_input_nodes:
        while read not in parameters and len(read.all_input_nodes) == 1:
            read = read.all_input_nodes[0]
        if read in parameters:
            found.append(read)
    return sorted(found, key=lambda parameter: -parameter.meta["val"].dim())


def merge_tied_weights(graph: TrainingGraph) -> None:
    """Where one tensor came in under several names, sum the gradients into the first name's.

    Every later name keeps its (unused) placeholder, so that positions do not move.
    """
    owner = {alias: p.name for p in graph.parameters for alias in (p.name, *p.aliases)}
    first: dict[str, fx.Node] = {}
    for desc, node in zip(graph.inputs, graph.placeholders, strict=True):
        if desc.kind != "parameter":
            continue
        name = owner[desc.target]
        if name in first:
            node.replace_all_uses_with(first[name])
        else:
            first[name] = node
    results = list(graph.results)
    position_of: dict[str, int] = {}
    output = graph.graph.output_node()
    outputs = list(graph.outputs)
    for position, returned in enumerate(outputs):
        if returned.kind != "gradient" or returned.target.kind != "parameter":
            continue
        name = owner[returned.target.target]
        if name not in position_of:
            position_of[name] = position
            outputs[position] = OutputDesc("gradient", InputDesc("parameter", name))
            continue
        outputs[position] = OutputDesc("none", None)
        first_result, result = results[position_of[name]], results[position]
        results[position] = None
        if result is None or first_result is None:
            results[position_of[name]] = first_result if result is None else result
            continue
        with graph.graph.inserting_before(output):
            total = graph.graph.call_function(torch.ops.aten.add.Tensor, (first_result, result))
        total.meta = {k: v for k, v in first_result.meta.items() if k in ("val", "partitioner_tag")}
        results[position_of[name]] = total
    graph.inputs = tuple(InputDesc("parameter", owner[d.target]) if d.kind == "parameter" else d for d in graph.inputs)
    graph.outputs = tuple(outputs)
    output.args = (tuple(results),)
    graph.module.recompile()

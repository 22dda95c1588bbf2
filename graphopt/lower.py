"""A static joint graph as a differentiable function, for checks of graphs and for measurements; training runs torch.compile's.

AOTAutograd splits the graph, compiles its halves and runs them, as in training. What it is given to trace takes and returns what
the graph does, and computes nothing: the graph itself comes in the place of its joint graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

from graphopt import compat
from graphopt.calls import FlatInputs
from graphopt.capture import TRACING
from graphopt.compat import InputDesc, OutputDesc
from graphopt.compat.aot import GraphCompiler, Hooks, compile_joint
from graphopt.errors import InputError
from graphopt.frontend.region import write_mutations
from graphopt.frontend.values import OWN, Values
from graphopt.graph import TrainingGraph
from graphopt.transforms.symbolic_zeros import tangent_results

if TYPE_CHECKING:
    from graphopt.runtime.supply import Supply

Backend = str | GraphCompiler
"""`inductor`, `aot_eager`, or a function `(graph module, example inputs) -> callable`."""


def check_backend(backend: Backend) -> None:
    """Raise `InputError` unless `backend` is one that steps are compiled by."""
    if not callable(backend) and backend not in ("inductor", "aot_eager"):
        raise InputError(f"unknown backend {backend!r}: use 'inductor', 'aot_eager' or a callable (gm, inputs).")


def lower(graph: TrainingGraph, backend: Backend, supply: Supply) -> Callable[[FlatInputs, Mapping[str, Tensor]], list[Any]]:
    """Compile a static graph (see `specialise`), which is used up; where Inductor is asked for, by aot_eager: it runs seldom.

    Args:
        supply: of what passes have the graph take and return beside the model's own values.
    Returns:
        From a batch, and parameters and buffers by name, to the model's flat outputs. These can be differentiated, and what the
        model updates is updated.
    """
    values = Values(supply)
    values.connect_results(graph, 0)  # what is fetched is copied, which no prediction of memory counts
    inputs = [(d, node.meta["val"]) for d, node in zip(graph.inputs, graph.placeholders, strict=True) if d.kind != "tangent"]
    written = {desc.target for desc in graph.outputs if desc.kind == "mutation"}
    strides = [None if desc in written else value.stride() for desc, value in inputs]
    run, num_outputs = _compiled(graph, inputs, backend), sum(desc.kind == "output" for desc in graph.outputs)

    # the graph finds `values` by a number, as long as they live
    def step(batch: FlatInputs, tensors: Mapping[str, Tensor], _alive: Values = values) -> list[Any]:
        given = []
        for desc, value in inputs:
            if desc.kind in OWN:
                given.append(batch.tensors[desc.target] if desc.kind == "input" else tensors[desc.target])
            else:
                like = torch.empty(0, dtype=value.dtype, device=value.device)
                given.append(supply.supply(desc, value.shape, like))
        with compat.no_autocast():
            return list(run(*map(_laid_out, given, strides)))[:num_outputs]

    return step


def _compiled(graph: TrainingGraph, inputs: Sequence[tuple[InputDesc, Tensor]], backend: Backend) -> Callable[..., Any]:
    """A graph as a function of these inputs, which are all but the tangents; returns outputs and what they are views of."""
    found = list(zip(graph.outputs, graph.results, strict=True))
    results = [(desc, node) for desc, node in found if desc.kind in ("output", "base")]
    written = [(desc, node) for desc, node in found if desc.kind == "mutation"]
    gradients = {graph.inputs.index(desc.target): (desc, node) for desc, node in found if desc.kind == "gradient"}
    returned = [*results, *(gradients.get(i, (OutputDesc("none", None), None)) for i in range(len(inputs)))]
    graph.outputs = tuple(desc for desc, _ in (*returned, *written))
    graph.graph.output_node().args = (tuple(node for _, node in (*returned, *written)),)
    write_mutations(graph, len(returned))
    differentiable = set(tangent_results(graph).values())
    like = [(node.meta["val"] if isinstance(node, fx.Node) else node, i in differentiable) for i, (_, node) in enumerate(results)]
    module = _stand_in(len(inputs), [graph.inputs.index(desc.target) for desc, _ in written], like)
    examples = [value.detach().requires_grad_(i in gradients) for i, (_, value) in enumerate(inputs)]

    def failed(error: Exception) -> None:
        raise error

    hooks = Hooks(lambda *_: graph.module, lambda *_: None, failed, "")
    with TRACING, compat.unsynced_tracing_context(compat.fake_mode_of(examples)):
        return compile_joint(module, examples, "aot_eager" if backend == "inductor" else backend, hooks)


def _laid_out(tensor: Tensor, stride: tuple[int, ...] | None) -> Tensor:
    """`tensor` in the memory layout that a graph was traced with; a copy only if it has another, and the graph reads it alone."""
    if stride is None or tensor.stride() == stride:
        return tensor
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _stand_in(num_inputs: int, written: Sequence[int], results: Sequence[tuple[Any, bool]]) -> fx.GraphModule:
    """What writes to some of its inputs, and returns values like these, of which some can be differentiated."""

    def step(*inputs: Tensor) -> list[Any]:
        for position in written:
            inputs[position].zero_()
        return [like(value).requires_grad_(wanted) if isinstance(value, Tensor) else value for value, wanted in results]

    def like(value: Tensor) -> Tensor:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)

    graph = fx.Graph()
    graph.output(graph.call_function(step, tuple(graph.placeholder(f"input_{i}") for i in range(num_inputs))))
    return fx.GraphModule(nn.Module(), graph)

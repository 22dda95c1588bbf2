"""A static joint graph as a function with a `grad_fn`, for checks of graphs and for measurements; training runs torch.compile's.

The joint graph is partitioned into a forward and a backward, both are compiled, and an `autograd.Function` ties them together. It
hands autograd exactly the gradients that the graph computes, None for the rest, and writes updated buffers back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from graphopt import compat
from graphopt.calls import FlatInputs
from graphopt.compat import InputDesc
from graphopt.compat.aot import compile_half
from graphopt.compat.inductor import compile_inductor_backward, compile_inductor_forward
from graphopt.errors import GraphoptError
from graphopt.graph import TrainingGraph
from graphopt.runtime.uniforms import Uniforms
from graphopt.transforms.partition import Halves, split

Backend = str | Callable[[fx.GraphModule, list[Tensor]], Callable[..., Any]]
"""`inductor`, `aot_eager`, or a function `(graph module, example inputs) -> callable`."""


@dataclass(frozen=True)
class Lowered:
    """A compiled joint graph.

    Attributes:
        halves: the partitioned graphs that were compiled.
        run: `(flat graph inputs, tangents left out) -> flat model outputs`, differentiable.
        slots: what the last backward returned beside gradients, by name; see `TrainingGraph.add_backward_output`.
    """

    halves: Halves
    run: Callable[[Sequence[Any]], list[Any]]
    slots: dict[str, Tensor]


def check_backend(backend: Backend) -> None:
    """Raise `GraphoptError` unless `backend` is one that `lower` knows."""
    if not callable(backend) and backend not in ("inductor", "aot_eager"):
        raise GraphoptError(f"unknown backend {backend!r}: use 'inductor', 'aot_eager' or a callable (gm, inputs).")


def lower(graph: TrainingGraph, backend: Backend) -> Lowered:
    """Partition and compile a static graph (see `specialise`, with `decompose=True` for Inductor)."""
    layout = _Layout.of(graph)
    halves = split(graph, inductor=backend == "inductor")
    if backend == "inductor":
        outputs = halves.num_forward - halves.num_mutations
        forward = compile_inductor_forward(halves.forward, halves.backward, halves.num_mutations, outputs, halves.static_inputs)
        backward = compile_inductor_backward(halves.backward)
    else:
        forward, backward = (compile_half(half, backend) for half in (halves.forward, halves.backward))
    runner = _Runner(layout, tuple(halves.tangents.values()), forward, backward)
    return Lowered(halves, runner, runner.slots)


def _laid_out(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    """`tensor` in the memory layout that a graph was traced with; a copy only if it has another."""
    if tensor.stride() == stride:
        return tensor
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


@dataclass(frozen=True)
class _Layout:
    """Where everything stands in the inputs and outputs of a joint graph; read before the partitioner rewrites it.

    Attributes:
        mutated: input position of each updated buffer that the forward returns first.
        num_results, num_outputs: the model's outputs with and without the bases that some of them are views of.
        strides: per input, the memory layout that the graph was traced with.
        tangents: by the position of a result, the memory layout of its gradient.
        gradients: (index among the backward's results, input position) of every gradient that is computed.
        slots: (index among the backward's results, name) of what the backward returns beside gradients.
    """

    mutated: tuple[int, ...]
    num_results: int
    num_outputs: int
    strides: tuple[tuple[int, ...], ...]
    tangents: dict[int, tuple[int, ...]]
    gradients: tuple[tuple[int, int], ...]
    slots: tuple[tuple[int, str], ...]

    @classmethod
    def of(cls, graph: TrainingGraph) -> _Layout:
        descs = graph.outputs
        results = [d for d in descs if d.kind in ("output", "base")]
        position = {(d.kind, d.target): i for i, d in enumerate(results)}
        inputs = list(zip(graph.inputs, graph.placeholders, strict=True))
        tangents = [(d.target, node.meta["val"]) for d, node in inputs if d.kind == "tangent"]
        returned = [(d, node) for d, node in zip(descs, graph.results, strict=True) if d.kind in ("gradient", "none", "slot")]
        return cls(
            mutated=tuple(graph.inputs.index(d.target) for d in descs if d.kind == "mutation"),
            num_results=len(results),
            num_outputs=sum(d.kind == "output" for d in results),
            strides=tuple(tuple(node.meta["val"].stride()) for desc, node in inputs if desc.kind != "tangent"),
            tangents={position[made.kind, made.target]: tuple(value.stride()) for made, value in tangents},
            gradients=tuple(
                (k, graph.inputs.index(d.target))
                for k, (d, node) in enumerate(returned)
                if node is not None and d.kind == "gradient"
            ),
            slots=tuple((k, d.target) for k, (d, _) in enumerate(returned) if d.kind == "slot"),
        )


class _Runner:
    """Calls the compiled pair; see the module's docstring."""

    def __init__(self, layout: _Layout, read: Sequence[int], forward: Any, backward: Any) -> None:
        """Set up.

        Args:
            read: positions of the results whose gradients the backward takes, in their order.
        """
        self.layout = layout
        self.read = read
        self.forward = forward
        self.backward = backward
        self.slots: dict[str, Tensor] = {}

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        """Run the step on the joint graph's inputs, less the tangents."""
        differentiated = [inputs[position] for _, position in self.layout.gradients]
        return list(_Step.apply(self, tuple(inputs), *differentiated))[: self.layout.num_outputs]


class _Step(torch.autograd.Function):
    """The compiled step as one node of the autograd graph."""

    @staticmethod
    def forward(ctx: Any, runner: _Runner, inputs: tuple[Any, ...], *differentiated: Tensor) -> Any:
        layout, mutations = runner.layout, len(runner.layout.mutated)
        with compat.no_autocast():
            returned = runner.forward(
                [
                    _laid_out(t.detach().clone() if i in layout.mutated else t.detach(), stride)
                    for i, (t, stride) in enumerate(zip(inputs, layout.strides, strict=True))
                ]
            )
        for position, value in zip(layout.mutated, returned[:mutations], strict=True):
            inputs[position].copy_(value)
        results = returned[mutations : mutations + layout.num_results]
        ctx.runner, ctx.saved = runner, list(returned[mutations + layout.num_results :])
        ctx.results = [(r.shape, r.dtype, r.device) if isinstance(r, Tensor) else None for r in results]
        ctx.mark_non_differentiable(*(r for i, r in enumerate(results) if i not in layout.tangents and isinstance(r, Tensor)))
        ctx.set_materialize_grads(False)
        return tuple(r.view_as(r) if isinstance(r, Tensor) else r for r in results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        runner: _Runner = ctx.runner
        args, ctx.saved = ctx.saved, None
        for i in runner.read:
            shape, dtype, device = ctx.results[i]
            gradient = gradients[i]
            value = torch.zeros(shape, dtype=dtype, device=device) if gradient is None else gradient
            args.append(_laid_out(value, runner.layout.tangents[i]))
        with compat.no_autocast():
            returned = runner.backward(args)
        runner.slots.update({name: returned[k] for k, name in runner.layout.slots})
        return (None, None, *(returned[k] for k, _ in runner.layout.gradients))


def graph_inputs(
    graph: TrainingGraph,
    inputs: FlatInputs,
    model_tensors: Mapping[str, Tensor],
    uniforms: Uniforms,
    given: Mapping[InputDesc, Tensor] | None = None,
) -> list[Tensor]:
    """The inputs of a graph's forward, in order: the caller's, the model's, and random numbers for passes that draw.

    Args:
        given: values of inputs of kind "given" and "compressed".
    """
    flat = []
    for desc, node in zip(graph.inputs, graph.placeholders, strict=True):
        if desc.kind == "input":
            flat.append(inputs.tensors[desc.target])
        elif desc.kind == "random":
            value = node.meta["val"]
            flat.append(uniforms.draw(desc.target, int(value.shape[0]), value.device))
        elif desc.kind in ("given", "compressed"):
            flat.append((given or {})[desc])
        elif desc.kind != "tangent":
            flat.append(model_tensors[desc.target])
    return flat

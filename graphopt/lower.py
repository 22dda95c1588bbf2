"""Lowering: a static joint graph becomes a callable with a `grad_fn`.

The joint graph is partitioned into a forward and a backward, both are compiled, and an `autograd.Function` of our own
ties them together. It hands autograd exactly the gradients that the graph computes, None for the rest, writes updated
buffers back, and rebuilds outputs that are views of inputs or of other outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from graphopt import compat
from graphopt.errors import GraphoptError
from graphopt.graph import TrainingGraph

Backend = str | Callable[[fx.GraphModule, list[Tensor]], Callable[..., Any]]
"""`inductor`, `aot_eager`, or a function `(graph module, example inputs) -> callable`."""


@dataclass(frozen=True)
class Lowered:
    """A compiled training step.

    Attributes:
        forward_graph, backward_graph: the partitioned graphs that were compiled.
        run: `(flat graph inputs) -> flat model outputs`, differentiable.
    """

    forward_graph: fx.GraphModule
    backward_graph: fx.GraphModule
    run: Callable[[Sequence[Any]], list[Any]]


def check_backend(backend: Backend) -> None:
    """Raise `GraphoptError` unless `backend` is one that `lower` knows."""
    if not callable(backend) and backend not in ("inductor", "aot_eager"):
        raise GraphoptError(f"unknown backend {backend!r}: use 'inductor', 'aot_eager' or a callable (gm, inputs).")


def lower(graph: TrainingGraph, backend: Backend) -> Lowered:
    """Partition and compile a static graph (see `specialise`, with `decompose=True` for Inductor)."""
    kinds = [desc.kind for desc in graph.outputs]
    num_forward = sum(kind in ("mutation", "output", "base") for kind in kinds)
    static = [i for i, desc in enumerate(graph.inputs) if desc.kind in ("parameter", "buffer")]
    inductor = backend == "inductor"
    forward, backward = compat.partition(graph.module, num_forward, static, inductor)
    if inductor:
        num_mutations = kinds.count("mutation")
        pair = compat.compile_inductor(forward, backward, num_mutations, num_forward - num_mutations, static)
    else:
        pair = compat.CompiledPair(_boxed(forward, backend), _boxed(backward, backend))
    return Lowered(forward, backward, _Runner(graph, forward, backward, pair))


def _boxed(module: fx.GraphModule, backend: Backend) -> Callable[[list[Any]], Sequence[Any]]:
    """A callable that takes one list of arguments and empties it, so that each is freed after its last use."""
    if callable(backend):
        inputs = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
        compiled = backend(module, inputs)

        def call(args: list[Any]) -> Sequence[Any]:
            flat = tuple(args)
            args.clear()
            return compiled(*flat)

        return call
    return fx.Interpreter(module).boxed_run


@dataclass(frozen=True)
class _Tangent:
    """What the backward expects as gradient of one forward result."""

    result: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def materialise(self, gradient: Tensor | None) -> Tensor:
        if gradient is None:
            return torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        if gradient.stride() == self.stride:
            return gradient
        laid_out = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
        return laid_out.copy_(gradient)


class _Runner:
    """Calls the compiled pair; see the module's docstring."""

    def __init__(
        self, graph: TrainingGraph, forward: fx.GraphModule, backward: fx.GraphModule, pair: compat.CompiledPair
    ) -> None:
        self.pair = pair
        descs = graph.outputs
        self.mutated = [_input_position(graph, d.target) for d in descs if d.kind == "mutation"]
        results = [d for d in descs if d.kind in ("output", "base")]
        self.num_results = len(results)
        self.num_outputs = sum(d.kind == "output" for d in results)
        self.bases = [d.target for d in results if d.kind == "base"]
        self.aliases = graph.aliases
        position = {(d.kind, d.target): i for i, d in enumerate(results)}
        self.tangents = []
        self.forward_inputs = []
        for i, (desc, node) in enumerate(zip(graph.inputs, graph.placeholders, strict=True)):
            if desc.kind != "tangent":
                self.forward_inputs.append(i)
                continue
            value = node.meta["val"]
            self.tangents.append(
                _Tangent(
                    position[(desc.target.kind, desc.target.target)],
                    tuple(value.shape),
                    tuple(value.stride()),
                    value.dtype,
                    value.device,
                )
            )
        self.differentiable = {t.result for t in self.tangents}
        # Position among the inputs of every gradient that the backward returns.
        gradient_of = [_input_position(graph, d.target) if d.kind == "gradient" else None for d in descs]
        computed = graph.results
        self.gradients = [
            (k, gradient_of[i])
            for k, i in enumerate(j for j, d in enumerate(descs) if d.kind in ("gradient", "none"))
            if gradient_of[i] is not None and computed[i] is not None
        ]
        self.differentiated = [position for _, position in self.gradients]
        self.num_inputs = len(self.forward_inputs)
        # The forward returns results first and then what it saves, in the order of the backward's own inputs.
        names = [n.name for n in backward.graph.nodes if n.op == "placeholder"]
        tangent_names = {n.name for d, n in zip(graph.inputs, graph.placeholders, strict=True) if d.kind == "tangent"}
        self.num_saved = len([n for n in names if n not in tangent_names])
        used = [i for i, n in enumerate(t for t in names if t in tangent_names)]
        order = [n.name for d, n in zip(graph.inputs, graph.placeholders, strict=True) if d.kind == "tangent"]
        self.used_tangents = [order.index(n) for n in names if n in tangent_names]
        del used, forward

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        """Run the step on the joint graph's inputs, less the tangents."""
        differentiated = [inputs[i] for i in self.differentiated]
        results = list(_Step.apply(self, tuple(inputs), *differentiated))
        return [self._output(i, results, inputs) for i in range(self.num_outputs)]

    def _output(self, index: int, results: list[Any], inputs: Sequence[Any]) -> Any:
        """Output `index` as eager mode would return it: a view of what it is a view of."""
        alias = self.aliases[index]
        value = results[index]
        if alias.kind == "input":
            base = inputs[alias.base]
        elif alias.kind == "intermediate":
            base = results[self.num_outputs + alias.base]
        elif alias.kind == "output":
            base = results[alias.base]
        else:
            return value
        if alias.exact or base is value:
            return base
        return base.as_strided(value.size(), value.stride(), value.storage_offset())


class _Step(torch.autograd.Function):
    """The compiled step as one node of the autograd graph."""

    @staticmethod
    def forward(ctx: Any, runner: _Runner, inputs: tuple[Any, ...], *differentiated: Tensor) -> Any:
        returned = runner.pair.forward([t.detach() if isinstance(t, Tensor) else t for t in inputs])
        mutations = len(runner.mutated)
        for position, value in zip(runner.mutated, returned[:mutations], strict=True):
            inputs[position].copy_(value)
        results = list(returned[mutations : mutations + runner.num_results])
        saved = list(returned[mutations + runner.num_results :])
        ctx.runner = runner
        ctx.is_tensor = [isinstance(s, Tensor) for s in saved]
        ctx.constants = [None if isinstance(s, Tensor) else s for s in saved]
        ctx.save_for_backward(*(s for s in saved if isinstance(s, Tensor)))
        ctx.mark_non_differentiable(
            *(r for i, r in enumerate(results) if i not in runner.differentiable and isinstance(r, Tensor))
        )
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        runner: _Runner = ctx.runner
        saved = iter(ctx.saved_tensors)
        args = [
            next(saved) if is_tensor else constant
            for is_tensor, constant in zip(ctx.is_tensor, ctx.constants, strict=True)
        ]
        del saved
        compat.release_saved_tensors(ctx)
        tangents = [runner.tangents[i] for i in runner.used_tangents]
        args.extend(t.materialise(gradients[t.result]) for t in tangents)
        returned = runner.pair.backward(args)
        return (None, None, *(returned[k] for k, _ in runner.gradients))


def _input_position(graph: TrainingGraph, desc: compat.InputDesc) -> int:
    return graph.inputs.index(desc)

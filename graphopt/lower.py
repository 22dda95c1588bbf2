"""Lowering: a static joint graph becomes a callable with a `grad_fn`.

The joint graph is partitioned into a forward and a backward, both are compiled, and an `autograd.Function` of our own
ties them together. It hands autograd exactly the gradients that the graph computes, None for the rest, writes updated
buffers back, and rebuilds outputs that are views of inputs or of other outputs.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from graphopt import compat
from graphopt.compat.inductor import Compiled, compile_inductor_backward, compile_inductor_forward
from graphopt.errors import GraphoptError
from graphopt.graph import TrainingGraph
from graphopt.partition import Halves, split

logger = logging.getLogger(__name__)

Backend = str | Callable[[fx.GraphModule, list[Tensor]], Callable[..., Any]]
"""`inductor`, `aot_eager`, or a function `(graph module, example inputs) -> callable`."""


@dataclass(frozen=True)
class Lowered:
    """A compiled training step.

    Attributes:
        halves: the partitioned graphs that were compiled.
        run: `(flat graph inputs) -> flat model outputs`, differentiable.
        slots: what the last backward returned beside gradients, by name; see `TrainingGraph.add_backward_output`.
        seconds: of the last runs, from the forward's beginning to the backward's end, with what the caller did between them. On
            an accelerator this is the time of handing the work over, not of the work.
    """

    halves: Halves
    run: Callable[[Sequence[Any]], list[Any]]
    slots: dict[str, Tensor]
    seconds: deque[float]


def check_backend(backend: Backend) -> None:
    """Raise `GraphoptError` unless `backend` is one that `lower` knows."""
    if not callable(backend) and backend not in ("inductor", "aot_eager"):
        raise GraphoptError(f"unknown backend {backend!r}: use 'inductor', 'aot_eager' or a callable (gm, inputs).")


def lower(graph: TrainingGraph, backend: Backend) -> Lowered:
    """Partition and compile a static graph (see `specialise`, with `decompose=True` for Inductor)."""
    layout = _Layout.of(graph)
    halves = split(graph, inductor=backend == "inductor")
    if backend == "inductor":
        run = compile_inductor_forward(
            halves.forward,
            halves.backward,
            halves.num_mutations,
            halves.num_forward - halves.num_mutations,
            halves.static_inputs,
        )
    else:
        run = _boxed(halves.forward, backend)
    backwards = _Backwards(halves, layout.tangents, backend)
    backwards.compile_for(halves.expected)
    runner = _Runner(layout, run, backwards)
    return Lowered(halves, runner, runner.slots, runner.seconds)


def _boxed(module: fx.GraphModule, backend: Backend) -> Callable[[list[Any]], Sequence[Any]]:
    """A callable that takes one list of arguments and empties it, so that each is freed after its last use."""
    if callable(backend):
        inputs = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
        compiled = backend(fx.GraphModule(module, module.graph), inputs)  # not a lazy one, which torch.compile does not look into

        def call(args: list[Any]) -> Sequence[Any]:
            flat = tuple(args)
            args.clear()
            return compiled(*flat)

        return call
    interpreter = fx.Interpreter(module)

    def interpret(args: list[Any]) -> Sequence[Any]:
        try:
            result: Sequence[Any] = interpreter.boxed_run(args)
            return result
        finally:
            interpreter.env.clear()  # it would hold the results, saved activations among them, until the next run

    return interpret


@dataclass(frozen=True)
class _Tangent:
    """What the backward expects as gradient of one forward result."""

    result: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def _laid_out(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    """`tensor` in the memory layout that a graph was traced with; a copy only if it has another."""
    if tensor.stride() == stride:
        return tensor
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _kept_apart(saved: Sequence[Any], changed: Sequence[Tensor]) -> list[Any]:
    """What the forward saves, copied where it lies in a tensor that the step then changes: the backward needs what was there."""
    storages = {t.untyped_storage().data_ptr() for t in changed}
    kept = []
    for value in saved:
        if isinstance(value, Tensor) and value.untyped_storage().data_ptr() in storages:
            own = value.untyped_storage().clone()
            value = value.new_empty(0).set_(own, value.storage_offset(), value.size(), value.stride())
        kept.append(value)
    return kept


@dataclass(frozen=True)
class _Layout:
    """Where everything stands in the inputs and outputs of a joint graph; read before the partitioner rewrites it.

    Attributes:
        mutated: input position of each updated buffer that the forward returns first.
        num_results, num_outputs: the model's outputs with and without the bases that some of them are views of.
        aliases: see `OutputAlias`, per output.
        strides: per input, the memory layout that the graph was traced with.
        tangents: by placeholder name, what the backward expects.
        gradients: (index among the backward's results, input position) of every gradient that is computed.
        slots: (index among the backward's results, name) of what the backward returns beside gradients.
        refused: see `TrainingGraph.refused`.
    """

    mutated: tuple[int, ...]
    num_results: int
    num_outputs: int
    aliases: tuple[compat.OutputAlias, ...]
    strides: tuple[tuple[int, ...], ...]
    tangents: dict[str, _Tangent]
    gradients: tuple[tuple[int, int], ...]
    slots: tuple[tuple[int, str], ...]
    refused: frozenset[int]

    @classmethod
    def of(cls, graph: TrainingGraph) -> _Layout:
        descs = graph.outputs
        results = [d for d in descs if d.kind in ("output", "base")]
        position = {(d.kind, d.target): i for i, d in enumerate(results)}
        tangents = {}
        for desc, node in zip(graph.inputs, graph.placeholders, strict=True):
            if desc.kind == "tangent":
                v = node.meta["val"]
                result = position[desc.target.kind, desc.target.target]
                tangents[node.name] = _Tangent(result, tuple(v.shape), tuple(v.stride()))
        returned = [(d, node) for d, node in zip(descs, graph.results, strict=True) if d.kind in ("gradient", "none", "slot")]
        return cls(
            mutated=tuple(graph.inputs.index(d.target) for d in descs if d.kind == "mutation"),
            num_results=len(results),
            num_outputs=sum(d.kind == "output" for d in results),
            aliases=graph.aliases,
            strides=tuple(
                tuple(node.meta["val"].stride())
                for desc, node in zip(graph.inputs, graph.placeholders, strict=True)
                if desc.kind != "tangent"
            ),
            tangents=tangents,
            gradients=tuple(
                (k, graph.inputs.index(d.target))
                for k, (d, node) in enumerate(returned)
                if node is not None and d.kind == "gradient"
            ),
            slots=tuple((k, d.target) for k, (d, _) in enumerate(returned) if d.kind == "slot"),
            refused=frozenset(position[desc.kind, desc.target] for desc in graph.refused),
        )


class _Backwards:
    """The backward, compiled once for every set of results whose gradient has come."""

    def __init__(self, halves: Halves, tangents: dict[str, _Tangent], backend: Backend) -> None:
        self.halves = halves
        self.tangents = [tangents[name] for name in halves.tangents]
        self.backend = backend
        self.variants: dict[frozenset[int], Compiled] = {}

    def compile_for(self, results: Iterable[int]) -> Compiled:
        """The backward for when exactly `results` have a gradient."""
        present = frozenset(t.result for t in self.tangents).intersection(results)
        if present not in self.variants:
            graph = self.halves.backward_for(present)
            inductor = self.backend == "inductor"
            self.variants[present] = compile_inductor_backward(graph) if inductor else _boxed(graph, self.backend)
        return self.variants[present]

    def __call__(self, saved: list[Any], gradients: Sequence[Tensor | None]) -> Sequence[Any]:
        """Gradients of the parameters and inputs; empties `saved`."""
        for t in self.tangents:
            gradient = gradients[t.result]
            if gradient is not None:
                saved.append(_laid_out(gradient, t.stride))
        present = [i for i, g in enumerate(gradients) if g is not None]
        try:
            compiled = self.compile_for(present)
        except Exception as error:  # in the middle of a training step: the same graph, operator by operator
            logger.warning("a backward could not be compiled (%s); it runs uncompiled", str(error).split("\n")[0])
            key = frozenset(t.result for t in self.tangents).intersection(present)
            compiled = self.variants[key] = _boxed(self.halves.backward_for(key), "aot_eager")
        return compiled(saved)


class _Runner:
    """Calls the compiled pair; see the module's docstring."""

    def __init__(self, layout: _Layout, forward: Compiled, backwards: _Backwards) -> None:
        self.layout = layout
        self.forward = forward
        self.backwards = backwards
        self.differentiable = {t.result for t in layout.tangents.values()} | layout.refused
        self.slots: dict[str, Tensor] = {}
        self.seconds: deque[float] = deque(maxlen=32)

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        """Run the step on the joint graph's inputs, less the tangents."""
        differentiated = [inputs[position] for _, position in self.layout.gradients]
        results = list(_Step.apply(self, tuple(inputs), *differentiated))
        return [self._output(i, results, inputs) for i in range(self.layout.num_outputs)]

    def _output(self, index: int, results: list[Any], inputs: Sequence[Any]) -> Any:
        """Output `index` as eager mode would return it: a view of what it is a view of."""
        alias = self.layout.aliases[index]
        value = results[index]
        if alias.base is None:
            return value
        if alias.kind == "input":
            base = inputs[alias.base]
        elif alias.kind == "intermediate":
            base = results[self.layout.num_outputs + alias.base]
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
        ctx.began = time.perf_counter()
        with compat.no_autocast():
            laid_out = [_laid_out(t.detach(), stride) for t, stride in zip(inputs, runner.layout.strides, strict=True)]
            returned = runner.forward(laid_out)
        mutations, num_results = len(runner.layout.mutated), runner.layout.num_results
        results = list(returned[mutations : mutations + num_results])
        saved = _kept_apart(returned[mutations + num_results :], [inputs[position] for position in runner.layout.mutated])
        for position, value in zip(runner.layout.mutated, returned[:mutations], strict=True):
            inputs[position].copy_(value)
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
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise GraphoptError(
                "gradients of gradients (create_graph=True) cannot be computed through an optimised step: compute what needs "
                "them, such as a gradient penalty, with the model itself."
            )
        runner: _Runner = ctx.runner
        refused = sorted(i for i in runner.layout.refused if gradients[i] is not None)
        if refused:
            raise GraphoptError(
                f"this step samples its backward for the loss alone, but output {refused[0]} of the model was differentiated, "
                "too. Compute the whole loss inside the model, or leave out the vcas pass and Budget(variance=...)."
            )
        saved = iter(ctx.saved_tensors)
        args = [next(saved) if is_tensor else constant for is_tensor, constant in zip(ctx.is_tensor, ctx.constants, strict=True)]
        del saved
        compat.release_saved_tensors(ctx)
        with compat.no_autocast():
            returned = runner.backwards(args, gradients)
        runner.slots.update({name: returned[k] for k, name in runner.layout.slots})
        runner.seconds.append(time.perf_counter() - ctx.began)
        return (None, None, *(returned[k] for k, _ in runner.layout.gradients))

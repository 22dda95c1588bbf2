"""`optimize(verify=True)`: one step of the plan on the example batch, against eager autograd.

Both runs begin in the same random state and on copies of the batch and the buffers; parameters are read through aliases. After
the check the model's `.grad`, buffers and training flags, the batch and every random stream are bit-identical.

Dropout is compared, too: every draw begins with the same seed, here and in eager mode, so that masks are the same in whatever
order they are drawn. The step that is compared then draws with eager mode's kernels, since Inductor's own draw other numbers.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from graphopt import compat
from graphopt.calls import flatten_call
from graphopt.capture import no_generation_cache, unchanged_draws
from graphopt.compat import InputDesc, pytree
from graphopt.equivalence import compare_gradients, compare_values, tolerance_of
from graphopt.errors import first_line
from graphopt.graph import TrainingGraph
from graphopt.loss import LossFunction, scalar_loss
from graphopt.passes import Preserves, Vcas
from graphopt.planner.plan import Plan
from graphopt.runtime.compiled_step import CompiledStep, graph_inputs
from graphopt.runtime.subspaces import Subspaces
from graphopt.runtime.variants import Variants


@dataclass(frozen=True)
class _Results:
    """What one run gave, by name.

    Attributes:
        gradients: of trained parameters, and of inputs that require a gradient.
        compressed: P'GQ by weight.
    """

    outputs: dict[str, Tensor]
    buffers: dict[str, Tensor]
    gradients: dict[str, Tensor | None]
    compressed: dict[str, Tensor | None]


def first_difference(
    model: nn.Module,
    variants: Variants,
    plan: Plan,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    loss: LossFunction | None = None,
    subspaces: Subspaces | None = None,
) -> str:
    """What the plan's step computes otherwise than eager autograd; "" if it computes the same.

    Gradients of the loss with respect to what is trained are compared, outputs and updated buffers; compressed gradients with
    P'GQ of eager's. Of a sampler the step without sampling is taken: its own tests hold it to its expectation.

    Args:
        loss: see `scalar_loss`.
    """
    kept = [p for p in plan.passes if p.preserves is not Preserves.UNBIASED or (isinstance(p, Vcas) and not plan.samples)]
    try:
        graph = variants.captured(args, kwargs)
        step = variants.step_with_eager_draws(replace(plan, passes=tuple(kept), ratios=()), args, kwargs)
    except Exception as error:
        return f"the step cannot be compiled ({first_line(error)})"
    tensors = [*model.parameters(), *model.buffers(), *flatten_call(args, kwargs).tensors]
    with same_draws(tensors), no_generation_cache(model):
        eager = _run_eager(model, step.graph, args, kwargs, loss, subspaces)
    with same_draws(tensors):
        try:
            ours = _run_step(model, step, args, kwargs, loss, subspaces)
        except Exception as error:
            return f"the step fails ({first_line(error)})"
    values = [node.meta.get("val") for node in graph.graph.nodes]
    tolerance = tolerance_of(v.dtype for v in values if isinstance(v, Tensor) and (v.is_floating_point() or v.is_complex()))
    for found in (
        compare_values(ours.outputs, eager.outputs, tolerance),
        compare_gradients(ours.gradients, eager.gradients, _present(eager.gradients), tolerance),
        compare_gradients(ours.compressed, eager.compressed, _present(eager.compressed), tolerance),
        compare_values(ours.buffers, eager.buffers, tolerance),
    ):
        if found.difference:
            return found.difference
    return ""


class _Reseeded(compat.DispatchMode):
    """Seeds the generators before every draw, and has it fill tensors in the order of their indices, whatever their layout."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.generators = [torch.default_generator]
        if any(t.is_cuda for t in tensors):
            self.generators += [
                torch.cuda.default_generators[i] for i in sorted({t.device.index or 0 for t in tensors if t.is_cuda})
            ]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        ordered = [a.clone(memory_format=torch.contiguous_format) if isinstance(a, Tensor) else a for a in args]
        result = func(*args, **(kwargs or {}))  # for the layout of what it returns
        for generator in self.generators:
            generator.manual_seed(0)
        drawn = func(*ordered, **(kwargs or {}))
        written = compat.written_arguments(func)[: len(args)]
        changed = [pair for pair, is_written in zip(zip(args, ordered, strict=True), written, strict=True) if is_written]
        for mine, other in (*zip(pytree.tree_leaves(result), pytree.tree_leaves(drawn), strict=True), *changed):
            if isinstance(mine, Tensor):
                mine.copy_(other)
        return result


@contextlib.contextmanager
def same_draws(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Runs inside draw the same random numbers; every stream is afterwards as it was."""
    with unchanged_draws(tensors), _Reseeded(tensors):
        random.seed(0)
        numpy.random.seed(0)
        yield


def _run_eager(
    model: nn.Module,
    graph: TrainingGraph,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    loss: LossFunction | None,
    subspaces: Subspaces | None,
) -> _Results:
    """The model itself; gradients of what `graph` differentiates."""
    copies: dict[int, Tensor] = {}
    args, kwargs = copied((args, dict(kwargs)), copies)
    buffers = copied(dict(model.named_buffers(remove_duplicate=False)), copies)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    wanted = _differentiated(graph, parameters, dict(enumerate(flatten_call(args, kwargs).tensors)))
    with torch.enable_grad():
        output = torch.func.functional_call(model, buffers, args, dict(kwargs), tie_weights=False)
        found = _gradients(output, loss, wanted)
    compressed: dict[str, Tensor | None] = {}
    for name in graph.compressed:
        assert subspaces is not None
        weight, gradient = subspaces.weights[name], found.pop(name)
        compressed[name] = None if gradient is None else weight.subspace.compress(gradient.to(weight.variable.dtype))
    return _Results(named_outputs(output), _named_buffers(buffers), found, compressed)


def _run_step(
    model: nn.Module,
    step: CompiledStep,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    loss: LossFunction | None,
    subspaces: Subspaces | None,
) -> _Results:
    """The compiled step, on aliases of the parameters: hooks on them are not for this."""
    graph, copies = step.graph, {}  # type: ignore[var-annotated]
    inputs = flatten_call(*copied((args, dict(kwargs)), copies))
    buffers = copied(dict(model.named_buffers(remove_duplicate=False)), copies)
    aliases: dict[int, Tensor] = {}
    parameters = {
        name: aliases.setdefault(id(p), p.detach().requires_grad_(p.requires_grad))
        for name, p in model.named_parameters(remove_duplicate=False)
    }
    given: dict[InputDesc, Tensor] = {}
    if subspaces is not None:
        given = {
            desc: value.detach().requires_grad_() if desc.kind == "compressed" else value
            for desc, value in subspaces.given(parameters).items()
        }
    variables = {desc.target: value for desc, value in given.items() if desc.kind == "compressed"}
    wanted = _differentiated(graph, {**parameters, **variables}, dict(enumerate(inputs.tensors)))
    flat = graph_inputs(graph, inputs, {**parameters, **buffers}, step.uniforms, given)
    with torch.enable_grad():
        output = pytree.tree_unflatten(step.lowered.run(flat), graph.out_spec)
        found = _gradients(output, loss, wanted)
    compressed = {name: found.pop(name) for name in graph.compressed}
    return _Results(named_outputs(output), _named_buffers(buffers), found, compressed)


def copied(tree: Any, copies: dict[int, Tensor]) -> Any:
    """The same structure with a copy of every tensor; one tensor in two places stays one."""

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in copies:
            copies[id(leaf)] = leaf.detach().clone().requires_grad_(leaf.requires_grad)
        return copies[id(leaf)]

    return pytree.tree_map(copied, tree)


def _differentiated(graph: TrainingGraph, parameters: Mapping[str, Tensor], inputs: Mapping[int, Tensor]) -> dict[str, Tensor]:
    """By name, the tensors whose gradient a graph computes."""
    wanted: dict[str, Tensor] = {}
    for desc, node in zip(graph.outputs, graph.results, strict=True):
        if desc.kind == "gradient" and node is not None:
            kind, name = desc.target.kind, desc.target.target
            wanted |= {f"input {name}": inputs[name]} if kind == "input" else {name: parameters[name]}
    return wanted


def _present(gradients: Mapping[str, Tensor | None]) -> list[str]:
    """What the loss depends on."""
    return [name for name, gradient in gradients.items() if gradient is not None]


def _gradients(output: Any, loss: LossFunction | None, wanted: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
    scalar, _ = scalar_loss(output, loss)
    found = torch.autograd.grad(scalar, list(wanted.values()), allow_unused=True)
    return {name: None if gradient is None else gradient.detach() for name, gradient in zip(wanted, found, strict=True)}


def named_outputs(output: Any) -> dict[str, Tensor]:
    """The tensors of a model's output, by where they stand in it."""
    leaves = pytree.tree_flatten_with_path(output)[0]
    return {f"output {pytree.keystr(path)}".strip(): leaf.detach() for path, leaf in leaves if isinstance(leaf, Tensor)}


def _named_buffers(buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"the buffer {name}": value.detach() for name, value in buffers.items()}

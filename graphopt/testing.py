"""The harness that holds a pass to its contract, on any model: for graphopt's own passes and for those of users."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from graphopt.analysis.flop_formulas import ADDED_FORMULAS
from graphopt.analysis.flops import flop_profile
from graphopt.capture import BatchDim, as_call, batch_size_of, capture_to_run, flatten_call
from graphopt.compat import InputDesc
from graphopt.equivalence import TOLERANCE, compare_gradients, compare_values, largest_entry
from graphopt.errors import PassError
from graphopt.graph import TrainingGraph
from graphopt.lower import Backend, lower
from graphopt.passes import Pass, PassReport, Preserves, run_pass
from graphopt.passes.base import Projected
from graphopt.runtime.uniforms import Uniforms
from graphopt.runtime.variants import graph_inputs
from graphopt.specialise import specialise

DRAWS = 200
"""Runs over which the gradients of an UNBIASED pass are averaged."""

STANDARD_ERRORS = 6.0
"""Distance of the mean over draws from eager's gradient that is refused; by chance it happens once in many million times."""


@dataclass(frozen=True)
class PassCheck:
    """The outcome of one check.

    Attributes:
        report: of the pass.
        error: largest difference from eager autograd, relative to the largest gradient entry of the model; of a pass that is
            UNBIASED, of the mean over draws in units of its standard error.
        counted_flops: by `FlopCounterMode` while the rewritten step ran, without fusion or recomputation.
    """

    report: PassReport
    error: float
    counted_flops: int


def check_pass(
    rewrite: Pass,
    model: nn.Module,
    inputs: Any,
    decisions: Any = None,
    *,
    dtypes: Sequence[torch.dtype] = (torch.float64, torch.float32),
    backend: Backend = "aot_eager",
    batch_dim: BatchDim = 0,
) -> list[PassCheck]:
    """Hold `rewrite` to its contract on `model`, against eager autograd.

    The graph is rewritten, verified, compiled and run; every gradient that it still computes must be eager's (EXACT), or its mean
    over `DRAWS` runs within `STANDARD_ERRORS` of eager's (UNBIASED), or the stated image of eager's (PROJECTED), every other
    `.grad` None, outputs and updated buffers unchanged, and the FLOPs counted while it runs equal to the report's.

    Args:
        model: deterministic (no dropout); copied for every dtype, never changed.
        inputs: one batch, as for `graphopt.optimize`.
        decisions: for `apply`. None: every other applicable site.
        dtypes: floating-point types to check in.
    Raises:
        PassError: names the first violation.
    """
    if rewrite.preserves is Preserves.PROJECTED and not isinstance(rewrite, Projected):
        raise PassError(f"{rewrite.name} is PROJECTED, but does not say of what: give it `example_inputs` and `image`.")
    return [_check(rewrite, model, inputs, decisions, dtype, backend, batch_dim) for dtype in dtypes]


def _check(
    rewrite: Pass,
    model: nn.Module,
    inputs: Any,
    decisions: Any,
    dtype: torch.dtype,
    backend: Backend,
    batch_dim: BatchDim,
) -> PassCheck:
    def cast(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    reference, candidate = copy.deepcopy(model).to(dtype), copy.deepcopy(model).to(dtype)
    args, kwargs = pytree.tree_map(cast, as_call(inputs))
    graph = capture_to_run(candidate, args, kwargs, batch_dim)
    before = str(graph.graph)
    if decisions is None:
        decisions = {site.name for site in rewrite.applicable(graph)[::2]}
    rewritten, report = run_pass(rewrite, graph, decisions)
    if str(graph.graph) != before:
        raise PassError(f"{rewrite.name} changed the caller's graph; it must rewrite only what run_pass hands it.")

    for parameter in (*reference.parameters(), *candidate.parameters()):
        parameter.grad = None
    given = {}
    if isinstance(rewrite, Projected):
        drawn = rewrite.example_inputs(rewritten, seed=0)
        given = {desc: value.requires_grad_(desc.kind == "compressed") for desc, value in drawn.items()}
    run = compiled(rewritten, candidate, args, kwargs, backend, given)
    with FlopCounterMode(display=False, custom_mapping=ADDED_FORMULAS) as counter:
        outputs = run()
        _differentiable(outputs).backward()
    expected = pytree.tree_leaves(reference(*args, **kwargs))
    _differentiable(expected).backward()
    counted = counter.get_total_flops()
    _compare_results(rewrite, outputs, expected, reference, candidate, TOLERANCE[dtype])
    if rewrite.preserves is not Preserves.UNBIASED:
        error = _compare_gradients(rewrite, rewritten, reference, candidate, TOLERANCE[dtype])
    else:
        error = _compare_mean(rewrite, rewritten, reference, candidate, run, TOLERANCE[dtype])
    if isinstance(rewrite, Projected):
        error = max(error, _compare_images(rewrite, given, reference, TOLERANCE[dtype]))
    if backend == "aot_eager" and counted != flop_profile(rewritten).step:
        raise PassError(f"{rewrite.name}: {counted} FLOPs ran where {flop_profile(rewritten).step} were predicted.")
    return PassCheck(report, error, counted)


def compiled(
    graph: TrainingGraph,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    backend: Backend,
    given: Mapping[InputDesc, Tensor] | None = None,
) -> Callable[[], list[Any]]:
    """`graph` compiled for the batch of `args` and `kwargs`: a function that runs it on `model` and returns flat outputs."""
    flat = flatten_call(args, kwargs)
    batch_size = batch_size_of(flat, graph.batch_dims) or graph.batch_size
    lowered = lower(specialise(graph, batch_size, decompose=backend == "inductor"), backend)
    tensors = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    uniforms = Uniforms()
    return lambda: lowered.run(graph_inputs(graph, flat, tensors, uniforms, given))


def _differentiable(outputs: Iterable[Any]) -> Tensor:
    """A scalar that depends on every differentiable output."""
    parts = [t.double().square().sum() + t.double().sum() for t in outputs if isinstance(t, Tensor) and t.requires_grad]
    return torch.stack(parts).sum()


def _compare_results(
    rewrite: Pass, outputs: list[Any], expected: list[Any], reference: nn.Module, candidate: nn.Module, tolerance: float
) -> None:
    ours, theirs = _named(outputs, candidate), _named(expected, reference)
    if len(ours) != len(theirs):
        raise PassError(f"{rewrite.name}: {len(ours)} outputs and buffers where eager has {len(theirs)}.")
    found = compare_values(ours, theirs, tolerance)
    if found.difference:
        raise PassError(f"{rewrite.name}: {found.difference}.")


def _named(outputs: Iterable[Any], model: nn.Module) -> dict[str, Tensor]:
    tensors = [t for t in outputs if isinstance(t, Tensor)]
    return {
        **{f"output {i}": t for i, t in enumerate(tensors)},
        **{f"the buffer {name}": buffer for name, buffer in model.named_buffers()},
    }


def _compare_mean(
    rewrite: Pass,
    graph: TrainingGraph,
    reference: nn.Module,
    candidate: nn.Module,
    run: Callable[[], list[Any]],
    tolerance: float,
) -> float:
    """Compare the mean gradient over many draws with eager's; returns the largest difference in standard errors."""
    names = [name for name in graph.gradients() if name not in graph.compressed]
    parameters = dict(candidate.named_parameters())
    exact = {n: p.grad.double() for n, p in reference.named_parameters() if p.grad is not None}
    missing = sorted(set(names) ^ set(exact))
    if missing:
        raise PassError(f"{rewrite.name}: {missing[0]} has a gradient either in eager mode or here, not in both.")
    total = {name: torch.zeros_like(exact[name]) for name in names}
    squares = {name: torch.zeros_like(exact[name]) for name in names}
    for _ in range(DRAWS):
        candidate.zero_grad()
        _differentiable(run()).backward()
        for name in names:
            drawn = parameters[name].grad
            assert drawn is not None
            total[name] += drawn.double()
            squares[name] += drawn.double().square()
    scale = largest_entry(exact.values())
    worst = 0.0
    for name in names:
        mean = total[name] / DRAWS
        variance = float((squares[name] / DRAWS - mean.square()).clamp(min=0).sum()) / DRAWS
        distance = float((mean - exact[name]).norm())
        rounding = tolerance * scale * math.sqrt(mean.numel())
        errors = max(0.0, distance - rounding) / math.sqrt(variance) if variance > rounding**2 / DRAWS else 0.0
        worst = max(worst, errors)
        if errors > STANDARD_ERRORS or (errors == 0.0 and distance > rounding + STANDARD_ERRORS * math.sqrt(variance)):
            raise PassError(f"{rewrite.name}: the mean gradient of {name} is {errors:.1f} standard errors from eager's.")
    return worst


def _compare_images(rewrite: Projected, given: Mapping[InputDesc, Tensor], reference: nn.Module, tolerance: float) -> float:
    """Compare the gradients of added inputs with the images of eager's; returns the largest relative difference."""
    eager = {n: p.grad for n, p in reference.named_parameters(remove_duplicate=False) if p.grad is not None}
    worst = 0.0
    for desc, variable in given.items():
        if desc.kind != "compressed":
            continue
        wanted = rewrite.image(desc.target, given, eager)
        if variable.grad is None or variable.grad.shape != wanted.shape:
            raise PassError(
                f"{rewrite.name}: the compressed gradient of {desc.target} is missing or is not {tuple(wanted.shape)}."
            )
        error = float((variable.grad.double() - wanted.double()).abs().max()) / (float(wanted.abs().max()) or 1.0)
        worst = max(worst, error)
        if not error <= tolerance:
            raise PassError(f"{rewrite.name}: the gradient of {desc.target} is {error:.2e} of the largest entry off its image.")
    return worst


def _compare_gradients(
    rewrite: Pass, graph: TrainingGraph, reference: nn.Module, candidate: nn.Module, tolerance: float
) -> float:
    found = compare_gradients(
        {name: p.grad for name, p in candidate.named_parameters()},
        {name: p.grad for name, p in reference.named_parameters()},
        set(graph.gradients()) - graph.compressed,
        tolerance,
    )
    if found.difference:
        raise PassError(f"{rewrite.name}: {found.difference}.")
    return found.error

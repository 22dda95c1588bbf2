"""The harness that holds a pass to its contract, on any model: for graphopt's own passes and for those of users."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from graphopt.analysis.flop_formulas import ADDED_FORMULAS
from graphopt.analysis.flops import flop_profile
from graphopt.calls import BatchDim, as_call, batch_size_of, flatten_call
from graphopt.capture import capture_to_run, tensors_of
from graphopt.compat import InputDesc, OutputDesc, pytree
from graphopt.errors import InputError, PassError
from graphopt.graph import TrainingGraph
from graphopt.lower import Backend, lower
from graphopt.passes import Pass, PassReport, Preserves, run_pass
from graphopt.passes.base import Projected, Supplying
from graphopt.passes.state import State, Supplied
from graphopt.runtime.supply import Supply
from graphopt.runtime.uniforms import Uniforms
from graphopt.specialise import specialise
from graphopt.testing.compare import TOLERANCE, compare_values, wide
from graphopt.testing.gradients import Wanted, compare_mean
from graphopt.transforms.symbolic_zeros import expected_results, for_loss_alone

DRAWS = 200
"""Runs over which the gradients of an UNBIASED pass are averaged."""


@dataclass(frozen=True)
class PassCheck:
    """The outcome of one check.

    Attributes:
        report: of the last pass; `reports` of every one.
        preserves: what was checked: the weakest contracts among the passes, UNBIASED and PROJECTED both where both are there.
        error: largest difference from eager autograd, relative to the largest gradient entry of the model; where a pass is
            UNBIASED, of the mean over draws in units of its standard error.
        counted_flops: by `FlopCounterMode` while the rewritten step ran, without fusion or recomputation.
        graph: after all passes.
        step: runs forward and backward of the loss once more, and releases the gradients; for measurements.
    """

    report: PassReport
    error: float
    counted_flops: int
    reports: tuple[PassReport, ...]
    preserves: frozenset[Preserves]
    graph: TrainingGraph
    step: Callable[[], None]


def check_pass(
    rewrite: Pass,
    model: nn.Module,
    inputs: Any,
    decisions: Any = None,
    *,
    dtypes: Sequence[torch.dtype] = (torch.float64, torch.float32),
    backend: Backend = "aot_eager",
    batch_dim: BatchDim = 0,
    captured: Mapping[torch.dtype, TrainingGraph] | None = None,
) -> list[PassCheck]:
    """Hold `rewrite` to its contract on `model`, against eager autograd.

    The graph is rewritten, verified, compiled and run; every gradient that it still computes must be eager's (EXACT), or its mean
    over `DRAWS` runs within `STANDARD_ERRORS` of eager's (UNBIASED), or the stated image of eager's (PROJECTED), every other
    `.grad` None, outputs and updated buffers unchanged, and the FLOPs counted while it runs equal to the report's.

    Args:
        model: deterministic (no dropout); copied for every dtype, never changed.
        inputs: one batch, as for `graphopt.optimize`.
        decisions: for `apply`, or a function from the graph to them. None: every other applicable site.
        backend: "aot_eager", or a function that compiles each half.
        dtypes: floating-point types to check in. In the first, and wherever a pass samples, the graph is of any batch size; in
            others of this one alone: passes meet both.
        captured: see `check_passes`.
    Raises:
        PassError: names the first violation.
    """
    passes = [(rewrite, decisions)]
    return check_passes(passes, model, inputs, dtypes=dtypes, backend=backend, batch_dim=batch_dim, captured=captured)


def check_passes(
    passes: Sequence[tuple[Pass, Any]],
    model: nn.Module,
    inputs: Any,
    *,
    dtypes: Sequence[torch.dtype] = (torch.float64, torch.float32),
    backend: Backend = "aot_eager",
    batch_dim: BatchDim = 0,
    captured: Mapping[torch.dtype, TrainingGraph] | None = None,
    draws: int = DRAWS,
) -> list[PassCheck]:
    """Hold several passes on one graph to the weakest of their contracts; see `check_pass`.

    Where none is UNBIASED, every gradient must be eager's, and that of a compressed weight the stated image of eager's. Where one
    is, the mean over `draws` runs must be within `STANDARD_ERRORS` of that.

    Args:
        passes: with the decisions of each, in the order in which they are to run (see `graphopt.passes.in_order`). Decisions
            that are None, or a function, are found on the graph as the passes before left it.
        captured: graphs of this model and these inputs by dtype, for callers that check many passes on one model; not changed.
        draws: the least bias that is found is `STANDARD_ERRORS` / sqrt(draws) of a gradient's standard deviation.
    Raises:
        InputError: the backend is Inductor, or `draws` is below 2, of which no standard error is known.
        PassError: names the passes and the first violation.
    """
    if draws < 2:
        raise InputError(f"draws={draws}: a mean has a standard error from 2 draws on.")
    for rewrite, _ in passes:
        if rewrite.preserves is Preserves.PROJECTED and not isinstance(rewrite, Projected):
            raise PassError(f"{rewrite.name} is PROJECTED, but does not say of what: give it `example_inputs` and `image`.")
    if backend == "inductor":
        raise InputError(
            "graphs are checked operator by operator: use backend='aot_eager', and optimize(verify=True) for Inductor."
        )
    projected = [rewrite for rewrite, _ in passes if isinstance(rewrite, Projected)]
    if len(projected) > 1:
        raise PassError(f"{projected[0].name} and {projected[1].name} are both PROJECTED: check them one at a time.")
    samples = any(rewrite.preserves is Preserves.UNBIASED for rewrite, _ in passes)
    return [
        _check(
            passes, model, inputs, dtype, backend, batch_dim, (captured or {}).get(dtype), draws, samples or dtype is dtypes[0]
        )
        for dtype in dtypes
    ]


def _check(
    passes: Sequence[tuple[Pass, Any]],
    model: nn.Module,
    inputs: Any,
    dtype: torch.dtype,
    backend: Backend,
    batch_dim: BatchDim,
    captured: TrainingGraph | None,
    draws: int,
    symbolic: bool,
) -> PassCheck:
    def cast(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not (leaf.is_floating_point() or leaf.is_complex()):
            return leaf
        return leaf.to(dtype.to_complex() if leaf.is_complex() else dtype)

    def cast_copy() -> nn.Module:
        copied = copy.deepcopy(model)
        for tensor in (*copied.parameters(), *copied.buffers()):
            tensor.grad, tensor.data = None, cast(tensor.data)
        return copied

    name = " + ".join(rewrite.name for rewrite, _ in passes)
    kinds = {rewrite.preserves for rewrite, _ in passes}
    reference, candidate = cast_copy(), cast_copy()
    args, kwargs = pytree.tree_map(cast, as_call(inputs))
    graph = captured or capture_to_run(candidate, args, kwargs, batch_dim, symbolic)
    rewritten, reports = _rewritten(passes, graph)
    projected = next((rewrite for rewrite, _ in passes if isinstance(rewrite, Projected)), None)
    given: Mapping[InputDesc, Tensor] = {} if projected is None else projected.example_inputs(rewritten, seed=0)
    chosen = expected_results(rewritten) if rewritten.refused else None
    states: dict[str, State] = {p.name: Supplied(p) for p, _ in passes if isinstance(p, Supplying) and p is not projected}
    states["given"] = _Given(given)
    run = compiled(rewritten, candidate, args, kwargs, backend, states)

    def released() -> None:
        candidate.zero_grad()
        for value in given.values():
            value.grad = None

    def draw() -> None:
        released()
        _differentiable(run(), chosen).backward()

    @functools.cache
    def of_the_loss() -> Callable[[], list[Any]]:
        return compiled(for_loss_alone(rewritten), candidate, args, kwargs, backend, states)

    def step() -> None:
        outputs = of_the_loss()()
        loss = [outputs[i] for i in sorted(expected_results(rewritten)) if i < len(outputs)]
        del outputs
        torch.autograd.backward(loss, [torch.ones_like(t) for t in loss])
        released()

    with FlopCounterMode(display=False, custom_mapping=ADDED_FORMULAS) as counter:
        outputs = run()
        _differentiable(outputs, chosen).backward()
    expected = pytree.tree_leaves(reference(*args, **kwargs))
    _differentiable(expected, chosen).backward()
    counted = counter.get_total_flops()
    tolerance = TOLERANCE[dtype]
    try:
        compare_values(_named(outputs, candidate), _named(expected, reference), tolerance).held()
        wanted = Wanted.of(rewritten, reference, projected, given)
        if Preserves.UNBIASED in kinds:
            error = compare_mean(wanted, candidate, given, draw, tolerance, draws)
        else:
            error = wanted.agreement(candidate, given, tolerance).held()
    except PassError as difference:
        raise PassError(f"{name}: {difference}") from difference
    if backend == "aot_eager" and counted != flop_profile(rewritten).step:
        raise PassError(f"{name}: {counted} FLOPs ran where {flop_profile(rewritten).step} were predicted.")
    inexact = frozenset(kinds - {Preserves.EXACT}) or frozenset({Preserves.EXACT})
    return PassCheck(reports[-1], error, counted, tuple(reports), inexact, rewritten, step)


def _rewritten(passes: Sequence[tuple[Pass, Any]], graph: TrainingGraph) -> tuple[TrainingGraph, list[PassReport]]:
    """The graph after all passes, none of which may change the one that it gets."""
    reports = []
    for rewrite, given in passes:
        before = str(graph.graph)
        decisions = given(graph) if callable(given) else given
        if decisions is None:
            decisions = {site.name for site in rewrite.applicable(graph)[::2]}
        rewritten, report = run_pass(rewrite, graph, decisions)
        if str(graph.graph) != before:
            raise PassError(f"{rewrite.name} changed the caller's graph; it must rewrite only what run_pass gives it.")
        lost = sorted(set(graph.gradients()) ^ set(rewritten.gradients()))
        if lost and rewrite.preserves is not Preserves.EXACT:
            raise PassError(f"{rewrite.name} is {rewrite.preserves.name}, but the gradient of {lost[0]} is gone.")
        graph = rewritten
        reports.append(report)
    return graph, reports


def compiled(
    graph: TrainingGraph,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    backend: Backend,
    states: Mapping[str, State] | None = None,
) -> Callable[[], list[Any]]:
    """`graph` compiled for the batch of `args` and `kwargs`: a function that runs it on `model` and returns flat outputs.

    Args:
        states: supply and take what passes have added to the graph; see `Supply`.
    """
    flat = flatten_call(args, kwargs)
    batch_size = batch_size_of(flat, graph.batch_dims) or graph.batch_size
    run = lower(specialise(graph, batch_size), backend, Supply(Uniforms(), states or {}))
    tensors = tensors_of(model)
    return lambda: run(flat, tensors)


class _Given(State):
    """Supplies inputs that a PROJECTED pass has added; their gradients are put into `.grad`.

    Results that no pass takes by itself are passed over: they are for what a technique keeps while a model trains.
    """

    def __init__(self, given: Mapping[InputDesc, Tensor]) -> None:
        self.given = given

    def supply(self, desc: InputDesc, size: Sequence[int], like: Tensor) -> Tensor | None:
        return self.given.get(desc)

    def take(self, desc: InputDesc | OutputDesc, value: Tensor) -> bool:
        if isinstance(desc, InputDesc) and desc in self.given:
            self.given[desc].grad = value
        return isinstance(desc, OutputDesc) or desc in self.given


def _differentiable(outputs: Sequence[Any], chosen: Collection[int] | None) -> Tensor:
    """A scalar that depends on every differentiable output, or on those at positions `chosen` alone."""
    parts = [t for i, t in enumerate(outputs) if isinstance(t, Tensor) and t.requires_grad and (chosen is None or i in chosen)]
    return torch.stack([t.square().sum() + t.sum() for t in map(wide, parts)]).sum()


def _named(outputs: Iterable[Any], model: nn.Module) -> dict[str, Tensor]:
    tensors = [t for t in outputs if isinstance(t, Tensor)]
    return {
        **{f"output {i}": t for i, t in enumerate(tensors)},
        **{f"the buffer {name}": buffer for name, buffer in model.named_buffers()},
    }

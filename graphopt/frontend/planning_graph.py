"""The joint graph that a plan is made on: that of a model that is one graph, or all parts of one that is not, as one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from graphopt import compat
from graphopt.calls import BatchDim
from graphopt.capture import TRACING, capture
from graphopt.compat.recurrent import left_to_eager_mode
from graphopt.distributed.divided import require_plannable
from graphopt.errors import (
    BatchError,
    BudgetError,
    CaptureError,
    ImportanceError,
    InputError,
    NothingToPlan,
    PassError,
    TorchVersionError,
    first_line,
    forget_frames,
)
from graphopt.frontend.accepted import require_not_optimised
from graphopt.frontend.recording import record, trains
from graphopt.graph import TrainingGraph
from graphopt.passes import Pass
from graphopt.passes.technique import technique
from graphopt.runtime.stages import stage
from graphopt.transforms.symbolic_zeros import as_differentiated


def planning_graph(
    model: nn.Module,
    trace: Callable[[], TrainingGraph],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    batch_dim: BatchDim,
    fullgraph: bool = False,
    long_to_eager: bool = False,
) -> tuple[TrainingGraph, tuple[str, ...] | None]:
    """The joint graph to plan on; of a model that is not one graph, all its parts as one, and what of it cannot be planned.

    Args:
        trace: gives the graph of a model that is one.
        long_to_eager: see `graphopt.compat.recurrent.left_to_eager_mode`.
    Raises:
        CaptureError: it is not one graph and has to be, or nothing in it can be planned.
    """
    require_plannable(model)
    try:
        with stage("capture"), TRACING, compat.failures_raised_alone(), left_to_eager_mode(long_to_eager):
            return trace(), None
    except (BudgetError, PassError, ImportanceError, TorchVersionError):
        raise
    except Exception as error:
        if fullgraph or (isinstance(error, InputError) and not isinstance(error, BatchError)) or _is_hopeless(model):
            raise
        reason = first_line(error)
        try:
            with stage("capture"), TRACING, compat.failures_raised_alone():
                graph, unplanned = record(model, args, kwargs, batch_dim, reason, long_to_eager)
        except Exception as second:
            try:
                trained = trains(model, args, kwargs)
            except CaptureError as failed:
                raise error if isinstance(error, BatchError) else failed from second
            if not trained:
                raise error from second
            if isinstance(second, NothingToPlan):
                raise second from error
            raise NothingToPlan(f"nothing of the model can be planned: {first_line(second)}; {reason}") from second
        forget_frames(error)
    return graph, (*unplanned, *filter(None, [_left_to_eager_mode(model, graph)]))


def analysed(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], batch_dim: BatchDim) -> TrainingGraph:
    """The joint graph of a model that is not held by it."""
    require_not_optimised(model, "analysed")

    def trace() -> TrainingGraph:
        return as_differentiated(capture(model, args, kwargs, batch_dim))

    return planning_graph(model, trace, args, kwargs, batch_dim)[0]


def _left_to_eager_mode(model: nn.Module, graph: TrainingGraph) -> str:
    """What to tell of parameters in no part that torch.compile traces; "" if there are none."""
    known = {p.name for p in graph.parameters}
    others = [name for name, p in model.named_parameters() if p.requires_grad and name not in known]
    if not others:
        return ""
    return (
        f"torch.compile traces no use of {len(others)} parameters for the example batch (the first is {others[0]}). Those that "
        "are used all the same, in eager mode or on a branch that other batches take, are trained, and not planned or counted"
    )


def _is_hopeless(model: nn.Module) -> bool:
    """Whether no run of the model can tell more than a trace: it has no memory, or nothing to train."""
    tensors = [*model.parameters(), *model.buffers()]
    fake = compat.fake_mode_of(tensors) is not None or any(t.is_meta for t in tensors)
    return fake or not any(t.requires_grad for t in tensors)


def for_parts(passes: tuple[Pass, ...], auto: bool, why: str) -> tuple[Pass, ...]:
    """The passes that can work on the parts of a model one by one.

    Args:
        why: it is not one graph on one device.
    Raises:
        PassError: the caller has named another.
    """
    others = [p.name for p in passes if not technique(p).by_part]
    if others and not auto:
        raise PassError(
            f"{others[0]} needs the model to be one graph with all of its weights, and {why.rstrip('.')}. Mend that, or leave "
            f"{others[0]} out."
        )
    return tuple(p for p in passes if p.name not in others)

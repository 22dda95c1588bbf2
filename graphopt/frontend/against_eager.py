"""`optimize(verify=True)` of a plan that torch.compile runs: one step on the example batch, against eager autograd.

Two copies of the model run a step each: one as it is, one compiled. So nothing of the model changes, whatever forward does.
"""

from __future__ import annotations

import contextlib
import numbers
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from graphopt.calls import BatchDim, flatten_call
from graphopt.capture import no_generation_cache
from graphopt.compat.dynamo import cause_of
from graphopt.compat.inductor import eager_draws
from graphopt.equivalence import compare_gradients, compare_values, tolerance_of
from graphopt.errors import first_line
from graphopt.frontend.recording import twin
from graphopt.frontend.running import Running
from graphopt.graph import TrainingGraph
from graphopt.loss import LossFunction, scalar_loss
from graphopt.lower import Backend
from graphopt.planner.plan import Plan
from graphopt.runtime.against_eager import copied, named_outputs, same_draws
from graphopt.runtime.counters import Counters


def first_difference(
    model: nn.Module,
    graph: TrainingGraph,
    plan: Plan,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    loss: LossFunction | None,
    backend: Backend,
    batch_dim: BatchDim,
    parts: bool,
) -> str:
    """What the plan's step computes otherwise than eager autograd; "" if it computes the same.

    Gradients of what is trained are compared, outputs, buffers, and attributes of the modules that are tensors or numbers.

    Args:
        graph: that the plan was made on.
        loss: see `scalar_loss`.
        backend, batch_dim, parts: see `Running`.
    """
    try:
        eager, ours = twin(model), twin(model)
    except Exception as error:
        return f"the model cannot be copied, so that nothing can be compared ({first_line(error)})"
    planned = [p.name for p in graph.parameters]
    told: list[str] = []
    running = Running(ours, backend, Counters(), planned, told.append, lambda: None, batch_dim, parts=parts)
    tensors = [*model.parameters(), *model.buffers(), *flatten_call(args, kwargs).tensors]
    trained = [n for n, p in model.named_parameters() if p.requires_grad and (plan.train is None or n in plan.train)]
    with same_draws(tensors), no_generation_cache(eager):
        theirs = _step(eager, eager, args, kwargs, loss)
    try:
        with same_draws(tensors), eager_draws():
            found = _step(ours, lambda *a, **k: running(plan, a, k), args, kwargs, loss)
    except Exception as error:
        return f"the step fails ({first_line(cause_of(error))})"
    if told:
        return told[0]
    values = [node.meta.get("val") for node in graph.graph.nodes]
    tolerance = tolerance_of(v.dtype for v in values if isinstance(v, Tensor) and (v.is_floating_point() or v.is_complex()))
    reached = [name for name in trained if theirs[1][name] is not None]
    wrong = _states_differ(eager, ours)
    for agreement in (
        compare_values(found[0], theirs[0], tolerance),
        compare_gradients({n: g for n, g in found[1].items() if n in reached or n in planned}, theirs[1], reached, tolerance),
        compare_values(_tensors(ours), _tensors(eager), tolerance),
    ):
        if agreement.difference:
            return agreement.difference
    return wrong


def _step(
    model: nn.Module, run: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], loss: LossFunction | None
) -> tuple[dict[str, Tensor], dict[str, Tensor | None]]:
    """Outputs, and gradients by parameter and input."""
    seen: dict[int, Tensor] = {}
    args, kwargs = copied((args, dict(kwargs)), seen)
    with torch.enable_grad():
        output = run(*args, **kwargs)
        scalar, _ = scalar_loss(output, loss)
        wanted: dict[str, Tensor] = {n: p for n, p in model.named_parameters() if p.requires_grad}
        wanted |= {f"input {i}": t for i, t in enumerate(flatten_call(args, kwargs).tensors) if t.requires_grad}
        gradients = torch.autograd.grad(scalar, list(wanted.values()), allow_unused=True)
    return named_outputs(output), dict(zip(wanted, gradients, strict=True))


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Buffers, and other tensors that the modules hold."""
    found = {f"the buffer {name}": value.detach() for name, value in model.named_buffers(remove_duplicate=False)}
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                found[f"the attribute {prefix}.{name}".replace(" .", " ")] = value.detach()
    return found


def _states_differ(eager: nn.Module, ours: nn.Module) -> str:
    """The first number or text among the modules' attributes that is not the same."""
    others = dict(ours.named_modules())
    for prefix, module in eager.named_modules():
        if prefix not in others:
            return f"the module {prefix} is there in eager mode alone"
        for name, value in vars(module).items():
            if isinstance(value, (numbers.Number, str)) and not _equal(value, vars(others[prefix]).get(name)):
                return f"the attribute {f'{prefix}.{name}'.lstrip('.')} is not what eager mode makes it"
    return ""


def _equal(a: Any, b: Any) -> bool:
    with contextlib.suppress(Exception):
        return bool(a == b) or (a != a and b != b)
    return True

"""Checkpoints of graphopt's own state: all that influences steps to come and is in neither the model nor PyTorch.

That is the selection and what it was found by, the sampler's ratios, controllers, random generators, projectors, the measured
times by which orders of products were chosen, and, where it is given, the optimizer's state, that on the host included. Weights
are the model's (`state_dict`), and the global random state is the caller's.

A state goes on with the passes and the budget that it was saved with: a selection or ratios found under another budget would not
meet the one that is stated. A model that runs as it is (`DisabledModule`) has no plan, and keeps that of a state that it loads.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import graphopt
from graphopt.budget import Budget
from graphopt.errors import BudgetError, InputError
from graphopt.frontend.accepted import require_optimizer
from graphopt.passes.technique import technique
from graphopt.planner.importance import Importance
from graphopt.planner.plan import Plan
from graphopt.planner.selection import Selection
from graphopt.runtime.load_optimizer import load_optimizer
from graphopt.runtime.plain_values import from_plain, to_plain
from graphopt.runtime.state_file import OtherVersion, holds, read_state, write_state

if TYPE_CHECKING:
    from graphopt.runtime.planned_module import PlannedModule

Names = Mapping[int, str]
"""Names of parameters, and of what optimizers step in their place, by `id`."""


@dataclass(frozen=True)
class _PlanState:
    """Decisions of a `Plan`, and what they were taken for."""

    budget: dict[str, Any]
    passes: list[str]
    train: frozenset[str] | None
    selection: Selection | None
    importance: Importance | None
    not_separable: str
    decisions: dict[str, Any]


@dataclass(frozen=True)
class _OptimizerState:
    """An optimizer's `state_dict()`.

    Attributes:
        kind: its type's name.
        parameters: name and shape of each, by group.
        state: without what is a part of the checkpoint already.
        shared: the names of those parts.
    """

    kind: str
    parameters: list[list[tuple[str, tuple[int, ...]]]]
    state: dict[str, Any]
    shared: list[str]


@dataclass(frozen=True)
class _State:
    """A checkpoint; one without a plan is of a model that ran as it is."""

    versions: dict[str, str]
    parameters: dict[str, tuple[int, ...]]
    plan: _PlanState | None
    parts: dict[str, Any]
    optimizer: _OptimizerState | None


def save(
    path: str | os.PathLike[str],
    opt: PlannedModule,
    plan: Plan | None,
    optimizer: torch.optim.Optimizer | None,
    kept: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint; see `OptimizedModule.save_state`.

    Args:
        plan: None: the model runs as it is.
        kept: what `held` returned, all of which but the optimizer's state stays as it is.
    """
    require_optimizer(optimizer)
    held = {name: part.snapshot() for name, part in opt._parts().items()}
    state = _State(
        versions={"graphopt": graphopt.__version__, "torch": torch.__version__},
        parameters=_shapes(opt._graphopt_model),
        plan=None if plan is None else _plan_state(plan),
        parts=held,
        optimizer=None if optimizer is None else _optimizer_state(optimizer, opt._names(), held),
    )
    tree = to_plain(state)
    write_state(path, tree if kept is None else {**kept, "optimizer": tree["optimizer"]})


def held(path: str | os.PathLike[str], model: nn.Module) -> dict[str, Any] | None:
    """A checkpoint of this model that holds a plan, as it was read; None if there is none such at `path`.

    Raises:
        InputError: another version of graphopt wrote it: what it holds is not known.
    """
    try:
        tree = read_state(path)
        saved = from_plain(_State, tree, "the state")
        _check_model(saved.parameters, _shapes(model))
    except OtherVersion as error:
        raise InputError(f"{error} A plan that it may hold would be lost here: give another path.") from error
    except InputError:
        return None
    return tree if saved.plan is not None else None


def prepare(
    path: str | os.PathLike[str], opt: PlannedModule, plan: Plan | None, optimizer: torch.optim.Optimizer | None
) -> tuple[Plan | None, Callable[[], None], Callable[[], None]]:
    """Read a checkpoint and check it; see `OptimizedModule.load_state`. Nothing is changed yet.

    Args:
        plan: None: the model runs as it is. Where only one of it and the checkpoint has a plan, the optimizer's state alone is
            loaded.

    Returns:
        The plan that it makes of `plan`, None where either has none; what loads `optimizer`, which may refuse the state; and what
        puts the rest in force.
    """
    tree = read_state(path)
    with _refused(path):
        saved = from_plain(_State, tree, "the state")
        _check_model(saved.parameters, _shapes(opt._graphopt_model))
        parts = opt._parts()
        after = None if plan is None or saved.plan is None else _prepared_plan(saved.plan, plan, saved.parameters)
        if (plan is None) != (saved.plan is None):
            parts = {}
        elif set(saved.parts) != set(parts):
            different = ", ".join(sorted(set(saved.parts) ^ set(parts)))
            raise InputError(f"only one of the checkpoint and this model has {different}: use the same passes and budget.")
        steps = [part.prepare(saved.parts[name]) for name, part in parts.items()]
        state = None if optimizer is None else _checked_optimizer(saved, optimizer, opt._names())

    def load() -> None:
        if optimizer is not None and state is not None:
            with _refused(path):
                load_optimizer(optimizer, state)

    def restore() -> None:
        for step in steps:
            step()

    return after, load, restore


@contextlib.contextmanager
def _refused(path: str | os.PathLike[str]) -> Iterator[None]:
    """Say of which file an `InputError` is."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{path} was not loaded, and nothing was changed: {error}") from error


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}


def _check_model(saved: Mapping[str, tuple[int, ...]], ours: Mapping[str, tuple[int, ...]]) -> None:
    if saved == ours:
        return
    name = next(n for n in [*ours, *saved] if saved.get(n) != ours.get(n))
    described = [f"no parameter {name}" if name not in of else f"{name} of shape {of[name]}" for of in (saved, ours)]
    raise InputError(f"it is the state of another model: that had {described[0]}, and this one has {described[1]}.")


def _plan_state(plan: Plan) -> _PlanState:
    return _PlanState(
        budget=to_plain(plan.budget),
        passes=[_described(rewrite) for rewrite in plan.passes if not technique(rewrite).communicates],  # on other ranks, too
        train=plan.train,
        selection=plan.selection,
        importance=plan.importance,
        not_separable=plan.not_separable,
        decisions={p.name: to_plain(plan.decisions[p.name]) for p in _loading(plan) if p.name in plan.decisions},
    )


def _prepared_plan(saved: _PlanState, plan: Plan, parameters: Mapping[str, Any]) -> Plan:
    """`plan` with the decisions of a checkpoint."""
    ours, budget = _plan_state(plan), _budget(saved.budget, plan.budget)
    for then, now in itertools.zip_longest(saved.passes, ours.passes, fillvalue="none"):
        if then != now:
            raise InputError(
                f"it was saved with other passes ({then}; this model has {now}): call optimize() with the passes that it was "
                "saved with."
            )
    chosen = set() if saved.selection is None else set(saved.selection.names)
    unknown = sorted(((saved.train or set()) | chosen) - set(parameters))
    if unknown:
        raise InputError(f"it trains {unknown[0]}, which the model does not have.")
    decisions = dict(plan.decisions)
    for rewrite in _loading(plan):
        if rewrite.name in saved.decisions:
            where = f"the state.plan.decisions.{rewrite.name}"
            decisions[rewrite.name] = from_plain(rewrite.decides, saved.decisions[rewrite.name], where)
        else:
            decisions.pop(rewrite.name, None)
    return replace(
        plan,
        budget=budget,
        train=saved.train,
        selection=saved.selection,
        importance=saved.importance,
        not_separable=saved.not_separable,
        decisions=decisions,
    )


def _budget(saved: Mapping[str, Any], ours: Budget) -> Budget:
    """The budget of a checkpoint, which has to be ours; of one that may be raised, with what it was raised to there."""
    both = [dict(saved), to_plain(ours)]
    if ours.or_more and saved.get("or_more") is True:
        with contextlib.suppress(BudgetError):
            ours = replace(ours, flops=saved.get("flops"))
            both[1] = to_plain(ours)
    stated = [", ".join(f"{k}={v!r}" for k, v in b.items() if v is not None and v is not False) or "none" for b in both]
    if stated[0] != stated[1]:
        raise InputError(
            f"it was saved under another budget ({stated[0]}; this model has {stated[1]}), which its decisions would not meet: "
            "call optimize() with the budget that it was saved under."
        )
    return ours


def _loading(plan: Plan) -> list[Any]:
    """The techniques whose decisions a checkpoint holds."""
    return [p for p in plan.passes if technique(p).decides is not None]


def _described(rewrite: Any) -> str:
    """A pass and its options, as a text that is the same in every process."""
    options = to_plain(rewrite)
    shown = ", ".join(f"{name}={_shown(value)}" for name, value in options.items()) if isinstance(options, dict) else ""
    return re.sub(" at 0x[0-9a-f]+", "", f"{rewrite.name} by {type(rewrite).__name__}({shown})")


def _shown(option: Any) -> str:
    """Of what is no plain value the type: what it shows of itself may change, and differ between processes."""
    return repr(option) if holds(option) and not isinstance(option, torch.Tensor) else type(option).__name__


def _optimizer_state(optimizer: torch.optim.Optimizer, names: Names, parts: Mapping[str, Any]) -> _OptimizerState:
    whole = optimizer.state_dict()
    state = {name: value for name, value in whole.items() if name not in parts}
    return _OptimizerState(_kind(optimizer), _parameters(optimizer, names), state, sorted(set(whole) - set(state)))


def _checked_optimizer(saved: _State, optimizer: torch.optim.Optimizer, names: Names) -> dict[str, Any]:
    """The state of the optimizer, if it is one of such an optimizer."""
    if saved.optimizer is None:
        raise InputError("it was saved without an optimizer: load it without one, and save with save_state(path, optimizer).")
    if saved.optimizer.kind != _kind(optimizer):
        raise InputError(
            f"it was saved with {saved.optimizer.kind}, and this optimizer is {_kind(optimizer)}: make such a one, or load "
            "the state without an optimizer."
        )
    if saved.optimizer.parameters != _parameters(optimizer, names):
        raise InputError(
            "the optimizer steps other parameters, or the same in other groups or another order: make it as it was when the "
            "state was saved."
        )
    unknown = sorted(set(saved.optimizer.shared) - set(saved.parts))
    if unknown:
        raise InputError(f"the optimizer's state lacks its part {unknown[0]}.")
    return saved.optimizer.state | {name: saved.parts[name] for name in saved.optimizer.shared}


def _kind(optimizer: torch.optim.Optimizer) -> str:
    inner = getattr(optimizer, "inner", None)
    kind = f"{type(optimizer).__module__}.{type(optimizer).__name__}"  # others than torch have an AdamW, with other states
    return kind if inner is None else f"{kind} of {_kind(inner)}"


def _parameters(optimizer: torch.optim.Optimizer, names: Names) -> list[list[tuple[str, tuple[int, ...]]]]:
    return [[(names.get(id(p), ""), tuple(p.shape)) for p in group["params"]] for group in optimizer.param_groups]

"""Training steps inside somebody else's loop: optimised where that works, the model's own where not.

An optimisation must never end a training run. Whatever fails to be captured, compiled or run is computed by the original
forward, with one warning, and trains what is selected; an error of that is the model's own. Errors in what the user asked for
are raised at the first step, before anything is trained.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from graphopt.calls import Call, as_call, kind_of
from graphopt.compat import in_function_transform, pytree
from graphopt.compat.distributed import local_part
from graphopt.distributed.ranks import Ranks
from graphopt.errors import BudgetError, ImportanceError, InputError, PassError, RankError
from graphopt.integrations.diverted import Diverted
from graphopt.loss import own_loss
from graphopt.planner.rating import rule_of
from graphopt.runtime.controllers import Every
from graphopt.runtime.module import OptimizedModule
from graphopt.runtime.plain_values import from_plain, to_plain

ATTEMPTS = 3
"""How many kinds of batches may fail before everything is left to the original forward."""

MERGES_EVERY = 100
"""Optimizer steps between looks whether adapters in half precision have grown enough to be merged."""

logger = logging.getLogger("graphopt")


@dataclass
class Savings:
    """FLOPs so far, in steps of full training.

    Attributes:
        steps: forward passes in training, with their backward.
        spent: what they cost.
        last: what the last one cost.
        overhead: importance measurements, and calibrations of a sampler.
        original: forward passes computed by the original forward.
        skipped: optimizer steps that were not taken because a loss was not finite.
    """

    steps: int = 0
    spent: float = 0.0
    last: float = 1.0
    overhead: float = 0.0
    original: int = 0
    skipped: int = 0

    @property
    def saved(self) -> float:
        """Part of full training's FLOPs that was saved."""
        return 1 - (self.spent + self.overhead) / self.steps if self.steps else 0.0

    def snapshot(self) -> Any:
        """See `Stateful`."""
        return to_plain(self)

    def prepare(self, snapshot: Any) -> Callable[[], None]:
        """See `Stateful`."""
        saved = from_plain(Savings, snapshot, "the FLOPs so far")
        if not all(math.isfinite(value) and value >= 0 for value in vars(saved).values()):
            raise InputError("the FLOPs so far are not all finite numbers of at least 0.")
        return lambda: vars(self).update(vars(saved))


@dataclass(frozen=True)
class _Failure:
    """Why a step could not be optimised, in words: the error itself would hold the step's tensors."""

    kind: Any
    why: str


class TrainingSteps:
    """Computes the training steps of a diverted model.

    Attributes:
        opt: the optimised model; None before the first step, or where it cannot be made.
        savings: see `Savings`.
        hook: what tells of the optimizer's steps, where that is a hook of it.
    """

    def __init__(
        self,
        diverted: Diverted,
        make: Callable[[TrainingSteps, Any], Any],
        optimizer: torch.optim.Optimizer | None,
        reselect_every: int | None,
        done: int = 0,
        by_batches: bool = False,
    ) -> None:
        """Set up; `diverted.run = steps` puts it to work.

        Args:
            make: from these and the first batch to the `OptimizedModule`.
            optimizer: rates tensors when they are selected anew.
            reselect_every: optimizer steps between selections; None: never.
            done: optimizer steps before these, of a run that is resumed.
            by_batches: `reselect_every` is a number of batches, of which an optimizer step may take several.
        """
        self.opt: OptimizedModule | None = None
        self.savings = Savings()
        self.hook: RemovableHandle | None = None
        self.optimizer = optimizer
        self.due = None if reselect_every is None else Every(reselect_every)
        self.merges_due = Every(MERGES_EVERY)
        self._diverted = diverted
        self._make = make
        self._batch: Any = None
        self._autocast: list[tuple[str, torch.dtype, bool]] = []
        self._failed: set[Any] = set()
        self._warned: set[str] = set()
        self.watches_losses = False  # whether anybody asks for `all_finite`
        self._finite: Tensor | None = None  # whether losses were, since that was asked or a step was taken
        self._by_batches = by_batches
        self._batches = 0
        self._gave_up = False
        for due in (self.due, self.merges_due):
            if due is not None:
                due.steps = done

    def stop(self) -> None:
        """No more steps come: the optimizer tells of none, and everything is trained again."""
        if self.hook is not None:
            self.hook.remove()
        if self.opt is not None:
            self.opt.rest()

    @property
    def ranks(self) -> Ranks:
        """Those that train the model together; before there is an optimised one, all processes, as `optimize` has it."""
        return Ranks() if self.opt is None else self.opt.ranks

    def __call__(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute a step: the output of the model, with a backward."""
        batch = _as_batch(original, args, kwargs)
        self._batches += 1
        found = self._optimised(batch)
        if isinstance(found, tuple):
            (output,) = found
        else:
            if self.opt is not None:
                self.opt.drop_unselected()  # as in the steps, or on the ranks, with whose gradients these are added up
                if self._batch is None:
                    self._batch, self._autocast = batch, _autocast(batch)  # to adapt with other ranks
            output = original(*args, **kwargs)  # an error here is the model's own
            if found is not None:
                self._fail(found)
            self.savings.last = 1.0
            self.savings.original += 1
            for state in {} if self.opt is None else self.opt.states.values():
                state.after_forward(None, output)
        self.savings.steps += 1
        self.savings.spent += self.savings.last
        if self.watches_losses and not in_function_transform() and (loss := own_loss(output)) is not None:
            finite = torch.isfinite(local_part(loss.detach())).all()
            self._finite = finite if self._finite is None else self._finite.to(finite.device) & finite
        return output

    def _optimised(self, batch: Any) -> tuple[Any] | _Failure | None:
        """The output of an optimised step; a failure, or None where none is tried: the original forward has to compute it."""
        opt = self.opt
        if self._gave_up or (self._failed and self._kind(batch) in self._failed):
            return None
        if opt is None:
            try:
                opt = self._make(self, batch)
            except (BudgetError, InputError, PassError, RankError):
                raise  # what the user asked for, not the optimisation; or what other ranks do
            except Exception as error:  # other batches are tried
                return _Failure(None if isinstance(error, ImportanceError) else self._kind(batch), str(error))
            self.savings.overhead += float(_measured(opt))
            self.opt = opt
        args, kwargs = as_call(batch)
        stood_in = opt.model_runs
        try:
            output = opt(*args, **kwargs)
        except RankError:
            raise  # other ranks wait for this one
        except Exception as error:
            return _Failure(self._kind(batch), str(error))
        self._batch, self._autocast = batch, _autocast(batch)
        reports = opt.last_step.reports if opt.last_step is not None else ()
        self.savings.original += opt.model_runs - stood_in
        before = reports[0].step_flops_before if reports else 0
        self.savings.last = reports[-1].step_flops_after / before if before else 1.0
        return (output,)

    def _kind(self, batch: Any) -> Any:
        return kind_of(batch) if self.opt is not None or not self.ranks.several else None  # a plan is tried by all or by none

    def _fail(self, failure: _Failure) -> None:
        self._failed.add(failure.kind if failure.kind is not None else len(self._failed))
        self._gave_up = len(self._failed) >= ATTEMPTS
        scope = "the rest of the training is" if self._gave_up else "such batches are"
        self.warn(f"a training step could not be optimised, and {scope} computed by the model itself: {failure.why}", scope)

    def warn(self, message: str, key: Any = None) -> None:
        """Warn, once for every `key` (by default, for every message)."""
        if (key or message) not in self._warned:
            self._warned.add(key or message)
            logger.warning("%s", message)

    def all_finite(self, gradients: Iterable[Tensor]) -> bool:
        """Whether losses, or else gradients, are finite on all ranks: a step is taken by all or by none.

        A loss of the model's own that is not finite is a reason to look, no more: a loop may differentiate another.
        """
        losses, self._finite = self._finite, None
        finite = losses is None or bool(losses) or all(bool(torch.isfinite(_entries(gradient)).all()) for gradient in gradients)
        ranks = self.ranks
        if not ranks.several:
            return finite
        device = next(self._diverted.model.parameters()).device
        return bool(ranks.smallest(torch.tensor(float(finite), device=device)))

    def after_step(self, last: bool = False) -> None:
        """Let controllers adapt after an optimizer step.

        Args:
            last: of the training, after which nothing is selected anew.
        """
        count, self._batches = self._batches if self._by_batches else 1, 0
        self._finite = None
        reselect = self.due is not None and self.due.after_step(count) and not last
        merges = self.merges_due.after_step()
        if self.opt is None or self._batch is None or (self._gave_up and not self.opt.ranks.several):
            return  # of several ranks, others may go on, and need this one to agree
        try:
            with contextlib.ExitStack() as as_in_training:
                as_in_training.enter_context(self._diverted.set_aside())
                for device, dtype, enabled in self._autocast:  # as in the last training step
                    as_in_training.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
                if reselect:
                    self.opt.reselect(self._batch, self.optimizer)
                    self.savings.overhead += float(rule_of(self.opt.plan.passes) == "greentrainer" and _measured(self.opt))
                if merges:
                    self.opt.recheck_merges()
                for state in self.opt.states.values():
                    before = state.overhead
                    state.after_step(self._batch)
                    self.savings.overhead += state.overhead - before
        except RankError:
            raise
        except Exception as error:
            self.warn(f"the plan could not be adapted and stays as it is: {error}", type(error))

    def numbers(self) -> dict[str, float]:
        """What happened so far, for logs."""
        found = {
            "graphopt/flops_ratio": self.savings.last,
            "graphopt/flops_saved": self.savings.saved,
            "graphopt/original_steps": float(self.savings.original),
            "graphopt/skipped_steps": float(self.savings.skipped),
        }
        if self.opt is not None:
            found["graphopt/trained_tensors"] = float(len(self.opt.selected))
            found["graphopt/captures"] = float(self.opt.counters.captures)
            found["graphopt/compilations"] = float(self.opt.counters.compilations)
            for state in self.opt.states.values():
                found |= {f"graphopt/{name}": value for name, value in state.numbers().items()}
        return found


def _measured(opt: OptimizedModule) -> bool:
    """Whether tensors were rated by gradients, which takes a step of full training at most."""
    plan = opt.plan
    if plan.selection is None or plan.importance is None:
        return False
    return rule_of(plan.passes) == "greentrainer" or bool(plan.importance.norms)


def _as_batch(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call's arguments as `optimize` and controllers take them: by name where they have one."""
    if not kwargs:
        return args
    parameters = list(inspect.signature(original).parameters.values())[: len(args)]
    if len(parameters) < len(args) or any(p.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD for p in parameters):
        return Call(args, kwargs)
    return {**dict(zip([p.name for p in parameters], args, strict=True)), **kwargs}


def _autocast(batch: Any) -> list[tuple[str, torch.dtype, bool]]:
    kinds = {"cpu", *(t.device.type for t in pytree.tree_leaves(batch) if isinstance(t, Tensor))}
    return [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in sorted(kinds)]


def _entries(gradient: Tensor) -> Tensor:
    local = local_part(gradient)
    return local.coalesce().values() if local.is_sparse else local

"""What a user asks of a training loop, and the training steps that follow from it; the Trainer and `prepare` share it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from graphopt.api import optimize
from graphopt.budget import Budget
from graphopt.calls import BatchDim
from graphopt.compat.fsdp import is_sharded
from graphopt.errors import InputError, LossNotFirst
from graphopt.integrations.diverted import Diverted, DivertedCall
from graphopt.integrations.training_steps import TrainingSteps
from graphopt.loss import LossFunction
from graphopt.lower import Backend, check_backend
from graphopt.passes import Pass, Preserves
from graphopt.planner.plan import resolve_passes
from graphopt.runtime.module import OptimizedModule

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Asked:
    """Arguments of `optimize` for a batch that is yet to come; or what it returned already.

    Attributes:
        given: a model that `optimize` returned, in place of all other arguments.
        reselect_every: optimizer steps between selections; None: an epoch's.
        loss_alone: nothing reads another output of the model than its loss, if it returns one.
        mesh: see `optimize`.
    Raises:
        BudgetError, InputError, PassError: as `optimize`, as far as that needs no model.
    """

    budget: Budget
    passes: str | Sequence[str | Pass] = "auto"
    backend: Backend = "inductor"
    batch_dim: BatchDim = 0
    loss: LossFunction | None = None
    reselect_every: int | None = None
    given: OptimizedModule | None = None
    loss_alone: bool = False
    mesh: DeviceMesh | None = None

    def __post_init__(self) -> None:
        check_backend(self.backend)
        if self.reselect_every is not None and self.reselect_every < 1:
            raise InputError(f"reselect_every={self.reselect_every} must be at least 1 optimizer step.")
        resolve_passes(self.passes, self.budget)

    @property
    def compresses(self) -> bool:
        """Whether gradients may be compressed, which takes an optimizer that `opt.make_optimizer` makes."""
        return any(p.preserves is Preserves.PROJECTED for p in resolve_passes(self.passes, self.budget))

    @property
    def reselects(self) -> bool:
        """Whether tensors are selected anew as training goes on."""
        return (self.budget if self.given is None else self.given.budget).flops is not None

    def optimised(self, model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer | None) -> OptimizedModule:
        """The optimised model, from the first batch.

        Raises:
            GraphoptError: as `optimize`.
        """
        if self.given is not None:
            return self.given
        given = (model, batch, self.budget, self.passes, self.backend)
        options: dict[str, Any] = {"optimizer": optimizer, "loss": self.loss, "batch_dim": self.batch_dim, "mesh": self.mesh}
        if self.loss_alone:
            with contextlib.suppress(LossNotFirst):
                return optimize(*given, **options, outputs="loss")
        return optimize(*given, **options)


def own_optimizer(opt: OptimizedModule) -> bool:
    """Whether a technique's gradients need the optimizer that `opt.make_optimizer` makes."""
    return any(state.own_optimizer for state in opt.states.values())


def batches_of(loader: Any) -> int | None:
    """How many an epoch has; None where the data has no length."""
    try:
        return (len(loader) if isinstance(loader, Sized) else 0) or None
    except TypeError:  # of an iterable data set
        return None


def begin(
    asked: Asked,
    diverted: Diverted,
    optimizer: torch.optim.Optimizer,
    every: int | None,
    made: Callable[[OptimizedModule, TrainingSteps], None],
    *,
    done: int = 0,
    by_batches: bool = False,
) -> TrainingSteps:
    """Put training steps to work, which are optimised from the first batch on.

    Args:
        optimizer: rates tensors; of compressed gradients, which are stepped otherwise, it does not.
        every, done, by_batches: see `TrainingSteps`.
        made: called with the optimised model, once there is one, before its first step; it checks the wrapping, under the plan
            that is in force then.
    """

    def make(steps: TrainingSteps, batch: Any) -> OptimizedModule:  # which holds no steps, and would keep them alive
        if is_sharded(diverted.model) and not isinstance(diverted, DivertedCall):
            raise InputError(
                "the weights are divided by fully_shard, and a diverted forward cannot gather them. Call opt = "
                "graphopt.optimize(model, batch, budget) after fully_shard, and train opt."
            )
        opt = asked.optimised(diverted.model, batch, None if asked.compresses else optimizer)
        opt.controllers.add(steps.savings)
        made(opt, steps)
        return opt

    if isinstance(diverted.run, TrainingSteps):
        diverted.run.stop()
    steps = TrainingSteps(diverted, make, optimizer, every, done, by_batches)
    diverted.run = steps
    return steps

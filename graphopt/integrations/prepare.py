"""`model, optimizer, loader = graphopt.prepare(model, optimizer, loader, budget=0.5)`: the loop stays the user's own.

The model goes on being called; its `forward` is diverted to the optimised one, and the first batch of the loop makes the plan.
A step is over when the optimizer has taken it: its own hook tells, whoever calls `step` (a scheduler's wrapper, a GradScaler).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from graphopt.analysis.optimizers import unwrapped
from graphopt.budget import Budget, Limits
from graphopt.calls import BatchDim
from graphopt.errors import InputError
from graphopt.integrations.asked import Asked, batches_of, begin, own_optimizer
from graphopt.integrations.diverted import Diverted
from graphopt.integrations.substituted import SUBSTITUTED, Substituted
from graphopt.integrations.training_steps import TrainingSteps
from graphopt.loss import LossFunction
from graphopt.lower import Backend
from graphopt.passes import Pass
from graphopt.report.summary import Report
from graphopt.runtime.module import OptimizedModule


class Prepared:
    """What `prepare` returns: unpack it into `model, optimizer, loader`, or keep it for its report.

    Attributes:
        model: the caller's own, with its forward diverted.
        optimizer: the caller's own, unless gradients may be compressed.
        loader: the caller's own.
    """

    def __init__(self, asked: Asked, model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> None:
        self.model = model
        self.optimizer = Substituted(optimizer) if asked.compresses else optimizer
        self.loader = loader
        self._from: Path | None = None
        self._diverted = Diverted.of(model)
        self._diverted.in_eval = True
        every, by_batches = asked.reselect_every, False
        if every is None and asked.reselects:
            every, by_batches = batches_of(loader), True
        self._by_epoch = by_batches
        self._steps = begin(asked, self._diverted, optimizer, every, self._made, by_batches=by_batches)
        self._steps.hook = unwrapped(self.optimizer).register_step_post_hook(lambda *_: self._steps.after_step())

    def __iter__(self) -> Iterator[Any]:
        return iter((self.model, self.optimizer, self.loader))

    def __repr__(self) -> str:
        state = "no batch has come yet" if self.opt is None else f"{self._steps.savings.steps} steps so far"
        return f"Prepared({type(self.model).__name__}, {type(self.optimizer).__name__}: {state})"

    @property
    def opt(self) -> OptimizedModule | None:
        """The optimised model, for `.report`, `.dump` and `.plan`; None before the first batch."""
        return self._steps.opt

    @property
    def report(self) -> Report:
        """See `OptimizedModule.report`.

        Raises:
            InputError: before the first batch there is none.
        """
        return self._known().report

    def numbers(self) -> dict[str, float]:
        """What happened so far, for logs: FLOPs of the last step, FLOPs saved, tensors trained, compilations and the like."""
        return self._steps.numbers()

    def save_state(self, path: str | os.PathLike[str]) -> None:
        """Write the plan and what adapts it to one file; weights, optimizer and random state are saved as ever.

        Raises:
            InputError, CheckpointError: see `OptimizedModule.save_state`; or no batch has come yet.
        """
        self._known().save_state(path)

    def load_state(self, path: str | os.PathLike[str]) -> None:
        """Go on from what `save_state` wrote; before the first batch, with that.

        Raises:
            InputError: there is no such file, or what `OptimizedModule.load_state` raises, then from the first batch.
        """
        if not Path(path).is_file():
            raise InputError(f"there is no file {path}.")
        if self.opt is None:
            self._from = Path(path)
        else:
            self.opt.load_state(path)

    def detach(self) -> None:
        """Give the model its own forward back; it trains everything again, and the optimizer no longer tells of its steps."""
        if self._diverted.run is self._steps:
            self._diverted.remove()
        self._steps.stop()

    def _known(self) -> OptimizedModule:
        if self.opt is None:
            raise InputError("nothing was optimised yet: the first batch of the training loop makes the plan.")
        return self.opt

    def _made(self, opt: OptimizedModule, steps: TrainingSteps) -> None:
        if self._by_epoch and steps.due is not None:
            steps.due.every = _epoch(_divided(self.loader)) or steps.due.every
        for due in (steps.merges_due, steps.due):
            if due is not None:
                opt.controllers.add(due)

        def load() -> None:
            if self._from is not None:
                opt.load_state(self._from)
            opt.check_wrapping()

        if isinstance(self.optimizer, Substituted) and own_optimizer(opt):
            self.optimizer.substitute(opt, load)
        else:
            load()
        if isinstance(self.optimizer, Substituted):
            self.optimizer.settle()
            steps.optimizer = self.optimizer.inner


def prepare(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: Any,
    budget: Limits = None,
    passes: str | Sequence[str | Pass] = "auto",
    backend: Backend = "inductor",
    *,
    loss: LossFunction | None = None,
    batch_dim: BatchDim = 0,
    reselect_every: int | None = None,
) -> Prepared:
    """Make a training loop of your own cheaper; the loop stays as it is.

    The first batch with which the loop calls the model makes the plan. After every optimizer step what adapts the plan has its
    turn: tensors are selected anew every epoch, sampling ratios follow the variance, adapters in half precision are merged once
    that loses nothing. Gradient accumulation, clipping, schedulers and GradScalers work as before. Calls without gradients run
    the model as it is. What cannot be captured or compiled is computed by the model itself, with a warning.

    Args:
        model: any module with trainable parameters. It is called as before; its `forward` is its own again after `detach()`.
        optimizer: the one that trains it.
        loader: what the loop iterates over. It is returned as it is, and no batch is taken from it; its length is an epoch.
        budget, passes, backend, loss, batch_dim: as for `optimize`.
        reselect_every: optimizer steps between selections; by default an epoch's.
    Returns:
        `model, optimizer, loader`, when unpacked. The optimizer is the given one, unless `passes` compress gradients ("lsp"):
        then one that steps these, too, and whose `param_groups` hold what the loop may clip.
    Raises:
        BudgetError, InputError, PassError: for what can be told without a batch; the rest is raised by the first step.

    Example:
        training = graphopt.prepare(model, optimizer, loader, budget=0.5)
        model, optimizer, loader = training
        for batch in loader:
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        print(training.report)
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"model must be a torch.nn.Module, not {type(model).__name__}.")
    if isinstance(model, OptimizedModule):
        raise InputError("the model was optimised already: pass the model itself, and prepare() optimises it.")
    inner = unwrapped(optimizer)
    if not isinstance(inner, torch.optim.Optimizer):
        raise InputError(f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}.")
    if loader is not None and not isinstance(loader, Iterable):
        raise InputError(f"loader must be what the loop iterates over, not {type(loader).__name__}.")
    if inner in SUBSTITUTED:
        raise InputError("the optimizer steps the gradients that an earlier prepare() compresses: make a new one.")
    own = {id(p) for p in model.parameters()}
    if not any(id(p) in own for group in inner.param_groups for p in group["params"]):
        raise InputError("the optimizer holds none of the model's parameters: pass the one that trains it.")
    asked = Asked(Budget.of(budget), passes, backend, batch_dim, loss, reselect_every)
    if asked.compresses and inner is not optimizer:
        raise InputError(f"{type(optimizer).__name__} cannot step compressed gradients: call prepare() before it is made.")
    return Prepared(asked, model, optimizer, loader)


def _divided(loader: Any) -> Any:
    """What accelerate iterates over in the place of `loader`, which `accelerator.prepare` has divided among processes since."""
    state = getattr(sys.modules.get("accelerate.state"), "GradientState", None)
    active = state().active_dataloader if state is not None and state._shared_state else None
    return loader if getattr(active, "dataset", None) is not getattr(loader, "dataset", loader) else active


def _epoch(loader: Any) -> int | None:
    """Batches of a whole epoch; of a first one that goes on in the middle, `accelerate.skip_first_batches` leaves some out."""
    samplers = getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)
    count = batches_of(loader)
    return None if count is None else count + max(getattr(sampler, "skip_batches", 0) for sampler in samplers)

"""What a technique keeps while a model trains: values that its graphs read, gradients of its own, what adapts its decisions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from graphopt.compat import InputDesc, OutputDesc
from graphopt.errors import InputError

if TYPE_CHECKING:
    from graphopt.passes.base import Supplying

    from graphopt.analysis.communication import Collective
    from graphopt.frontend.step import RegionStep
    from graphopt.planner.plan import Plan

MakeOptimizer = Callable[..., torch.optim.Optimizer]
"""Such as `torch.optim.AdamW`."""


class State:
    """What `Technique.start` returns; it lives as long as the optimised model. These methods do nothing: write those you need.

    Attributes:
        adapts: a training loop calls `after_step` through `opt.controller`.
        own_optimizer: training takes the optimizer that `opt.make_optimizer` makes.
        saved: state files have a part for it.
        overhead: what `after_step` has cost so far, in FLOPs of a full step.
    """

    adapts = False
    own_optimizer = False
    saved = True

    @property
    def overhead(self) -> float:
        """See the class."""
        return 0.0

    @property
    def collectives(self) -> Sequence[Collective]:
        """What a step like the last hands to other ranks beside what its graphs do."""
        return ()

    def before_forward(self, plan: Plan, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
        """The plan of the step that is about to run on these arguments, from that of the training."""
        return plan

    def instead(self, plan: Plan, error: Exception) -> Plan | None:
        """The plan of the step again, whose forward has raised `error` under `plan`; None: it has nothing to do with that."""
        return None

    def after_forward(self, step: RegionStep | None, output: Any) -> None:
        """The forward of `step` has run and returned `output`; None: the model itself ran in its place."""

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Inside, steps hand nothing to other ranks; see `OptimizedModule.no_sync`."""
        return contextlib.nullcontext()

    def supply(self, desc: InputDesc, size: Sequence[int], like: Tensor) -> Tensor | None:
        """The value of an input that the technique has added to a graph, on the device of `like`; None: it is another's."""
        return None

    def take(self, desc: InputDesc | OutputDesc, value: Tensor) -> bool:
        """Take the gradient of an added input or a slot's value, in the middle of the backward; False: it is another's."""
        return False

    def synchronize(self) -> None:
        """Weights are about to be read by others: finish what is still to be done to them."""

    def clear_gradients(self, names: Iterable[str] | None = None) -> None:
        """Forget gradients that are kept elsewhere than in `.grad` of these parameters; None: of all."""

    def selected(self, names: Iterable[str]) -> None:
        """These parameters are trained from now on, and were not before."""

    def optimizer(self, model: nn.Module, make: MakeOptimizer, groups: Any, options: Mapping[str, Any]) -> Any:
        """An optimizer in the place of `make(groups, **options)`; None: that one will do."""
        return None

    def steps_with(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer is one of those that `optimizer` made."""
        return False

    def variables(self) -> Mapping[str, Tensor]:
        """Tensors that such an optimizer steps in the place of parameters, by the parameter's name."""
        return {}

    def image(self, name: str, gradient: Tensor) -> Tensor | None:
        """What the technique makes of autograd's gradient of a parameter, for `verify=True`; None: it leaves it as it is."""
        return None

    def after_step(self, batch: Any) -> Any:
        """Adapt after an optimizer step; `batch` is what the model was called with."""

    def numbers(self) -> dict[str, float]:
        """What a training loop logs."""
        return {}

    def snapshot(self) -> Any:
        """See `Stateful`: there is nothing to keep."""
        return {}

    def prepare(self, snapshot: Any) -> Callable[[], None]:
        """See `Stateful`."""
        if snapshot != {}:
            raise InputError(f"it was saved with a state of {type(self).__name__}, which has none here: use the same passes.")
        return lambda: None


class Supplied(State):
    """Values for the inputs that a pass itself adds, from its own methods; see `Supplying`."""

    def __init__(self, rewrite: Supplying) -> None:
        self.rewrite = rewrite

    def supply(self, desc: InputDesc, size: Sequence[int], like: Tensor) -> Tensor | None:
        """See `State`."""
        return self.rewrite.supply(desc, size, like) if desc.owner == self.rewrite.name else None

    def take(self, desc: InputDesc | OutputDesc, value: Tensor) -> bool:
        """See `State`."""
        mine = desc.owner == self.rewrite.name
        if mine:
            self.rewrite.take(desc, value)
        return mine

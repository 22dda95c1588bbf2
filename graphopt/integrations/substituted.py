"""The user's optimizer until the plan is known, and then, in the same object, the one that steps compressed gradients."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from graphopt.compat.optimizer_hooks import load_with_hooks, state_with_hooks
from graphopt.errors import InputError
from graphopt.passes.state import State
from graphopt.runtime.load_optimizer import put_back
from graphopt.runtime.module import OptimizedModule

logger = logging.getLogger("graphopt")


SUBSTITUTED: WeakSet[torch.optim.Optimizer] = WeakSet()
"""Optimizers whose groups hold compressed gradients' variables, in the place of weights."""


class Substituted(torch.optim.Optimizer):
    """Passes on to `inner`, which a learning-rate scheduler or a GradScaler that holds this object never sees change.

    Attributes:
        inner: the user's optimizer, or from `substitute` on the one of `opt.make_optimizer`, which has that in it.
    """

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self._to_load: dict[str, Any] | None = None
        self._before_load: list[dict[str, Any]] = []
        self._settled = False
        self._states: tuple[State, ...] = ()
        super().__init__([{"params": list(group["params"])} for group in inner.param_groups], dict(inner.defaults))
        self._follow()

    def _follow(self) -> None:
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    def substitute(self, opt: OptimizedModule, load: Callable[[], None]) -> None:
        """Have the gradients that `opt` compresses stepped, too, with the options that every group has now.

        Args:
            load: called then; where it fails, all is as before.
        Raises:
            InputError: see `OptimizedModule.make_optimizer`.
        """
        users, to_load = self.inner, self._to_load
        groups = [{**group, "params": list(group["params"])} for group in users.param_groups]
        if users.state:
            logger.warning("gradients are compressed from now on: the states of %s start anew.", type(users).__name__)

        def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
            """The user's own, which a scheduler may hold already: it steps what is not compressed."""
            users.param_groups, users.state = groups, defaultdict(dict)
            return users

        try:
            with put_back(self):
                self.inner = opt.make_optimizer(make, groups)
                self.settle()
                load()
        except BaseException:  # the next batch tries again, from the user's optimizer
            if self._settled:  # it is not the optimizer's state that was refused
                self._to_load, self._settled = to_load, False
            self.inner = users
            raise
        SUBSTITUTED.update({self, users})
        self._states = tuple(opt.states.values())
        logger.warning(
            "gradients are compressed, and model.parameters() does not hold them: where your loop clips, have it clip the "
            "parameters in optimizer.param_groups."
        )

    def settle(self) -> None:
        """The optimizer stays what it is now; a state that was to be loaded is loaded, but for options that changed since.

        Where it is refused, the options are those from before `load_state_dict`.
        """
        state, self._to_load = self._to_load, None  # one that is refused is refused once
        if state is not None:
            now = list(map(_options, self.param_groups))
            try:
                self.inner.load_state_dict(state)
            except BaseException:
                for group, before in zip(self.param_groups, self._before_load, strict=False):  # a group may have been added
                    group.update(before)
                raise
            for group, options in zip(self.inner.param_groups, now, strict=True):
                group.update(options)
        self._settled = True
        self._follow()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """As of torch optimizers."""
        if not self._settled:  # the first batch could not be optimised
            self.settle()
        result = self.inner.step() if closure is None else self.inner.step(closure)
        for state in self._states:
            state.clear_gradients()  # model.zero_grad() in the user's loop does not reach these
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of torch optimizers."""
        self.inner.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As of torch optimizers."""
        if "param_groups" in vars(self) and self.param_groups is self.inner.param_groups:
            self.inner.add_param_group(param_group)
            self._follow()
        else:  # while the base class is set up
            super().add_param_group(param_group)

    def parameters(self) -> list[nn.Parameter]:
        """Everything that is stepped, for `torch.nn.utils.clip_grad_norm_`."""
        return [p for group in self.param_groups for p in group["params"]]

    def state_dict(self) -> dict[str, Any]:
        """As of torch optimizers; of compressed gradients, see `SubspaceOptimizer`."""
        return state_with_hooks(self, lambda: self.inner.state_dict() if self._to_load is None else dict(self._to_load))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As of torch optimizers; before the first batch it waits for that, which tells whose state it is. Hooks do not wait.

        Raises:
            InputError: before the first batch, the state is of another number of groups; nothing is changed then.
        """
        load_with_hooks(self, state_dict, self._load)

    def _load(self, state_dict: dict[str, Any]) -> None:
        if not self._settled:
            saved, own = len(state_dict["param_groups"]), len(self.param_groups)
            if saved != own:
                raise InputError(
                    f"the state has {saved} parameter groups, this optimizer {own}: make the optimizer as it was when the state "
                    "was saved."
                )
            if self._to_load is None:
                self._before_load = list(map(_options, self.param_groups))
            self._to_load = state_dict
            for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
                group.update(_options(saved))  # which schedulers, made next, begin with
            return
        self.inner.load_state_dict(state_dict)
        self._follow()


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}

"""A model's `forward`, or its call, that can be diverted for as long as training lasts.

Training loops own the call `model(**batch)`, and wrap `model.forward` (accelerate enters autocast there). A diverted forward is
an attribute of the one model, below such wrappers if it comes first, with the signature of the original.
"""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch
from torch import nn

from graphopt.compat import MODULE_HOOKS
from graphopt.compat.fsdp import CALL, own_call

Run = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Computes a training step, given the original forward and the arguments of the call."""


class Diverted:
    """The forward of `model`: the original one, but for training steps while there is a `run`.

    Attributes:
        original: the forward as it was.
        run: computes training steps (gradients enabled, and training mode unless `in_eval`); None: the original does.
        in_eval: whether calls in eval mode with gradients enabled are training steps, too.
    """

    def __init__(self, model: nn.Module) -> None:
        """Install it; `Diverted.of` also finds one that is installed already."""
        self.model = model
        self.original = model.forward
        self.run: Run | None = None
        self.in_eval = False
        self._before = model.__dict__.get("forward")
        self._inside = False
        diversion = self

        function = getattr(self.original, "__func__", None) or type(model).forward

        @functools.wraps(function)
        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if module is diversion.model:
                return diversion._call(args, kwargs)
            return MethodType(function, module)(*args, **kwargs)  # a deep copy of the model

        forward.__dict__["diverted"] = self
        self._installed = MethodType(forward, model)
        model.__dict__["forward"] = self._installed

    @classmethod
    def of(cls, model: nn.Module) -> Diverted:
        """The diversion of `model`, looked for below wrappers of its forward, or else a new one."""
        function: Any = model.forward
        while function is not None:
            function = getattr(function, "__func__", function)
            found = getattr(function, "__dict__", {}).get("diverted")
            if isinstance(found, cls) and found.model is model:
                return found
            function = getattr(function, "__wrapped__", None)
        return cls(model)

    @property
    def outermost(self) -> bool:
        """Whether nothing was wrapped around it."""
        return self.model.__dict__.get("forward") is self._installed

    def remove(self) -> None:
        """Have the original compute everything; the model is as before where nothing was wrapped around it."""
        self.run = None
        if self.outermost:
            del self.model.__dict__["forward"]
            if self._before is not None:
                self.model.__dict__["forward"] = self._before

    @contextlib.contextmanager
    def set_aside(self) -> Iterator[None]:
        """The model with its original forward and without hooks of its own, which the call that is under way has run."""
        attributes = self.model.__dict__
        outside = attributes.pop("forward", None)
        hooks = {name: attributes[name] for name in MODULE_HOOKS if name in attributes}
        attributes.update({name: OrderedDict() for name in hooks})
        if self._before is not None:
            attributes["forward"] = self._before
        inside, self._inside = self._inside, True
        try:
            yield
        finally:
            self._inside = inside
            attributes.update(hooks)
            attributes.pop("forward", None)
            if outside is not None:
                attributes["forward"] = outside

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        trains = torch.is_grad_enabled() and (self.model.training or self.in_eval)
        if self.run is None or self._inside or not trains:
            return self.original(*args, **kwargs)
        with self.set_aside():
            return self.run(self.original, args, kwargs)


class DivertedCall(Diverted):
    """The call of a model with its hooks: those of `fully_shard` gather weights, also where a plan is made by running it."""

    def __init__(self, model: nn.Module) -> None:
        """Install it."""
        self.model = model
        self.run: Run | None = None
        self.in_eval = self._inside = False

        @functools.wraps(model.forward)
        def original(*args: Any, **kwargs: Any) -> Any:
            return own_call(model, *args, **kwargs)

        self.original = original
        self._diverted = lambda *args, **kwargs: self._call(args, kwargs)
        model.__dict__[CALL] = self._diverted

    @property
    def outermost(self) -> bool:
        """Whether it is in force."""
        return self.model.__dict__.get(CALL) is self._diverted

    def remove(self) -> None:
        """The model is called as before."""
        self.run = None
        if self.outermost:
            del self.model.__dict__[CALL]

    @contextlib.contextmanager
    def set_aside(self) -> Iterator[None]:
        """The model as it is called without this."""
        inside, self._inside = self._inside, True
        del self.model.__dict__[CALL]
        try:
            yield
        finally:
            self._inside = inside
            self.model.__dict__[CALL] = self._diverted

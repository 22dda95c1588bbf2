"""A module that passes for another one: it shares its parameters, buffers, submodules and attributes."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import operator
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

_SHARED = (
    "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_state_dict_hooks", "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip

_PRIVATE = ("_apply", "_load_from_state_dict", "_named_members", "_get_name", "__repr__")
"""Private methods of nn.Module that models override, and that it, or a module that holds this one, calls."""

_BY_NAME = ("get_submodule", "get_parameter", "get_buffer", "set_submodule")
"""What looks for parts by name: the model's parts may be named like this module's own attributes, such as `graph`."""


class Forward:
    """The forward of an optimised model, which shows the signature of the model's own."""

    def __init__(self, opt: SharedModule) -> None:
        self._opt = weakref.ref(opt)
        with contextlib.suppress(TypeError, ValueError):
            self.__signature__ = inspect.signature(opt._graphopt_model.forward)
        with contextlib.suppress(AttributeError):
            self.__code__ = opt._graphopt_model.forward.__code__  # torch.export tells by it where inputs come from

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """See `forward` of the module."""
        opt = self._opt()
        assert opt is not None
        return type(opt).forward(opt, *args, **kwargs)


def _empty(kind: type[nn.Module]) -> nn.Module:
    return kind.__new__(kind)


class SharedModule(nn.Module):
    """Passes for `model`: `state_dict` keys, optimizers and checkpoints stay as they are, and other attributes are the model's.

    So are methods of nn.Module that the model overrides; see `_overridable`.

    Attributes:
        without_code: names of attributes that hold compiled code, which copies and pickles do without.
        without_graphs: of those that hold graphs, which pickles do without.
    """

    without_code: tuple[str, ...] = ()
    without_graphs: tuple[str, ...] = ()

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.__dict__["_graphopt_model"] = model  # as no part is called: torch.func.functional_call finds parts by their names
        for name in _SHARED:
            if name in model.__dict__:
                self.__dict__[name] = model.__dict__[name]
        self.__dict__["forward"] = Forward(self)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The model's: so that libraries find its `save_pretrained`, config and labels. `type(self)` is our own."""
        model = self.__dict__.get("_graphopt_model")
        return type(self) if model is None else model.__class__

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Rebuilt by its type, as pickle takes `__class__`, which is the model's."""
        return _empty, (type(self),), self.__getstate__()

    def __getstate__(self) -> dict[str, Any]:
        """Without graphs and compiled code: what is unpickled captures and compiles its own, in its first step."""
        return self._without_code() | dict.fromkeys(self.without_graphs)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__["forward"] = Forward(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self._without_code(), memo))
        copied.__dict__["forward"] = Forward(copied)
        return copied

    def _without_code(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != "forward"} | dict.fromkeys(self.without_code)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_graphopt_model"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set on the model, whose forward reads it, but for what is this module's own.

        Raises:
            AttributeError: it is one of the attributes that only tell.
        """
        if name in self.only_read and name in self.__dict__:
            if not hasattr(self._graphopt_model, name):
                raise AttributeError(f"{name} only tells: opt.{name} cannot be set.")
            setattr(self._graphopt_model, name, value)  # its own part of that name
        elif self._is_own(name):
            super().__setattr__(name, value)
        else:
            setattr(self._graphopt_model, name, value)

    def __delattr__(self, name: str) -> None:
        if self._is_own(name):
            super().__delattr__(name)
        else:
            delattr(self._graphopt_model, name)

    def _is_own(self, name: str) -> bool:
        """Whether an attribute is this module's: private ones that the model lacks are what libraries note of a wrapper."""
        model = self.__dict__.get("_graphopt_model")
        if model is None or name in self.__dict__ or hasattr(type(self), name):
            return True
        return name.startswith("_") and not hasattr(model, name)

    def __dir__(self) -> list[str]:
        """With what the model lists, whose attributes it passes on."""
        return sorted({*dir(self._graphopt_model), *super().__dir__()})

    @property
    def training(self) -> bool:
        """The model's own flag: setting either sets both."""
        model = self.__dict__.get("_graphopt_model")
        return True if model is None else model.training

    @training.setter
    def training(self, mode: bool) -> None:
        if "_graphopt_model" in self.__dict__:
            self.__dict__["_graphopt_model"].training = mode

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own, whatever it makes of it."""
        return self._graphopt_model.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Into the model, by its own."""
        return self._graphopt_model.load_state_dict(*args, **kwargs)

    def train(self, mode: bool = True) -> Any:
        """Set training mode on the model, through its own `train`."""
        self._graphopt_model.train(mode)
        return self


def _overridable(name: str) -> Callable[..., Any]:
    """The method `name` of nn.Module, in whose place the model's own runs where its class, or itself, has one."""
    inherited = getattr(nn.Module, name)

    @functools.wraps(inherited)
    def method(self: SharedModule, *args: Any, **kwargs: Any) -> Any:
        model = self.__dict__.get("_graphopt_model")
        if model is None:
            return inherited(self, *args, **kwargs)
        overrides = name in model.__dict__ or getattr(type(model), name) is not inherited
        if not overrides and name not in _BY_NAME:
            return inherited(self, *args, **kwargs)
        result = getattr(model, name)(*args, **kwargs)
        return self if result is model else result

    return method


def _asked_of_model(question: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args: question(self._graphopt_model, *args)


for _name, _question in (
    ("__len__", len), ("__bool__", bool), ("__getitem__", operator.getitem), ("__iter__", iter),
    ("__contains__", operator.contains),
):  # fmt: skip  # of models that have parts by number or name, such as `nn.Sequential`
    setattr(SharedModule, _name, _asked_of_model(_question))

for _name, _value in vars(nn.Module).items():
    if _name in vars(SharedModule) or _name == "forward" or not inspect.isfunction(_value):
        continue
    if not _name.startswith("_") or _name in _PRIVATE:
        setattr(SharedModule, _name, _overridable(_name))

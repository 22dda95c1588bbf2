"""A module that passes for another one: it shares its parameters, buffers, submodules and attributes."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from graphopt.runtime.forward import Forward

_SHARED = (
    "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_state_dict_hooks", "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip

_PRIVATE = ("_apply", "_load_from_state_dict", "_named_members", "_get_name", "__repr__")
"""Private methods of nn.Module that models override, and that it, or a module that holds this one, calls."""


def _empty(kind: type[nn.Module]) -> nn.Module:
    """A module before it has a state."""
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
        self.__dict__["_model"] = model
        for name in _SHARED:
            if name in model.__dict__:
                self.__dict__[name] = model.__dict__[name]
        self.__dict__["forward"] = Forward(self)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The model's: so that libraries find its `save_pretrained`, config and labels. `type(self)` is our own."""
        model = self.__dict__.get("_model")
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
            return getattr(self.__dict__["_model"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set on the model, whose forward reads it, but for what is this module's own."""
        if self._is_own(name):
            super().__setattr__(name, value)
        else:
            setattr(self._model, name, value)

    def __delattr__(self, name: str) -> None:
        if self._is_own(name):
            super().__delattr__(name)
        else:
            delattr(self._model, name)

    def _is_own(self, name: str) -> bool:
        """Whether an attribute is this module's: private ones that the model lacks are what libraries note of a wrapper."""
        model = self.__dict__.get("_model")
        if model is None or name in self.__dict__ or hasattr(type(self), name):
            return True
        return name.startswith("_") and not hasattr(model, name)

    def __dir__(self) -> list[str]:
        """With what the model lists, whose attributes it passes on."""
        return sorted({*dir(self._model), *super().__dir__()})

    def __len__(self) -> int:
        """Of a model that has a length, such as `nn.Sequential`."""
        return len(self._model)

    def __bool__(self) -> bool:
        return bool(self._model)

    def __getitem__(self, key: Any) -> Any:
        """A part of a model that has them by number or name."""
        return self._model[key]

    @property
    def training(self) -> bool:
        """The model's own flag: setting either sets both."""
        model = self.__dict__.get("_model")
        return True if model is None else model.training

    @training.setter
    def training(self, mode: bool) -> None:
        if "_model" in self.__dict__:
            self.__dict__["_model"].training = mode

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own, whatever it makes of it."""
        return self._model.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Into the model, by its own."""
        return self._model.load_state_dict(*args, **kwargs)

    def train(self, mode: bool = True) -> Any:
        """Set training mode on the model, through its own `train`."""
        self._model.train(mode)
        return self


def _overridable(name: str) -> Callable[..., Any]:
    """The method `name` of nn.Module, in whose place the model's own runs where its class, or itself, has one."""
    inherited = getattr(nn.Module, name)

    @functools.wraps(inherited)
    def method(self: SharedModule, *args: Any, **kwargs: Any) -> Any:
        model = self.__dict__.get("_model")
        if model is None or (name not in model.__dict__ and getattr(type(model), name) is inherited):
            return inherited(self, *args, **kwargs)
        result = getattr(model, name)(*args, **kwargs)
        return self if result is model else result

    return method


for _name, _value in vars(nn.Module).items():
    if _name in vars(SharedModule) or _name == "forward" or not inspect.isfunction(_value):
        continue
    if not _name.startswith("_") or _name in _PRIVATE:
        setattr(SharedModule, _name, _overridable(_name))

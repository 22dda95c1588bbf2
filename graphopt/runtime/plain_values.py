"""Dataclasses as plain values (see `graphopt.runtime.state_file`), and back with every type checked."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from torch import Tensor

from graphopt.errors import InputError

Kind = TypeVar("Kind")


def to_plain(value: Any) -> Any:
    """Dataclasses become dicts of their fields, sets sorted lists; everything else stays."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if type(value) in (list, tuple):
        return type(value)(to_plain(item) for item in value)
    return value


def from_plain(kind: type[Kind], value: Any, where: str) -> Kind:
    """A `kind` from what `to_plain` made of it.

    Args:
        kind: bool, int, float, str, Tensor, Any, a dataclass with such fields, a list, tuple, frozenset, Sequence, dict or
            Mapping of them, or one of these or None.
        where: names the value in errors.
    Raises:
        InputError: the value, or something in it, is of another type; names it.
    """
    return typing.cast(Kind, _checked(kind, value, where))


def _checked(kind: Any, value: Any, where: str) -> Any:
    origin, parameters = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        (wanted,) = (p for p in parameters if p is not type(None))
        return None if value is None else _checked(wanted, value, where)
    if kind is float and type(value) in (int, float):
        return float(value)
    if kind in (int, bool, str, float):
        return value if type(value) is kind else _refuse(kind, value, where)
    if kind is Tensor:
        return value if isinstance(value, Tensor) else _refuse(kind, value, where)
    if is_dataclass(kind):
        return _dataclass(kind, value, where)
    if origin in (dict, Mapping):
        if not isinstance(value, dict):
            _refuse(kind, value, where)
        return {
            _checked(parameters[0], k, f"a key of {where}"): _checked(parameters[1], v, f"{where}.{k}") for k, v in value.items()
        }
    if not isinstance(value, (list, tuple)):
        _refuse(kind, value, where)
    if origin is tuple and parameters[-1] is not Ellipsis:
        if len(value) != len(parameters):
            _refuse(kind, value, where)
        return tuple(_checked(p, v, f"{where}[{i}]") for i, (p, v) in enumerate(zip(parameters, value, strict=True)))
    items = [_checked(parameters[0], v, f"{where}[{i}]") for i, v in enumerate(value)]
    return {list: list, tuple: tuple, Sequence: tuple, frozenset: frozenset}[origin](items)


def _dataclass(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        _refuse(kind, value, where)
    types_of = typing.get_type_hints(kind)
    names = [f.name for f in fields(kind)]
    if set(value) != set(names):
        raise InputError(f"{where} does not have the entries {', '.join(names)}.")
    return kind(**{name: _checked(types_of[name], value[name], f"{where}.{name}") for name in names})


def _refuse(kind: Any, value: Any, where: str) -> Any:
    raise InputError(f"{where} is of type {type(value).__name__}, and not {getattr(kind, '__name__', kind)}.")

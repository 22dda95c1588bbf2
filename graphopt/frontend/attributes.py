"""Attributes of a model's modules, which its forward may change, as they were."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Sequence
from typing import Any

from torch import nn

Container = dict[Any, Any] | list[Any] | set[Any] | deque[Any]

_PLAIN = (dict, list, set, deque, OrderedDict, defaultdict, Counter)
"""Types of attributes that forward may change in place."""


LARGEST = 1000
"""Entries of a container that is taken for something that forward keeps, and not for data."""


def attributes_of(model: nn.Module) -> list[tuple[Container, Container]]:
    """The attributes of all modules and the plain containers in them, each with a copy."""
    waiting: list[Container] = [vars(module) for module in model.modules()]
    found: dict[int, tuple[Container, Container]] = {}
    while waiting:
        held = waiting.pop()
        if id(held) in found:
            continue
        found[id(held)] = held, held.copy()
        values = held.values() if isinstance(held, dict) else held
        if len(held) <= LARGEST:
            waiting += [value for value in values if type(value) in _PLAIN and len(value) <= LARGEST]
    return list(found.values())


def put_back(attributes: Sequence[tuple[Container, Container]]) -> None:
    """Have containers hold again what they held."""
    for held, values in attributes:
        held.clear()
        if isinstance(held, (list, deque)):
            held.extend(values)
        else:
            held.update(values)


def have_changed(attributes: Sequence[tuple[Container, Container]]) -> bool:
    """Whether a container holds something else than it held."""
    return any(not _alike(held, values) for held, values in attributes)


def _alike(held: Container, values: Container) -> bool:
    """Whether they hold the same objects, or equal numbers and texts, in the same places."""
    if isinstance(held, set):
        return held == values
    if isinstance(held, dict) and isinstance(values, dict):
        return list(held) == list(values) and _alike(list(held.values()), list(values.values()))
    return len(held) == len(values) and all(a is b or _equal(a, b) for a, b in zip(held, values, strict=True))


def _equal(a: object, b: object) -> bool:
    return type(a) is type(b) and isinstance(a, (int, float, str)) and a == b

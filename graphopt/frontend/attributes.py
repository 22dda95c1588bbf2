"""Attributes of a model's modules, which its forward may change, as they were."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any

from torch import nn

Container = dict[Any, Any] | list[Any] | set[Any]

_PLAIN = (dict, list, set, OrderedDict, defaultdict)
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
        if isinstance(held, list):
            held.extend(values)
        else:
            held.update(values)

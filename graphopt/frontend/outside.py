"""Plain containers outside a model that its forward and hooks write to: a run that is no step of the caller's leaves them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from types import FunctionType
from typing import Any

from torch import nn

from graphopt.compat import MODULE_HOOKS
from graphopt.frontend.before import LARGEST, PLAIN, Container, alike, put_back


@contextlib.contextmanager
def unchanged_outside(model: nn.Module) -> Iterator[None]:
    """Have globals, closures and default arguments of methods and hooks hold what they held: copies of a model share those."""
    held = [(container, container.copy()) for container in _containers(model)]
    try:
        yield
    finally:
        put_back([(container, values) for container, values in held if not alike(container, values)])  # threads read the others


def _containers(model: nn.Module) -> list[Container]:
    found: dict[int, Container] = {}
    waiting, seen = list(_functions(model)), set()
    while waiting:
        function = waiting.pop()
        if id(function) in seen:
            continue
        seen.add(id(function))
        for value in _named_in(function):
            if isinstance(value, nn.Module):  # a copy has its own attributes, but a closure keeps the module itself
                found |= {id(own): own for own in (vars(value), *vars(value).values()) if type(own) in PLAIN}
            elif type(value) in PLAIN:
                found[id(value)] = value
            elif isinstance(value, (FunctionType, functools.partial)):
                waiting.append(value)
    return [container for container in found.values() if len(container) <= LARGEST]


def _functions(model: nn.Module) -> Iterator[Any]:
    """What a call may run: methods of the modules' own classes, what took the place of a forward, and hooks."""
    classes = {own for module in model.modules() for own in type(module).__mro__ if not issubclass(nn.Module, own)}
    for own in classes:
        yield from (value for value in vars(own).values() if isinstance(value, FunctionType))
    for module in model.modules():
        yield vars(module).get("forward")
        for hooks in MODULE_HOOKS:
            yield from vars(module).get(hooks, {}).values()


def _named_in(function: Any) -> Iterable[Any]:
    """What a function may reach by a name: values of its closure, defaults, and globals; of functions, those of its own file."""
    if isinstance(function, functools.partial):
        return [*function.args, *function.keywords.values(), function.func]
    function = getattr(function, "__func__", function)
    if not isinstance(function, FunctionType):
        return ()
    cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    known = function.__globals__
    named = [known[name] for name in function.__code__.co_names if name in known]
    own = [v for v in named if not isinstance(v, FunctionType) or v.__globals__ is known]
    return [*cells, *defaults, *own]


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True

"""Plain containers outside a model that its forward and hooks write to: a run that is no step of the caller's leaves them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from graphopt.frontend.before import LARGEST, PLAIN, Container, put_back

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


@contextlib.contextmanager
def unchanged_outside(model: nn.Module) -> Iterator[None]:
    """Have globals, closures and default arguments of forwards and hooks hold what they held: copies of a model share those."""
    held = [(container, container.copy()) for container in _containers(model)]
    try:
        yield
    finally:
        put_back(held)


def _containers(model: nn.Module) -> list[Container]:
    found: dict[int, Container] = {}
    for function in _functions(model):
        for value in _named_in(function):
            if isinstance(value, nn.Module):  # a copy has its own attributes, but a closure keeps the module itself
                found |= {id(own): own for own in (vars(value), *vars(value).values()) if type(own) in PLAIN}
            elif type(value) in PLAIN:
                found[id(value)] = value
    return [container for container in found.values() if len(container) <= LARGEST]


def _functions(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        yield vars(module).get("forward", type(module).forward)
        for hooks in _HOOKS:
            yield from vars(module).get(hooks, {}).values()


def _named_in(function: Any) -> Iterable[Any]:
    """What a function may reach by a name: values of its closure, its default arguments, and globals that it reads."""
    if isinstance(function, functools.partial):
        return [*function.args, *function.keywords.values(), *_named_in(function.func)]
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    if code is None:
        return ()
    cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    known = function.__globals__
    return [*cells, *defaults, *(known[name] for name in code.co_names if name in known)]


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True

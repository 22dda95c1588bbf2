"""What planning leaves of containers outside a model to which its forward and hooks write."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt
from graphopt.frontend.outside import unchanged_outside
from tests.frontend.stepping import Two, generated

SEEN: list[Tensor] = []


class Writing(Two):
    """Its forward writes to a global."""

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        SEEN.append(x)
        return super().forward(x)


def _log(hidden: Tensor) -> Tensor:
    SEEN.append(hidden)
    return hidden


class Logging(Two):
    """A function that a method calls writes to a global."""

    def between(self, hidden: Tensor) -> Tensor:
        return _log(hidden)


def _wrapped(forward: Any) -> Any:
    @functools.wraps(forward)
    def run(self: nn.Module, x: Tensor) -> Tensor:
        return forward(self, x)

    return run


class Decorated(Two):
    """What writes is in a wrapper."""

    @_wrapped
    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        return Two.forward(self, _log(x))


class Broken(Two):
    """Two graphs: what is between them runs when they are recorded."""

    def between(self, hidden: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return hidden


def _global(module: nn.Module, inputs: Any, output: Tensor) -> None:
    SEEN.append(output)


def _with(seen: list[Tensor], module: nn.Module, inputs: Any, output: Tensor) -> None:
    seen.append(output)


def hooked(model: nn.Module, where: str) -> list[Tensor]:
    """What a hook on a layer writes to."""
    seen: list[Tensor] = []
    if where == "global":
        seen = SEEN
        hook: Any = _global
    elif where == "closure":
        hook = lambda module, inputs, output: seen.append(output)  # noqa: E731
    elif where == "default":

        def hook(module: nn.Module, inputs: Any, output: Tensor, into: list[Tensor] = seen) -> None:
            into.append(output)

    elif where == "partial":
        hook = functools.partial(_with, seen)
    else:
        model.seen = seen  # type: ignore[assignment]
        hook = lambda module, inputs, output: model.seen.append(output)  # type: ignore[operator]  # noqa: E731
    model.a.register_forward_hook(hook)  # type: ignore[operator, union-attr]
    return seen


@pytest.mark.parametrize(
    ("kind", "options"), [(Two, {"budget": 0.7}), (Broken, {"passes": []}), (Two, {"passes": [], "verify": True})]
)
@pytest.mark.parametrize("where", ["global", "closure", "default", "partial", "model"])
def test_optimizing_leaves_nothing_where_hooks_write(where: str, kind: type[Two], options: dict[str, Any]) -> None:
    model, x = kind(), generated(0, 4, 5)
    seen = hooked(model, where)
    seen[:] = [torch.ones(())]
    opt = graphopt.optimize(model, (x,), backend="aot_eager", **options)
    assert len(seen) == 1
    for step in range(2):
        seen.clear()
        (opt(x) + seen[-1].square().mean()).backward()
        assert len(seen) == 1, step
    SEEN.clear()


@pytest.mark.parametrize("kind", [Writing, Logging, Decorated])
def test_optimizing_leaves_nothing_in_a_global_that_a_call_writes_to(kind: type[Two]) -> None:
    SEEN.clear()
    graphopt.optimize(kind(), (generated(0, 4, 5),), 0.7, backend="aot_eager")
    assert SEEN == []


def test_a_cell_that_is_not_filled_yet_is_left_alone() -> None:
    model = Two()

    def later() -> None:
        nonlocal unknown
        unknown = 1

    unknown: int

    def hook(*_: Any) -> None:
        later()
        assert unknown

    model.a.register_forward_hook(hook)
    with unchanged_outside(model):
        model(generated(0, 4, 5))
    assert unknown == 1


def test_keys_that_cannot_be_compared_are_put_back() -> None:
    by_tensor: dict[Tensor, int] = {torch.ones(2): 1}
    before = list(by_tensor)
    model = Two()

    def hook(*_: Any) -> None:
        by_tensor.clear()
        by_tensor[torch.ones(2)] = 1

    model.a.register_forward_hook(hook)
    with unchanged_outside(model):
        model(generated(0, 4, 5))
    assert [id(key) for key in by_tensor] == [id(key) for key in before]

"""Host callbacks: tensors that a running graph asks Python for, or passes to Python as soon as they are computed."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable

import torch
from torch import Tensor
from torch.fx.node import has_side_effect

from graphopt.errors import PassError
from graphopt.ops.library import define

Receiver = Callable[..., Tensor | None]
"""Takes the number or name of a site and the tensor that was computed there; `exchange` and `fetch` return what it returns."""

_receivers: dict[int, weakref.WeakMethod[Receiver]] = {}
_numbers = itertools.count()


def new_receiver(method: Receiver) -> int:
    """The number under which graphs reach a method, for as long as its object lives."""
    number = next(_numbers)
    _receivers[number] = weakref.WeakMethod(method)
    weakref.finalize(method.__self__, _receivers.pop, number, None)  # type: ignore[attr-defined]
    return number


def _called(number: int) -> Receiver:
    reference = _receivers.get(number)
    method = None if reference is None else reference()
    if method is None:
        raise PassError("this compiled step belongs to an optimised model that is gone: call optimize() again.")
    return method


def exchange(value: Tensor, receiver: int, site: int, size: int) -> Tensor:
    """Give `value` to a receiver; returns its answer, (size x size) in float32 (float64 for float64)."""
    answer = _called(receiver)(site, value)
    assert answer is not None
    return answer.clone() if answer is value else answer


def gate(weight: Tensor, receiver: int, site: int) -> Tensor:
    """Wait until `weight` may be read: the receiver finishes what is still to be done to it, in place.

    Returns:
        A view of all of it; what reads that runs afterwards.
    """
    _called(receiver)(site, weight)
    return torch.ops.aten.alias(weight)


def fetch(like: Tensor, receiver: int, what: str, size: list[int], dtype: torch.dtype) -> Tensor:
    """Ask a receiver for a tensor, on the device of `like`.

    Args:
        what: the site's name.
        size, dtype: of the tensor.
    """
    answer = _called(receiver)(what, like, size)
    assert answer is not None
    if list(answer.shape) != list(size) or answer.dtype != dtype:
        raise PassError(f"{what} is {tuple(answer.shape)} of {answer.dtype}, where the graph has {tuple(size)} of {dtype}.")
    return answer.detach().clone()  # compilers write to what an operator has returned once they no longer need it


def deliver(value: Tensor, receiver: int, what: str) -> Tensor:
    """Give a receiver a tensor of its own.

    Args:
        what: the site's name.
    Returns:
        Nothing of use, () float32.
    """
    _called(receiver)(what, value.detach().clone())
    return torch.zeros((), dtype=torch.float32, device=value.device)


define(
    "gate(Tensor(a) weight, int receiver, int site) -> Tensor(a)",
    gate,
    lambda weight, receiver, site: torch.ops.aten.alias(weight),
)
define(
    "exchange(Tensor value, int receiver, int site, int size) -> Tensor",
    exchange,
    lambda value, receiver, site, size: value.new_empty(size, size, dtype=torch.promote_types(value.dtype, torch.float32)),
)
define(
    "fetch(Tensor like, int receiver, str what, int[] size, ScalarType dtype) -> Tensor",
    fetch,
    lambda like, receiver, what, size, dtype: like.new_empty(size, dtype=dtype),
)
define(
    "deliver(Tensor value, int receiver, str what) -> Tensor",
    deliver,
    lambda value, receiver, what: value.new_empty((), dtype=torch.float32),
)

for _operator in (torch.ops.graphopt.exchange, torch.ops.graphopt.deliver):
    has_side_effect(_operator.default)  # no compiler may drop it

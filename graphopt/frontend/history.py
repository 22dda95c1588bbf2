"""What a tensor that enters a part of a model was computed from, as autograd knows it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from graphopt.compat.fsdp import passes_gradients_on
from graphopt.graph import reached


def needs_gradient(tensor: Tensor, wanted: Callable[[Tensor], bool]) -> bool:
    """Whether a gradient of `tensor` goes on to a leaf that is wanted.

    Where that cannot be seen, because a Python function is on the way, it does, and so where the tensor itself has a hook.

    Args:
        wanted: of a leaf, whether its gradient is.
    """
    if not tensor.requires_grad:
        return False
    if tensor.retains_grad or tensor._backward_hooks:
        return True
    if tensor.grad_fn is None:
        return wanted(tensor)
    for node in functions_behind([tensor]):
        if isinstance(node, torch.autograd.function.BackwardCFunction) and not passes_gradients_on(node):
            return True  # compiled parts, which are cut themselves, among them
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor) and wanted(leaf):
            return True
    return False


def functions_behind(tensors: Iterable[Tensor]) -> Iterator[Any]:
    """What autograd runs to compute gradients of what `tensors` were computed from, each function once."""
    last = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    return reached(last, lambda node: (source for source, _ in node.next_functions if source is not None))

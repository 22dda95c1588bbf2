"""The forward of an optimised model, as other code looks at it."""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from graphopt.runtime.shared_module import SharedModule


@torch.compiler.disable
def left_out(step: Callable[..., Any], *args: Any) -> Any:
    """`step(*args)`, which is compiled by itself, where torch.compile traces what calls an optimised model."""
    return step(*args)


class Forward:
    """The forward of an optimised model, which shows the signature of the model's own."""

    def __init__(self, opt: SharedModule) -> None:
        self._opt = weakref.ref(opt)
        with contextlib.suppress(TypeError, ValueError):
            self.__signature__ = inspect.signature(opt._model.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """See `forward` of the module."""
        opt = self._opt()
        assert opt is not None
        return type(opt).forward(opt, *args, **kwargs)

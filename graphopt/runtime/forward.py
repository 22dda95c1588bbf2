"""The forward of an optimised model, as other code looks at it."""

from __future__ import annotations

import contextlib
import inspect
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphopt.runtime.module import OptimizedModule


class Forward:
    """The forward of an optimised model, which shows the signature of the model's own."""

    def __init__(self, opt: OptimizedModule) -> None:
        self._opt = weakref.ref(opt)
        with contextlib.suppress(TypeError, ValueError):
            self.__signature__ = inspect.signature(opt._model.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """See `OptimizedModule.forward`."""
        opt = self._opt()
        assert opt is not None
        return type(opt).forward(opt, *args, **kwargs)

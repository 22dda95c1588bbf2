"""Messages that a logger gives once, such as `logger.warning_once` of transformers: no reason to break a graph."""

from __future__ import annotations

import contextlib
import functools
from typing import Any
from unittest import mock

from torch._dynamo.variables import ConstantVariable
from torch._dynamo.variables.misc import LoggingLoggerVariable


def messages_given_once() -> contextlib.AbstractContextManager[Any]:
    """While this is entered, Dynamo has such a message given when it traces the call. By itself it breaks the graph there.

    A method that is cached (`functools.lru_cache`) gives a message once, however often it is called. All others are Dynamo's.
    """
    known = LoggingLoggerVariable.call_method

    def call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        method: Any = getattr(self.value, name, None)
        if not isinstance(getattr(method, "__func__", None), functools._lru_cache_wrapper):
            return known(self, tx, name, args, kwargs)
        told, named = [a.realize() for a in args], {key: a.realize() for key, a in kwargs.items()}
        if not all(a.is_python_constant() for a in [*told, *named.values()]):
            return known(self, tx, name, args, kwargs)
        method(*(a.as_python_constant() for a in told), **{key: a.as_python_constant() for key, a in named.items()})
        return ConstantVariable.create(None)

    return mock.patch.object(LoggingLoggerVariable, "call_method", call_method)

"""An attribute of torch's that is another one for a while."""

from __future__ import annotations

from typing import Any

_NONE = object()


class Replaced:
    """While this is entered, an attribute of a class or module is another.

    `mock.patch.object` does that as well. Every step of a model of several graphs pays for it, and it takes four times as long.
    """

    __slots__ = ("_before", "_name", "_owner", "_value")

    def __init__(self, owner: Any, name: str, value: Any) -> None:
        self._owner, self._name, self._value = owner, name, value
        self._before: Any = _NONE

    def __enter__(self) -> None:
        self._before = vars(self._owner).get(self._name, _NONE)
        setattr(self._owner, self._name, self._value)

    def __exit__(self, *error: object) -> None:
        if self._before is _NONE:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._before)

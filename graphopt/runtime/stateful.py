"""What has a state that a checkpoint keeps."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

from graphopt.errors import InputError
from graphopt.runtime.plain_values import from_plain


class Stateful(Protocol):
    """A part of a checkpoint. Loading has two phases, so that a checkpoint that is refused changes nothing."""

    def snapshot(self) -> Any:
        """All that influences steps to come, as `write_state` takes it."""
        ...

    def prepare(self, snapshot: Any) -> Callable[[], None]:
        """Check `snapshot` and change nothing.

        Returns:
            What puts it in force, and cannot fail.
        Raises:
            InputError: it is not a snapshot of this object; says why, and what to do.
        """
        ...


class Controllers:
    """The user's controllers of a model, for as long as they live."""

    def __init__(self) -> None:
        self._references: list[weakref.ref[Any]] = []

    def add(self, controller: Stateful) -> None:
        """Keep the state of `controller` in checkpoints, too."""
        self._references.append(weakref.ref(controller))

    def _living(self) -> list[Any]:
        """By kind, those of a kind in the order in which they were made."""
        found = [controller for reference in self._references if (controller := reference()) is not None]
        return sorted(found, key=lambda controller: type(controller).__name__)

    def snapshot(self) -> Any:
        """See `Stateful`."""
        return [(type(controller).__name__, controller.snapshot()) for controller in self._living()]

    def prepare(self, snapshot: Any) -> Callable[[], None]:
        """See `Stateful`."""
        saved = from_plain(list[tuple[str, Any]], snapshot, "controllers")
        living = self._living()
        ours, theirs = [type(controller).__name__ for controller in living], [kind for kind, _ in saved]
        if ours != theirs:
            raise InputError(
                f"it was saved with {_listed(theirs)}, and this model has {_listed(ours)}: make the same controllers before "
                "loading."
            )
        steps = [controller.prepare(value) for controller, (_, value) in zip(living, saved, strict=True)]

        def restore() -> None:
            for step in steps:
                step()

        return restore


def _listed(kinds: list[str]) -> str:
    return f"the controllers {', '.join(kinds)}" if kinds else "no controller"

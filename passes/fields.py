"""What techniques require of their fields: else `PassError`, which names the technique, the field and what may be there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Set
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

from graphopt.errors import PassError

if TYPE_CHECKING:
    from graphopt.passes.technique import Technique


def require_one_of(rewrite: Technique, field: str, known: Collection[str]) -> None:
    """A field is one of these texts."""
    _require(rewrite, field, getattr(rewrite, field) in known, f"is unknown. Use one of {', '.join(known)}")


def require_whole(rewrite: Technique, field: str, least: int = 1) -> None:
    """A field is a whole number of at least so many."""
    value = getattr(rewrite, field)
    good = isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least
    _require(rewrite, field, good, f"must be a whole number of at least {least}")


def require_seed(rewrite: Technique, field: str = "seed") -> None:
    """A field is what a generator can be given, and so is the next number."""
    value = getattr(rewrite, field)
    good = isinstance(value, Integral) and -(2**63) <= int(value) < 2**64 - 1
    _require(rewrite, field, good, "must be a whole number of at most 64 bits")


def require_number(rewrite: Technique, field: str, good: Callable[[float], bool], which: str, *values: Any) -> None:
    """A field, or each of the `values` in it, is a number that is `good`; `which` says in words what those are."""
    for value in values or (getattr(rewrite, field),):
        number = isinstance(value, Real) and not isinstance(value, bool)
        _require(rewrite, field, number and good(value), f"must be a number {which}", value)


def require_names(rewrite: Technique, field: str) -> None:
    """A field is None or several names; these become a tuple."""
    value = getattr(rewrite, field)
    if value is not None:
        good = isinstance(value, Iterable) and not isinstance(value, str)
        _require(rewrite, field, good, "is one name: give a tuple of names")
        object.__setattr__(rewrite, field, tuple(sorted(value) if isinstance(value, Set) else value))  # a set has another order


def _require(rewrite: Technique, field: str, good: bool, otherwise: str, *value: Any) -> None:
    if not good:
        raise PassError(f"{rewrite.name}: {field}={(*value, getattr(rewrite, field))[0]!r} {otherwise}.")

"""What an operator's schema says: which arguments it has, which of them it writes to, and whether it draws random numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx


def has_schema(operator: Any) -> bool:
    """Whether this is one of torch's operators, and not a Python function."""
    return hasattr(operator, "_schema")


def is_in_place(operator: Any) -> bool:
    """Whether an operator with a schema writes to any of its arguments."""
    return bool(operator._schema.is_mutable)


def written_arguments(operator: Any) -> list[bool]:
    """For each argument of an operator with a schema, whether it writes to it."""
    return [a.alias_info is not None and a.alias_info.is_write for a in operator._schema.arguments]


def bound_arguments(operator: Any, args: Iterable[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What an operator with a schema is given, by the names of the arguments, in order; defaults included."""
    defaults = {a.name: a.default_value for a in operator._schema.arguments}
    return {**defaults, **dict(zip(defaults, args, strict=False)), **kwargs}


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """What a node gives to its operator, see `bound_arguments`."""
    return bound_arguments(node.target, node.args, node.kwargs)


def draws(node: fx.Node) -> bool:
    """Whether a node draws random numbers from a global stream; attention without dropout does not, although torch says so."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    return arguments_of(node).get("dropout_p") != 0.0


def has_effect(node: fx.Node) -> bool:
    """Whether a node does something beside computing its result: it writes to a tensor, or to the world.

    torch never drops what waits for a collective. Here that has no effect where the collective has none: whatever is dropped is
    dropped on all ranks.
    """
    target: Any = node.target
    if getattr(target, "namespace", "") == "_c10d_functional" and target._opname == "wait_tensor":
        source = node.args[0]
        made = source.target if isinstance(source, fx.Node) and source.op == "call_function" else None
        if getattr(made, "namespace", "") == "_c10d_functional" and not is_in_place(made):
            return False
    return node.is_impure(impure_random=False)

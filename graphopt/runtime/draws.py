"""Which operators draw random numbers."""

from __future__ import annotations

import torch
from torch import fx

from graphopt import compat


def draws(node: fx.Node) -> bool:
    """Whether a node draws random numbers from a global stream; attention without dropout does not, although torch says so."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    defaults = compat.argument_defaults(node.target)
    return {**defaults, **dict(zip(defaults, node.args, strict=False)), **node.kwargs}.get("dropout_p") != 0.0

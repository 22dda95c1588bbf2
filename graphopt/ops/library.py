"""The namespace of graphopt's operators: `torch.ops.graphopt`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

library = torch.library.Library("graphopt", "DEF")


def define(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Register an operator that `run` carries out; `fake` makes results of the same form from fake tensors."""
    name = schema.partition("(")[0]
    library.define(schema)
    library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"graphopt::{name}", fake, lib=library)

"""An operator that says in which order others run."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from graphopt.ops.library import library


def after(value: Tensor, others: Sequence[Tensor]) -> Tensor:
    """A copy of `value`, made once `others` are there.

    A compiler may otherwise begin all chunks before it finishes one, and fuse what it finishes them with.
    """
    return value.clone()


library.define("after(Tensor value, Tensor[] others) -> Tensor")
library.impl("after", after, "CompositeExplicitAutograd")


@torch.library.register_fake("graphopt::after", lib=library)
def _(value: Tensor, others: Sequence[Tensor]) -> Tensor:
    return value.clone()

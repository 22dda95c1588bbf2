"""The batch of a call of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from graphopt.calls import BatchDim, batch_dims_of, batch_size_of, flatten_call
from graphopt.errors import InputError


def batch_of(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], batch_dim: BatchDim
) -> tuple[Sequence[Tensor], Sequence[int | None], int]:
    """The tensors of a call, which dimension of each is the batch, and its size; None and 1 where it has none."""
    inputs = flatten_call(args, kwargs)
    try:
        dims = batch_dims_of(inputs, batch_dim)
        return inputs.tensors, dims, batch_size_of(inputs, dims) or 1
    except InputError:  # the inputs are no batch of samples
        return inputs.tensors, [None] * len(inputs.tensors), 1


def batch_size(args: tuple[Any, ...], kwargs: Mapping[str, Any], batch_dim: BatchDim) -> int:
    """Of a call; 1 where it has none."""
    return batch_of(args, kwargs, batch_dim)[2]

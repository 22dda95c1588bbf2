"""The batch of a call of a model."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from graphopt.calls import BatchDim, batch_dims_of, batch_size_of, flatten_call
from graphopt.compat.dynamo import symbolic_dims
from graphopt.errors import InputError


def batch_size(args: tuple[Any, ...], kwargs: Mapping[str, Any], batch_dim: BatchDim) -> int:
    """Of a call; 1 where it has none."""
    inputs = flatten_call(args, kwargs)
    try:
        return batch_size_of(inputs, batch_dims_of(inputs, batch_dim)) or 1
    except InputError:  # the inputs are no batch of samples
        return 1


def batch_dims(args: tuple[Any, ...], kwargs: dict[str, Any], batch_dim: BatchDim) -> dict[int, int | None]:
    """Which dimension of each tensor of a call is the batch, by the tensor's `id`."""
    inputs = flatten_call(args, kwargs)
    try:
        dims = batch_dims_of(inputs, batch_dim)
        batch_size_of(inputs, dims)
    except InputError:  # no batch of samples
        return {}
    return {id(tensor): dim for tensor, dim in zip(inputs.tensors, dims, strict=True)}


def symbolic_batch(args: tuple[Any, ...], kwargs: dict[str, Any], batch_dim: BatchDim) -> contextlib.AbstractContextManager[None]:
    """What is compiled inside is traced for any number of samples in this call: so it is known which rows are samples."""
    dims, tensors = batch_dims(args, kwargs, batch_dim), flatten_call(args, kwargs).tensors
    return symbolic_dims(tensors, [dims.get(id(tensor)) for tensor in tensors])

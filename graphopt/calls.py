"""A call of a model as flat tensors and constants, and the batch dimension of each tensor."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, NamedTuple

from torch import Tensor

from graphopt.compat import pytree
from graphopt.errors import BatchError, InputError

BatchDim = int | None | Mapping[str | int, int | None]
"""Which dimension of each input is the batch: one number for all, or per input name (or position); None: no batch."""


@dataclass(frozen=True)
class FlatInputs:
    """A call's arguments, flattened.

    Attributes:
        tensors: the tensor leaves.
        constants: the other leaves, with None in the place of tensors.
        positions: where the tensors stand among all leaves.
        names: one readable name per tensor, for messages.
        spec: pytree structure of `(args, kwargs)`.
    """

    tensors: tuple[Tensor, ...]
    constants: tuple[Any, ...]
    positions: tuple[int, ...]
    names: tuple[str, ...]
    spec: Any


class Call(NamedTuple):
    """Arguments of a call `model(*args, **kwargs)`."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def kind_of(batch: Any) -> Hashable:
    """What tells batches that fail from others: structure, shapes and types of tensors, types of numbers, other values."""
    leaves, spec = pytree.tree_flatten(batch)
    return str(spec), tuple(map(_kind_of_leaf, leaves))


def _kind_of_leaf(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        return leaf.dtype, leaf.device, leaf.shape
    return type(leaf).__name__ if type(leaf) in (int, float) else str(leaf)


def as_call(example_inputs: Any, batch_dim: BatchDim = 0) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of a call `model(...)` from what the user passed.

    Args:
        example_inputs: a tensor, a tuple or list of arguments, or a mapping of them by name.
        batch_dim: see `graphopt.optimize`; names in it are checked.
    Raises:
        InputError: not a tensor, tuple, list or mapping; or `batch_dim` names an input that is not there, or no dimension.
    """
    args, kwargs = _as_call(example_inputs)
    for dim in batch_dim.values() if isinstance(batch_dim, Mapping) else (batch_dim,):
        if dim is not None and not isinstance(dim, Integral):
            raise InputError(
                f"batch_dim={batch_dim!r}: {dim!r} is no dimension. Give a whole number, None for inputs without a batch, or one "
                "of these by the name of each input."
            )
    if isinstance(batch_dim, Mapping):
        known = [*range(len(args)), *kwargs, *flatten_call(args, kwargs).names]
        for name in batch_dim:
            if name not in known:
                listed = ", ".join(repr(k) for k in dict.fromkeys(known) if not str(k).isdigit() or isinstance(k, int))
                raise InputError(f"batch_dim names {name!r}, which is no input of the example; its inputs are {listed}.")
    return args, kwargs


def _as_call(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example_inputs, Call):
        return example_inputs.args, dict(example_inputs.kwargs)
    if isinstance(example_inputs, Tensor):
        return (example_inputs,), {}
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, (tuple, list)):
        return tuple(example_inputs), {}
    raise InputError(
        f"example_inputs must be a tensor, a tuple or a dict of tensors, not {type(example_inputs).__name__}. "
        "Pass what you would pass to the model: a tuple for model(*inputs), a dict for model(**inputs)."
    )


def flatten_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> FlatInputs:
    """Split a call's arguments into tensors and constants."""
    paths, spec = pytree.tree_flatten_with_path((args, dict(kwargs)))
    positions = tuple(i for i, (_, leaf) in enumerate(paths) if isinstance(leaf, Tensor))
    return FlatInputs(
        tensors=tuple(paths[i][1] for i in positions),
        constants=tuple(None if isinstance(leaf, Tensor) else leaf for _, leaf in paths),
        positions=positions,
        names=tuple(".".join(str(getattr(k, "key", getattr(k, "idx", k))) for k in paths[i][0][1:]) for i in positions),
        spec=spec,
    )


def copy_tensors(tree: Any) -> Any:
    """The same structure with a copy of every tensor; one tensor in two places stays one."""
    copies: dict[int, Tensor] = {}

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in copies:
            copies[id(leaf)] = leaf.detach().clone().requires_grad_(leaf.requires_grad)
        return copies[id(leaf)]

    return pytree.tree_map(copied, tree)


def batch_dims_of(inputs: FlatInputs, batch_dim: BatchDim) -> tuple[int | None, ...]:
    """The batch dimension of each flat tensor; None for scalars and inputs declared to have no batch.

    Raises:
        InputError: a declared dimension does not exist.
    """
    dims: list[int | None] = []
    for name, tensor in zip(inputs.names, inputs.tensors, strict=True):
        dim = _named_dim(name, batch_dim) if isinstance(batch_dim, Mapping) else batch_dim
        if dim is None or tensor.dim() == 0:
            dims.append(None)
            continue
        if not -tensor.dim() <= dim < tensor.dim():
            raise InputError(f"input {name!r} has shape {tuple(tensor.shape)} and no batch dimension {dim}.")
        dims.append(dim % tensor.dim())
    return tuple(dims)


def _named_dim(name: str, batch_dim: Mapping[str | int, int | None]) -> int | None:
    """That of a tensor, or of the argument that holds it: the longest part of its name that is there."""
    parts = name.split(".")
    keys = (".".join(parts[:i]) for i in range(len(parts), 0, -1))
    return next((batch_dim[k] for key in keys for k in (key, int(key) if key.isdigit() else key) if k in batch_dim), 0)


def batch_size_of(inputs: FlatInputs, dims: Sequence[int | None]) -> int | None:
    """The common batch size; None when no input has a batch.

    Raises:
        BatchError: the batch dimensions disagree.
    """
    sizes = {n: int(t.shape[d]) for n, t, d in zip(inputs.names, inputs.tensors, dims, strict=True) if d is not None}
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name}: {size}" for name, size in sizes.items())
        raise BatchError(
            f"the batch dimensions of the inputs disagree ({listed}). Give every input the same batch, or name the "
            "dimension per input, e.g. batch_dim={'position_ids': None} for one without a batch."
        )
    return next(iter(sizes.values()), None)

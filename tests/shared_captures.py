"""Traces of models that are alike are made once per process: tracing takes most of the suite's time.

Alike are models that pickle to the same bytes: the same Python state and buffers. Values of parameters and inputs do not count,
as no trace depends on them. A model that cannot be pickled, or has methods of its own, is traced; what is patched into a class is
not seen. Tests of tracing itself do without (`tests/conftest.py`).
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import pickle
import types
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import graphopt.capture
from graphopt import compat
from graphopt.graph import TrainingGraph

LIMIT = 48
"""Graphs that are kept, those used last."""

_trace = graphopt.capture._trace
_known: OrderedDict[Hashable, TrainingGraph] = OrderedDict()


@contextlib.contextmanager
def shared_captures() -> Iterator[None]:
    """Have `graphopt.capture` look up a trace before it makes one."""
    with mock.patch("graphopt.capture._trace", _shared_trace):
        yield


def _shared_trace(model: nn.Module, *arguments: Any) -> TrainingGraph:
    key = _fingerprint(model, arguments)
    if key is None:
        return _trace(model, *arguments)
    if key not in _known:
        _known[key] = _trace(model, *arguments)
        while len(_known) > LIMIT:
            _known.popitem(last=False)
    _known.move_to_end(key)
    return _known[key]


def _fingerprint(model: nn.Module, arguments: tuple[Any, ...]) -> str | None:
    """Of all that a trace depends on; None where that is unknown."""
    inputs, tensors, *rest = arguments
    autocast = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    deterministic = torch.are_deterministic_algorithms_enabled()
    surroundings = torch.get_default_dtype(), deterministic, torch.is_grad_enabled(), autocast
    file = io.BytesIO()
    try:
        _Pickler(file, (*inputs.tensors, *tensors)).dump((surroundings, model, inputs, tensors, rest))
    except (pickle.PicklingError, AttributeError, TypeError, RuntimeError):  # among them RecursionError, NotImplementedError
        return None
    return hashlib.sha256(file.getvalue()).hexdigest()


class _Pickler(pickle.Pickler):
    """Writes parameters and `inputs` by what describes them, and other tensors by value."""

    def __init__(self, file: io.BytesIO, inputs: Iterable[Tensor]) -> None:
        super().__init__(file)
        self._inputs = {id(t) for t in inputs}
        self._storages: dict[int, int] = {}
        self._tensors: dict[int, int] = {}

    def reducer_override(self, value: object) -> Any:
        if isinstance(value, types.MethodType):
            raise pickle.PicklingError("a method is pickled by its name alone")
        return NotImplemented

    def persistent_id(self, value: object) -> Any:
        if not isinstance(value, Tensor):
            return None
        if compat.fake_mode_of([value]) is not None or value.is_meta:
            raise pickle.PicklingError("a tensor of another trace")
        place = self._storages.setdefault(value.untyped_storage().data_ptr(), len(self._storages))
        same = self._tensors.setdefault(id(value), len(self._tensors))
        described = (
            type(value).__name__, same, place, value.storage_offset(), tuple(value.shape), tuple(value.stride()),
            str(value.dtype), str(value.device), value.requires_grad,
        )  # fmt: skip
        if isinstance(value, nn.Parameter) or id(value) in self._inputs:
            return described
        return (*described, value.tolist())

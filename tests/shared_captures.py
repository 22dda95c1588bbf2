"""Traces of models that are alike are made once per process: tracing takes most of the suite's time.

Alike are models that pickle to the same bytes: the same Python state and buffers. Values of parameters and inputs do not count,
as no trace depends on them. Functions and classes that a test defines are compared by their code, closures and the data that they
read of their module. A model that cannot be pickled all the same, or has methods of its own, is traced; what is patched into a
class is not seen. Tests of tracing itself do without (`tests/conftest.py`).
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import marshal
import pickle
import types
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import graphopt.capture
from graphopt import compat
from graphopt.graph import TrainingGraph

LIMIT = 200
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
    except (
        pickle.PicklingError,
        AttributeError,
        TypeError,
        ValueError,
        RuntimeError,
    ):  # among them RecursionError, NotImplementedError
        return None
    return hashlib.sha256(file.getvalue()).hexdigest()


def _stand_in(*_: Any) -> None:
    """What a function or class of a test is pickled as a call of; nothing is ever unpickled."""


def _data_read(code: types.CodeType, scope: dict[str, Any]) -> dict[str, Any]:
    """What a function reads of its module that is none of modules, functions and classes, by name."""
    found = {name: scope[name] for name in code.co_names if name in scope}
    data = {k: v for k, v in found.items() if not isinstance(v, (types.ModuleType, types.FunctionType, type))}
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            data |= _data_read(inner, scope)
    return data


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
        if isinstance(value, types.FunctionType) and ("<locals>" in value.__qualname__ or value.__name__ == "<lambda>"):
            closure = [cell.cell_contents for cell in value.__closure__ or ()]
            state = closure, value.__defaults__, value.__kwdefaults__, _data_read(value.__code__, value.__globals__)
            return _stand_in, (value.__module__, marshal.dumps(value.__code__)), state
        if isinstance(value, type) and "<locals>" in value.__qualname__:
            own = {k: v for k, v in vars(value).items() if k not in ("__dict__", "__weakref__")}
            return _stand_in, (value.__module__, value.__qualname__, *value.__bases__), own
        return NotImplemented

    def persistent_id(self, value: object) -> Any:
        if not isinstance(value, Tensor):
            return None
        if isinstance(value, DTensor):
            raise pickle.PicklingError("how a weight is divided is not in what describes it")
        fake = compat.fake_mode_of([value]) is not None
        place = self._storages.setdefault(value.untyped_storage()._cdata, len(self._storages))
        same = self._tensors.setdefault(id(value), len(self._tensors))
        described = (
            type(value).__name__, same, place, value.storage_offset(), tuple(value.shape), tuple(value.stride()),
            str(value.dtype), str(value.device), value.requires_grad, fake,
        )  # fmt: skip
        if isinstance(value, nn.Parameter) or id(value) in self._inputs or fake:  # which has no values
            return described
        return (*described, value.tolist())

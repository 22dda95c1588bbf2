"""torch's own test databases: every operator and every module with inputs that it takes.

They are no public API and may change with each release; `graphopt bench operators` and its tests alone look at them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""What an operator or a module is tried with: the first that it has."""


@dataclass(frozen=True)
class Call:
    """Something to call, and with what.

    Attributes:
        function: an operator, or a new module.
        args, kwargs: tensors among them that can be trained require a gradient.
        finish: applied to the results, so that they are well defined; None: they are.
        dtype: of the tensors.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    finish: Callable[[Any], Any] | None
    dtype: torch.dtype


@dataclass(frozen=True)
class Database:
    """What can be called, by name.

    Attributes:
        entries: those with a backward on the CPU.
        dtypes: that an entry has.
        samples: inputs of an entry, of a dtype.
        call: an entry with one of these.
    """

    entries: Mapping[str, Any]
    dtypes: Callable[[Any], Iterable[torch.dtype]]
    samples: Callable[[Any, torch.dtype], Iterable[Any]]
    call: Callable[[Any, Any, torch.dtype], Call]

    def names(self) -> list[str]:
        """Of all that take real numbers."""
        return [name for name in self.entries if self._dtype(name) is not None]

    def count(self, name: str, most: int) -> int:
        """How many inputs there are for an entry, up to `most`."""
        return sum(1 for _ in itertools.islice(self._samples(name)[0], most))

    def made(self, name: str, number: int) -> Call:
        """An entry with the input of a number."""
        samples, dtype = self._samples(name)
        return self.call(self.entries[name], next(itertools.islice(samples, number, None)), dtype)

    def _dtype(self, name: str) -> torch.dtype | None:
        known = self.dtypes(self.entries[name])
        return next((dtype for dtype in DTYPES if dtype in known), None)

    def _samples(self, name: str) -> tuple[Iterable[Any], torch.dtype]:
        dtype = self._dtype(name)
        assert dtype is not None
        return self.samples(self.entries[name], dtype), dtype


@cache
def databases() -> dict[str, Database]:
    """The two, by what they hold."""
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.common_modules import module_db

    return {
        "module": Database(
            {module.name: module for module in module_db},
            lambda module: module.supported_dtypes("cpu"),
            lambda module, dtype: module.module_inputs_func(module, device="cpu", dtype=dtype, requires_grad=True, training=True),
            _called_module,
        ),
        "operator": Database(
            {op.full_name: op for op in op_db if op.supports_autograd},
            lambda op: op.supported_backward_dtypes("cpu"),
            lambda op, dtype: op.sample_inputs("cpu", dtype, requires_grad=True),
            lambda op, s, dtype: Call(op.op, (s.input, *s.args), dict(s.kwargs), s.output_process_fn_grad, dtype),
        ),
    }


def _called_module(entry: Any, sample: Any, dtype: torch.dtype) -> Call:
    """A new module in training mode; a lazy one knows its sizes already."""
    made, given = sample.constructor_input, sample.forward_input
    module: nn.Module = entry.module_cls(*made.args, **made.kwargs).to(dtype).train()
    if entry.is_lazy:
        with torch.no_grad():
            module(*given.args, **given.kwargs)
    return Call(module, tuple(given.args), dict(given.kwargs), None, dtype)

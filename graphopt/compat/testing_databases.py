"""torch's own test databases: every operator and every module with inputs that it takes.

They are no public API and may change with each release; `graphopt bench operators` and its tests alone look at them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
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


@cache
def _operators() -> dict[str, Any]:
    from torch.testing._internal.common_methods_invocations import op_db

    return {op.full_name: op for op in op_db if op.supports_autograd}


@cache
def _modules() -> dict[str, Any]:
    from torch.testing._internal.common_modules import module_db

    return {module.name: module for module in module_db}


def _dtype_of_operator(name: str) -> torch.dtype | None:
    known = _operators()[name].supported_backward_dtypes("cpu")
    return next((dtype for dtype in DTYPES if dtype in known), None)


def _dtype_of_module(name: str) -> torch.dtype | None:
    return next((dtype for dtype in DTYPES if dtype in _modules()[name].supported_dtypes("cpu")), None)


def operator_names() -> list[str]:
    """Operators with a backward on the CPU for a real type; those of complex numbers alone are left out."""
    return [name for name in _operators() if _dtype_of_operator(name) is not None]


def module_names() -> list[str]:
    """All modules of real numbers."""
    return [name for name in _modules() if _dtype_of_module(name) is not None]


def _samples_of_operator(name: str) -> Any:
    return _operators()[name].sample_inputs("cpu", _dtype_of_operator(name), requires_grad=True)


def _samples_of_module(name: str) -> Any:
    module, dtype = _modules()[name], _dtype_of_module(name)
    return module.module_inputs_func(module, device="cpu", dtype=dtype, requires_grad=True, training=True)


def operator_samples(name: str, most: int) -> int:
    """How many inputs there are for an operator, up to `most`."""
    return sum(1 for _ in itertools.islice(_samples_of_operator(name), most))


def module_samples(name: str, most: int) -> int:
    """How many inputs there are for a module, up to `most`."""
    return sum(1 for sample in itertools.islice(_samples_of_module(name), most) if sample.forward_input is not None)


def operator_call(name: str, number: int) -> Call:
    """An operator with the input of a number."""
    dtype = _dtype_of_operator(name)
    assert dtype is not None
    operator = _operators()[name]
    sample = next(itertools.islice(_samples_of_operator(name), number, None))
    return Call(operator.op, (sample.input, *sample.args), dict(sample.kwargs), sample.output_process_fn_grad, dtype)


def module_call(name: str, number: int) -> Call:
    """A new module in training mode with the input of a number; a lazy one knows its sizes already."""
    dtype = _dtype_of_module(name)
    assert dtype is not None
    sample = next(itertools.islice(_samples_of_module(name), number, None))
    made, given = sample.constructor_input, sample.forward_input
    module: nn.Module = _modules()[name].module_cls(*made.args, **made.kwargs).to(dtype).train()
    if _modules()[name].is_lazy:
        with torch.no_grad():
            module(*given.args, **given.kwargs)
    return Call(module, tuple(given.args), dict(given.kwargs), None, dtype)

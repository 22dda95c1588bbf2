"""Fake tensors and symbolic sizes: shapes without memory, known integer values, tracing a graph again with them."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import sympy
import torch
from torch import Tensor, fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from graphopt.compat.fsdp import is_sharded, without_hooks
from graphopt.compat.graph_modules import lazy_graph_modules
from graphopt.compat.schemas import bound_arguments, has_schema, written_arguments


def is_traced(tensor: Tensor) -> bool:
    """Whether what is computed of a tensor now is being traced."""
    return torch._guards.detect_fake_mode(tensor) is not None


def output_list(module: fx.GraphModule) -> list[Any]:
    """What a graph returns, one entry per output."""
    results: Any = module.graph.output_node().args[0]
    return list(results)


no_autocast = torch._C._DisableAutocast
"""Operators run as they are inside, whatever autocast the caller is in."""


def new_fake_mode() -> Any:
    """A mode in which tensors have shapes and dtypes but no memory; sizes that depend on data stay an error."""
    shapes = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)  # loops ask for one
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=shapes, static_shapes=True)


def failures_raised_alone() -> contextlib.AbstractContextManager[Any]:
    """An operator that fails on fake tensors raises its error, which torch's log does not show as well. One thread at a time."""
    return mock.patch.object(fake_tensor.log, "disabled", True)


def fake_mode_of(tensors: Sequence[Tensor]) -> Any | None:
    """The mode of the first fake tensor among `tensors`, or None."""
    return next((t.fake_mode for t in tensors if isinstance(t, FakeTensor)), None)


def fake_like(tensor: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A fake tensor of another shape and type, on the same device and of the same mode."""
    with fake_mode_of([tensor]) or contextlib.nullcontext():
        return torch.empty(tuple(shape), dtype=dtype, device=tensor.device)


def without_storage(model: nn.Module, tensors: Sequence[Tensor]) -> tuple[nn.Module, Sequence[Tensor]]:
    """Meta tensors trace without a backward: replace them by fake ones (shapes without memory) on the CPU.

    Of a sharded model the copy is whole, and without the hooks that gather its weights.
    """
    held = [*model.parameters(), *model.buffers(), *tensors]
    if fake_mode_of(held) is None and not any(t.is_meta for t in held) and not is_sharded(model):
        return model, tensors
    return fake_copy(model, tensors)


def fake_copy(model: nn.Module, tensors: Sequence[Tensor]) -> tuple[nn.Module, list[Tensor]]:
    """A copy of the model and its inputs on fake tensors, of one fake mode; meta tensors become fake CPU tensors."""
    held = [*model.parameters(), *model.buffers()]
    mode = fake_mode_of([*held, *tensors]) or new_fake_mode()
    memo: dict[int, Any] = {}
    with mode:

        def fake(t: Tensor) -> Tensor:
            if fake_mode_of([t]) is not None:
                return t
            device = "cpu" if t.is_meta else t.device
            return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device)

        for tensor in held:
            replacement = fake(tensor)
            if isinstance(tensor, nn.Parameter) and not isinstance(replacement, nn.Parameter):
                replacement = nn.Parameter(replacement, requires_grad=tensor.requires_grad)
            memo[id(tensor)] = replacement
        for module in model.modules():
            for name, value in vars(module).items():
                if isinstance(value, Tensor) and name not in ("_parameters", "_buffers"):
                    memo[id(value)] = fake(value)
        inputs = [fake(t).requires_grad_(t.requires_grad) for t in tensors]
    return (without_hooks if is_sharded(model) else copy.deepcopy)(model, memo), inputs


_KNOWN_VALUES_LIMIT = 2**24
"""Elements up to which a fake tensor of integers or booleans keeps its values."""


def known_integer_values() -> contextlib.AbstractContextManager[Any]:
    """Fake tensors of integers and booleans that come from `fake_with_values` keep their values through operators."""
    return mock.patch.object(fake_tensor, "CONSTANT_NUMEL_LIMIT", _KNOWN_VALUES_LIMIT)


def fake_with_values(fake: Tensor, real: Tensor) -> Tensor:
    """`fake`, knowing the values of `real` if it holds integers or booleans; see `known_integer_values`."""
    if _may_be_known(real) and not real.is_meta and fake_mode_of([real]) is None:
        _remember(fake, real.detach().to("cpu", copy=True))
    return fake


def call_knowing_values(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call an operator on fake tensors; what it computes from known values alone is known, on whatever device it is.

    Values are kept on the CPU. torch computes with them there, and says that the result is there, too: it is moved to where
    the operator would have it. What a factory such as `arange` makes is known from the start.
    """
    given = [t for t in torch.utils._pytree.tree_leaves((args, dict(kwargs))) if isinstance(t, FakeTensor)]
    if not given:
        result = func(*args, **kwargs)
        if func in _FACTORIES and isinstance(result, FakeTensor) and result.constant is None and _may_be_known(result):
            with unset_fake_temporarily():
                _remember(result, func(*args, **{**kwargs, "device": "cpu"}))
        return result
    device = kwargs.get("device") or next((t for t in given if t.dim()), given[0]).device
    if torch.device(device).type == "cpu":
        return func(*args, **kwargs)
    if any(t.constant is None for t in given):  # what it is made of must not compute with values, which are elsewhere
        with _hidden_values([t for t in given if t.constant is not None], _written(func, args, kwargs)):
            return func(*args, **kwargs)
    result = func(*args, **({**kwargs, "device": "cpu"} if "device" in kwargs else kwargs))

    def moved(found: Any) -> Any:
        if not isinstance(found, FakeTensor) or found.constant is None or found.device == torch.device(device):
            return found
        with found.fake_mode:
            there = torch.empty_strided(found.shape, found.stride(), dtype=found.dtype, device=device)
        return _remember(there, found.constant)

    return torch.utils._pytree.tree_map(moved, result)


@contextlib.contextmanager
def _hidden_values(tensors: Sequence[Any], written: Sequence[Any]) -> Iterator[None]:
    """Nothing is known of these tensors meanwhile, nor later of those that are written."""
    known = [t.constant for t in tensors]
    for tensor in tensors:
        tensor.constant = None
    try:
        yield
    finally:
        for tensor, values in zip(tensors, known, strict=True):
            tensor.constant = values
            if any(tensor is changed for changed in written):
                tensor.fake_mode.fake_tensor_converter.invalidate_constant_aliases(values)


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    if not has_schema(func):
        return []
    given = bound_arguments(func, args, kwargs).values()
    return [value for value, written in zip(given, written_arguments(func), strict=True) if written]


def _may_be_known(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel() <= _KNOWN_VALUES_LIMIT


def _remember(fake: Any, values: Tensor) -> Any:
    """Give a fake tensor values, until something that is not known is written to it."""
    fake.constant = values
    fake.fake_mode.fake_tensor_converter.add_constant_storage_mapping(fake)
    return fake


_FACTORIES = frozenset(
    {
        torch.ops.aten.arange.default,
        torch.ops.aten.arange.start,
        torch.ops.aten.arange.start_step,
        torch.ops.aten.full.default,
        torch.ops.aten.ones.default,
        torch.ops.aten.zeros.default,
    }
)


def retrace(module: fx.GraphModule, args: Sequence[Tensor], fake_mode: Any, decompose: bool) -> fx.GraphModule:
    """Trace `module` again for the concrete shapes of `args` (fake tensors), keeping node metadata.

    Args:
        decompose: also rewrite operators to those that Inductor lowers.
    """
    import torch._inductor.lowering  # decompositions look things up there without importing it
    from torch._inductor.decomposition import select_decomp_table

    table = select_decomp_table() if decompose else {}

    def run(*flat: Tensor) -> Any:
        return fx.Interpreter(module).run(*flat)

    with (
        fake_mode,
        torch.no_grad(),
        no_autocast(),
        enable_python_dispatcher(),
        fx.traceback.preserve_node_meta(),
        unsynced_tracing_context(fake_mode),
        lazy_graph_modules(),
    ):
        return fx.experimental.proxy_tensor.make_fx(run, decomposition_table=table)(*args)


@contextlib.contextmanager
def unsynced_tracing_context(fake_mode: Any) -> Iterator[Any]:
    """A tracing context of its own for `fake_mode`, in which operators and Inductor look for theirs."""
    context = torch._guards.TracingContext(fake_mode)
    with torch._guards.tracing(context):
        yield context


def expression(value: Any) -> sympy.Expr:
    """The expression of an int or a symbolic int, with every replacement known to its shape environment; others as they are."""
    if isinstance(value, torch.SymInt):
        node = value.node
        return node.shape_env.replace(node.expr) if node.shape_env is not None else node.expr
    return value if isinstance(value, sympy.Expr) else sympy.Integer(value)


def run_on_metadata(target: Any, args: Any, kwargs: Mapping[str, Any], fake_mode: Any = None) -> Any:
    """What an operator gives for the fake tensors that its arguments' nodes record; `fake_mode` is for those that take none."""
    values = fx.map_arg((args, dict(kwargs)), lambda node: node.meta["val"])
    tensors = [v for v in torch.utils._pytree.tree_leaves(values) if isinstance(v, Tensor)]
    with fake_mode_of(tensors) or fake_mode or contextlib.nullcontext(), torch.no_grad(), no_autocast():
        return target(*values[0], **values[1])

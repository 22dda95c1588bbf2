"""Capture: a model and example inputs become a `TrainingGraph` whose shapes are formulas of the batch size.

Dynamo traces the user's Python to one graph, AOTAutograd traces forward and backward of it to one joint ATen graph. The
batch dimension of every input is a symbol; a model whose code fixes the batch falls back to a static graph and says so.
Nothing of the caller's is changed: the batch is marked on copies of the inputs, training flags and RNG are restored.
"""

from __future__ import annotations

import contextlib
import copy
import random
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy
import sympy
import torch
from torch import Tensor, fx, nn

from graphopt import compat
from graphopt.calls import BatchDim, FlatInputs, batch_dims_of, batch_size_of, flatten_call
from graphopt.compat import pytree
from graphopt.compat.distributed import local_part
from graphopt.errors import CaptureError, InputError
from graphopt.graph import Parameter, TrainingGraph, merge_tied_weights
from graphopt.transforms.canonicalize import normalise

_PREFIX = "model."

TRACING = threading.RLock()
"""torch traces in one thread at a time: it patches modules while it does."""


class _Flat(nn.Module):
    """`model` as a function of flat tensors: what Dynamo traces."""

    def __init__(self, model: nn.Module, inputs: FlatInputs) -> None:
        super().__init__()
        self.model = model
        self._constants = inputs.constants
        self._positions = inputs.positions
        self._spec = inputs.spec

    def forward(self, *tensors: Tensor) -> Any:
        """The model's output for these tensor leaves."""
        leaves = list(self._constants)
        for position, tensor in zip(self._positions, tensors, strict=True):
            leaves[position] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        return self.model(*args, **kwargs)


def capture(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    batch_dim: BatchDim = 0,
    symbolic: bool = True,
) -> TrainingGraph:
    """Trace one training step's forward and backward of `model(*args, **kwargs)`.

    Args:
        model: in the mode (train or eval, per module) that is to be captured; real, fake or meta tensors.
        args, kwargs: example arguments; tensors of any batch size.
        batch_dim: see `BatchDim`.
        symbolic: for any batch size, as far as the model allows; else for that of the example alone, in a third of the time.
    Returns:
        The joint graph, with `batch_size` that of the example.
    Raises:
        InputError: inputs that do not fit together.
        CaptureError: no trainable parameter, no differentiable output, or Python that cannot be one graph.
    """
    compat.require_supported_torch()
    inputs = flatten_call(args, kwargs or {})
    dims = batch_dims_of(inputs, batch_dim)
    batch_size = batch_size_of(inputs, dims)
    if not any(p.requires_grad for p in model.parameters()):
        raise CaptureError(
            "the model has no trainable parameters: set requires_grad=True on those to be trained before optimize()."
        )
    with TRACING:
        model, tensors = compat.without_storage(model, inputs.tensors)
        with unchanged_rng(tensors), no_generation_cache(model), compat.no_new_globals(_Flat.forward):
            if batch_size is None:
                return _trace(model, inputs, tensors, dims, 1, "no input has a batch dimension")
            if batch_size == 0:
                raise InputError("the batch is empty: pass at least one sample.")
            if not symbolic:
                return _trace(model, inputs, tensors, dims, batch_size, f"a batch of {batch_size}")
            reason = ""
            for repeats in _repeats(model, tensors, dims, batch_size):
                try:
                    return _trace(model, inputs, tiled(tensors, dims, repeats), dims, batch_size, None)
                except compat.BatchSpecialised as error:
                    reason = reason or "the model's code fixes the batch size: " + " ".join(str(error).split())[:300]
            return _trace(model, inputs, tensors, dims, batch_size, reason)


def capture_to_run(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], batch_dim: BatchDim = 0, symbolic: bool = True
) -> TrainingGraph:
    """`capture`, but always a graph that can run the batch at hand.

    torch traces a symbolic batch as "2 or more", because a size of 1 broadcasts: a batch of 1 gets a static graph.
    """
    graph = capture(model, args, kwargs, batch_dim, symbolic)
    batch_size = batch_size_of(flatten_call(args, kwargs), graph.batch_dims)
    return graph if batch_size is None or graph.accepts(batch_size) else capture(model, args, kwargs, batch_dim, symbolic=False)


def _trace(
    model: nn.Module,
    inputs: FlatInputs,
    tensors: Sequence[Tensor],
    dims: Sequence[int | None],
    batch_size: int,
    static_reason: str | None,
) -> TrainingGraph:
    """One attempt: a symbolic batch if `static_reason` is None, else a static graph."""
    tensors = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
    if static_reason is None:
        for tensor, dim in zip(tensors, dims, strict=True):
            if dim is not None:
                compat.mark_batch_symbolic(tensor, dim)
    call = _Flat(model, inputs)
    traced = compat.dynamo_capture(call, tensors)
    with contextlib.ExitStack() as stack:
        try:
            export = compat.export_joint(stack, traced, tensors)
        except CaptureError:
            raise
        except (RuntimeError, TypeError) as error:
            text = str(error)
            if "does not require grad" in text or ("requires_grad" in text and "output" in text):
                raise CaptureError(_NO_GRADIENT) from error
            if "register a pytree" in text or "unhashable type" in text:  # the latter in torch 2.11
                kind = text.split("'")[1] if "'" in text else "object"
                raise CaptureError(
                    f"the model returns a {kind}, in which torch finds no tensors. Return a tensor, tuple, dict or a "
                    "ModelOutput, or register the class with torch.export.register_dataclass."
                ) from error
            raise CaptureError(
                f"the backward of the model cannot be traced; check that it trains in eager mode. {text}"
            ) from error
    if not any(desc.kind == "tangent" for desc in export.inputs):
        raise CaptureError(_NO_GRADIENT)
    _require_known_sizes(export)
    export = _without_prefix(export)
    symbols: frozenset[sympy.Symbol] = frozenset()
    if static_reason is None:
        symbols = _batch_symbols(export, dims)
        if not symbols:
            raise compat.BatchSpecialised("some inputs' batch became a constant")
    export.module.graph.set_codegen(fx.graph.CodeGen())  # flat inputs and outputs, not the exporter's nesting
    graph = TrainingGraph(
        module=export.module,
        inputs=export.inputs,
        outputs=export.outputs,
        parameters=_parameters(model),
        out_spec=export.out_spec,
        symbols=symbols,
        batch_size=batch_size,
        batch_dims=tuple(dims),
        static_reason=static_reason or "",
        guards=tuple(g for g in export.guards if g.free_symbols and g.free_symbols <= symbols),
        minimum_batch=max((int(export.ranges[symbol].lower) for symbol in symbols), default=1),
        hands_out=bool(traced.meta["handed_out"]),
    )
    merge_tied_weights(graph)
    if static_reason is not None:  # inputs that nothing reads have symbols all the same
        graph.sizes = _sizes(graph, tensors)
    normalise(graph)
    return graph


def _sizes(graph: TrainingGraph, tensors: Sequence[Tensor]) -> dict[sympy.Symbol, int]:
    """The sizes of the example by symbol."""
    found: dict[sympy.Symbol, int] = {}
    for desc, node in zip(graph.inputs, graph.placeholders, strict=True):
        if desc.kind == "input":
            sizes = zip(node.meta["val"].shape, tensors[desc.target].shape, strict=True)
            found |= {s: own for size, own in sizes if (s := compat.expression(size)).is_Symbol}
    return found


_NO_GRADIENT = (
    "no output of the model requires a gradient, so there is no backward to optimise. Pass labels so that a loss is "
    "returned, and check that forward() does not run under torch.no_grad() or detach its result."
)


def _batch_symbols(export: compat.JointExport, dims: Sequence[int | None]) -> frozenset[sympy.Symbol]:
    """The symbols of the inputs' batch dimensions; empty if one of them was fixed.

    Inputs that the model never combines keep a symbol each; all stand for the same batch.
    """
    symbols = set()
    for desc, node in zip(export.inputs, export.module.graph.find_nodes(op="placeholder"), strict=True):
        if desc.kind == "input" and (dim := dims[desc.target]) is not None:
            symbols.add(compat.expression(node.meta["val"].shape[dim]))
    return frozenset(symbols) if all(isinstance(s, sympy.Symbol) for s in symbols) else frozenset()


def _require_known_sizes(export: compat.JointExport) -> None:
    """Refuse a graph with sizes that are known only when it runs: its FLOPs and bytes cannot be counted, nor its step compiled.

    Raises:
        CaptureError: names the first such operator.
    """
    known = {
        symbol
        for desc, node in zip(export.inputs, export.module.graph.find_nodes(op="placeholder"), strict=True)
        if desc.kind == "input"
        for size in node.meta["val"].shape
        for symbol in compat.expression(size).free_symbols
    }
    for node in export.module.graph.nodes:
        sizes = [size for value in pytree.tree_leaves(node.meta.get("val")) if isinstance(value, Tensor) for size in value.shape]
        if any(not compat.expression(size).free_symbols <= known for size in sizes if not isinstance(size, int)):
            raise CaptureError(
                f"the size of a result depends on the data ({node.target}), so that a step cannot be planned. Remedy: keep sizes "
                "fixed, as by torch.where or by multiplying with a mask in place of indexing with one."
            )


def _without_prefix(export: compat.JointExport) -> compat.JointExport:
    """Parameter and buffer names as the user's model has them."""

    def strip(desc: Any) -> Any:
        if isinstance(desc.target, compat.InputDesc):
            return replace(desc, target=strip(desc.target))
        return replace(desc, target=desc.target.removeprefix(_PREFIX)) if desc.kind in ("parameter", "buffer") else desc

    return replace(export, inputs=tuple(map(strip, export.inputs)), outputs=tuple(map(strip, export.outputs)))


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by every name."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def _parameters(model: nn.Module) -> tuple[Parameter, ...]:
    """Every parameter once, in registration order; tied weights carry their further names."""
    names: dict[int, list[str]] = defaultdict(list)
    tensors: dict[int, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
        tensors[id(parameter)] = parameter
    return tuple(
        Parameter(names[key][0], tuple(local_part(p).shape), p.dtype, p.requires_grad, tuple(names[key][1:]))
        for key, p in tensors.items()
    )


def _repeats(model: nn.Module, tensors: Sequence[Tensor], dims: Sequence[int | None], batch_size: int) -> list[int]:
    """How often to repeat the example for each attempt at a symbolic trace.

    First as it is, unless its batch is 1, which torch never makes a symbol. Then with a batch that equals no other size in
    sight: one that equals, say, the sequence length makes code that compares sizes look as if it depended on the batch.
    Multiples keep any divisibility that the model asks for.
    """
    taken = {int(s) for p in model.parameters() for s in p.shape}
    taken |= {int(s) for t, d in zip(tensors, dims, strict=True) for i, s in enumerate(t.shape) if i != d}
    distinct = next(r for r in range(2, len(taken) + 3) if batch_size * r not in taken)
    return [distinct] if batch_size == 1 else [1, distinct]


def tiled(tensors: Sequence[Tensor], dims: Sequence[int | None], repeats: int) -> list[Tensor]:
    """The tensors with their batch repeated `repeats` times."""
    if repeats == 1:
        return list(tensors)
    with torch.no_grad():
        repeated = [t if d is None else torch.cat([t] * repeats, dim=d) for t, d in zip(tensors, dims, strict=True)]
    return [made.requires_grad_(t.requires_grad) for made, t in zip(repeated, tensors, strict=True)]


def twin(model: nn.Module, shared: bool = False) -> nn.Module:
    """A copy of a model without its gradients and the hooks on its parameters.

    Args:
        shared: it has its parameters' memory in common with the model.
    """
    plain = [p for p in model.parameters() if type(p) is nn.Parameter]
    held = {id(p): nn.Parameter(p.detach() if shared else p.detach().clone(), p.requires_grad) for p in plain}
    own: nn.Module = copy.deepcopy(model, held)
    return own


@contextlib.contextmanager
def unchanged_rng(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Leave the random state of the CPU and of the tensors' devices as it was."""
    devices = sorted({t.device.index or 0 for t in tensors if t.device.type == "cuda" and torch.cuda.is_available()})
    with torch.random.fork_rng(devices=devices):
        yield


@contextlib.contextmanager
def unchanged_draws(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Leave every random stream as it was, Python's and numpy's, too."""
    own, shared = random.getstate(), numpy.random.get_state()
    try:
        with unchanged_rng(tensors):
            yield
    finally:
        random.setstate(own)
        numpy.random.set_state(shared)


def no_generation_cache(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Generative models return a key and value cache unless configured not to; training has no use for it."""
    return without_cache(caching_configs(model))


@contextlib.contextmanager
def without_cache(configs: Sequence[Any]) -> Iterator[None]:
    """See `no_generation_cache`."""
    caching = [config for config in configs if config.use_cache]
    try:
        for config in caching:
            config.use_cache = False
        yield
    finally:
        for config in caching:
            config.use_cache = True


def caching_configs(model: nn.Module) -> list[Any]:
    """Configurations of generative models in a model, which say whether they return a cache."""
    held = {id(config): config for module in model.modules() if (config := getattr(module, "config", None)) is not None}
    return [config for config in held.values() if isinstance(getattr(config, "use_cache", None), bool)]

"""The memory of a plain eager training step: the model itself is run on fake tensors, at a few batch sizes.

Nothing is computed or allocated. Python's references and autograd's saved tensors decide how long everything lives, activation
checkpointing recomputes as it would; the sizes at several batch sizes give each storage's formula.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import Tensor, nn

from graphopt import compat
from graphopt.analysis.memory import Block, Category, MemoryProfile, Row, held_block
from graphopt.analysis.optimizers import OptimizerFactory, optimizer_memory
from graphopt.analysis.recording import RecordedStorage, Recording
from graphopt.calls import BatchDim, batch_dims_of, batch_size_of, flatten_call
from graphopt.capture import tiled, unchanged_rng
from graphopt.compat import pytree
from graphopt.errors import CaptureError, GraphoptError, InputError
from graphopt.graph import BATCH, Parameter
from graphopt.loss import LossFunction, scalar_loss

MULTIPLES = (1, 2, 3, 4)
"""Batch sizes tried, in multiples of the example's: three points give a quadratic, the fourth checks it."""


@dataclass(frozen=True)
class _Run:
    """One recorded step: what exists before and after it, and its storages; `gradients` by position among these."""

    held: tuple[Block, ...]
    trained: tuple[Parameter, ...]
    operators: tuple[str, ...]
    forward_end: int
    storages: tuple[RecordedStorage, ...]
    gradients: Mapping[int, str]
    device: torch.device


def eager_memory(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    batch_dim: BatchDim = 0,
    optimizer: str | OptimizerFactory | torch.optim.Optimizer | None = "adamw",
    *,
    loss: LossFunction | None = None,
    accumulation: int = 1,
    master_weights: bool = False,
    keep_outputs: bool = False,
) -> MemoryProfile:
    """Timeline of the second and every later eager step of `model`; see `step_memory` for the arguments.

    Raises:
        InputError: an unknown optimizer, or an empty batch.
        CaptureError: the model cannot run on fake tensors, for instance because its code looks at values.
    """
    inputs = flatten_call(args, kwargs)
    dims = batch_dims_of(inputs, batch_dim)
    batch = batch_size_of(inputs, dims)
    if batch == 0:
        raise InputError("the batch is empty: pass at least one sample.")

    def record(multiple: int) -> _Run:
        return _record(model, inputs, tiled(inputs.tensors, dims, multiple), loss, accumulation > 1, keep_outputs)

    with unchanged_rng(inputs.tensors):
        run = record(1)
        try:
            others = [record(multiple) for multiple in MULTIPLES[1:]] if batch is not None else []
        except CaptureError:  # the model's code fixes the batch size
            others = []
    sizes, symbolic = _formulas([run, *others], batch or 1)
    optimizing = optimizer_memory(optimizer, run.trained, run.device, master_weights)
    rows = [
        *(Row(name, "forward" if i < run.forward_end else "backward") for i, name in enumerate(run.operators)),
        *(Row(f"{optimizing.name}: {name}", "optimizer") for name in optimizing.operators or ("step",)),
    ]
    end = len(rows) - 1
    held_sizes, storage_sizes = sizes[: len(run.held)], sizes[len(run.held) :]
    blocks = [replace(held, size=size, last=end) for held, size in zip(run.held, held_sizes, strict=True)]
    blocks += [held_block(f"{n}: {state}", "optimizer state", sympy.Integer(size), end) for n, state, size in optimizing.states]
    for i, (storage, size) in enumerate(zip(run.storages, storage_sizes, strict=True)):
        blocks.append(_block(run, i, storage, size, end))
    first = len(run.operators)
    blocks += [replace(t, born=first + t.born, last=first + t.last) for t in optimizing.temporaries]
    return MemoryProfile(
        tuple(rows),
        tuple(blocks),
        batch or 1,
        symbolic,
        (
            f"eager PyTorch, kernels as on {run.device.type}",
            f"optimizer {optimizing.name}, {accumulation} backward per step, gradients released by zero_grad(set_to_none=True)",
            "outputs are held until the step ends" if keep_outputs else "of the outputs only the loss is held",
            "workspaces inside kernels and libraries are not counted",
        ),
    )


def _block(run: _Run, index: int, storage: RecordedStorage, size: sympy.Expr, end: int) -> Block:
    category: Category = "temporary"
    last, why = storage.last, ""
    if index in run.gradients:
        return Block(
            f"gradient of {run.gradients[index]}", run.gradients[index].rpartition(".")[0], storage.shape, storage.dtype,
            "gradient", size, storage.born, end, "gradient, until zero_grad",
        )  # fmt: skip
    if last is None:
        last, why = len(run.operators) - 1, "held by the caller or the model"
    else:
        why = f"until {run.operators[min(last, len(run.operators) - 1)]}"
    if storage.born < run.forward_end <= last:
        category, why = "saved activation", f"saved for the backward: {why}"
    return Block(storage.operator, "", storage.shape, storage.dtype, category, size, storage.born, last, why)


def _record(
    model: nn.Module, inputs: Any, tensors: Sequence[Tensor], loss: LossFunction | None, accumulating: bool, keep: bool
) -> _Run:
    fake, fake_inputs = compat.fake_copy(model, tensors)
    parameters = {n: p for n, p in fake.named_parameters() if p.requires_grad}
    if not parameters:
        raise CaptureError("the model has no trainable parameters: set requires_grad=True on those to be trained.")
    for known, tensor in zip(fake_inputs, tensors, strict=True):
        compat.fake_with_values(known, tensor)
    leaves = list(inputs.constants)
    for position, tensor in zip(inputs.positions, fake_inputs, strict=True):
        leaves[position] = tensor
    args, kwargs = pytree.tree_unflatten(leaves, inputs.spec)
    del leaves
    mode = compat.fake_mode_of([*fake.parameters(), *fake_inputs])
    recording = Recording()
    held: list[tuple[Category, str, Tensor]] = [
        *(("parameter", n, p) for n, p in fake.named_parameters()),
        *(("buffer", n, b) for n, b in fake.named_buffers()),
        *(("input", f"input {i}", t) for i, t in enumerate(fake_inputs)),
    ]
    with mode, torch.enable_grad():  # type: ignore[union-attr]
        for parameter in parameters.values():
            parameter.grad = torch.empty_like(parameter) if accumulating else None
        recording.ignore([t for _, _, t in held])
        recording.ignore([p.grad for p in parameters.values() if p.grad is not None])
        try:
            with compat.known_integer_values(), _as_if_eager(), recording:
                output = fake(*args, **kwargs)
                value, _ = scalar_loss(output, loss)
                if not keep:
                    del output
                forward_end = len(recording.operators)
                value.backward()
        except GraphoptError:
            raise
        except Exception as error:
            raise CaptureError(
                f"the model cannot run on fake tensors ({type(error).__name__}: {str(error)[:300]}). Its code may look at the "
                "values of tensors, or torch knows no shapes of one of its operators; "
                "backend='aot_eager' analyses the traced graph instead."
            ) from error
        gradients = {}
        for name, parameter in parameters.items():
            storage = None if parameter.grad is None else recording.storage_of(parameter.grad)
            if storage is not None:
                gradients[next(i for i, s in enumerate(recording.storages) if s is storage)] = name
        final = tuple(map(replace, recording.storages))  # as they are now
    if accumulating:
        held += [("gradient", f"gradient of {n}", p) for n, p in parameters.items()]
    sizes = [sympy.Integer(tensor.untyped_storage().nbytes()) for _, _, tensor in held]
    kept = [held_block(n, c, size, 0, t.shape, str(t.dtype)) for (c, n, t), size in zip(held, sizes, strict=True)]
    trained = tuple(Parameter(n, tuple(p.shape), p.dtype, True) for n, p in parameters.items())
    device = next(iter(parameters.values())).device
    return _Run(tuple(kept), trained, tuple(recording.operators), forward_end, final, gradients, device)


@contextlib.contextmanager
def _as_if_eager() -> Iterator[None]:
    """transformers takes other paths when it meets fake tensors (masks that it would skip); here it is not to notice them."""
    library: Any = sys.modules.get("transformers.utils.import_utils")
    original = getattr(library, "is_fake_tensor", None)
    if original is not None:
        library.is_fake_tensor = lambda value: False
    try:
        yield
    finally:
        if original is not None:
            library.is_fake_tensor = original


def _formulas(runs: Sequence[_Run], batch: int) -> tuple[list[sympy.Expr], bool]:
    """Bytes of every held tensor and storage as a formula of the batch, from runs at 1, 2, 3 and 4 times `batch`.

    Returns:
        The formulas and True; or, where the runs differ in more than sizes or a size is no polynomial of degree 2, the bytes
        of the first run and False.
    """
    columns = [[*(h.size for h in run.held), *(s.size for s in run.storages)] for run in runs]
    fixed = [sympy.Integer(size) for size in columns[0]]
    spans = {tuple((s.operator, s.born, s.last) for s in run.storages) for run in runs}
    if len(runs) == 1 or len(spans) > 1:
        return fixed, False
    points = list(zip(*columns, strict=True))
    formulas = {p: _polynomial(p, batch) for p in set(points)}
    found = [formula for p in points if (formula := formulas[p]) is not None]
    return (found, True) if len(found) == len(points) else (fixed, False)


def _polynomial(points: tuple[int, ...], batch: int) -> sympy.Expr | None:
    """The quadratic through the first three points at `batch`, 2 `batch`, 3 `batch`, if the fourth lies on it."""
    first, second, third, fourth = points
    x = BATCH / sympy.Integer(batch) - 1
    formula = sympy.expand(first + (second - first) * x + sympy.Rational(third - 2 * second + first, 2) * x * (x - 1))
    return formula if formula.subs(BATCH, 4 * batch) == fourth else None

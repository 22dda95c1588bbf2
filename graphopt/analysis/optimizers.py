"""What an optimizer holds between steps and what its step allocates on top, per parameter.

torch.optim's own optimizers are run on fake tensors, so that their states, and the temporaries of their loop, foreach and fused
forms, are those of the installed release. 8-bit optimizers and master weights follow their published layouts.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch import Tensor, nn

from graphopt import compat
from graphopt.analysis.memory import Block
from graphopt.analysis.recording import Recording
from graphopt.errors import InputError
from graphopt.graph import Parameter

OptimizerFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

_FACTORIES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p, **options: torch.optim.SGD(p, lr=1e-3, **options),
    "momentum": lambda p, **options: torch.optim.SGD(p, lr=1e-3, momentum=0.9, **options),
    "adam": lambda p, **options: torch.optim.Adam(p, lr=1e-3, **options),
    "adamw": lambda p, **options: torch.optim.AdamW(p, lr=1e-3, **options),
}
_FORMS = ("loop", "foreach", "fused")
_EIGHT_BIT = {"momentum8bit": 1, "adam8bit": 2, "adamw8bit": 2}

EIGHT_BIT_BLOCK = 256
"""Elements that share one float32 scale in a block-wise 8-bit state (bitsandbytes' block size)."""

EIGHT_BIT_MINIMUM = 4096
"""Tensors with fewer elements keep float32 states (bitsandbytes' `min_8bit_size`)."""


@dataclass(frozen=True)
class OptimizerMemory:
    """What an optimizer adds to a step.

    Attributes:
        name: as it was asked for.
        states: (parameter, state, bytes) of everything it holds between steps.
        operators: what its step runs, in order.
        temporaries: what that allocates and releases again; their rows are positions among the operators.
    """

    name: str
    states: tuple[tuple[str, str, int], ...] = ()
    operators: tuple[str, ...] = ()
    temporaries: tuple[Block, ...] = ()


@dataclass(frozen=True)
class _Alike:
    """Makes an optimizer like one that was given or named; those of the same kind and text hold the same memory.

    Attributes:
        text: its options, and torch's default dtype, in which it may count its steps.
    """

    kind: Callable[..., torch.optim.Optimizer]
    text: str
    options: Mapping[str, Any] = field(compare=False)

    @classmethod
    def of(cls, kind: Callable[..., torch.optim.Optimizer], options: Mapping[str, Any]) -> _Alike:
        return cls(kind, f"{options} {torch.get_default_dtype()}", options)

    def __call__(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return self.kind(parameters, **self.options)


def optimizer_names() -> str:
    """The names that are accepted, for messages."""
    forms = ", ".join(f"-{form}" for form in _FORMS)
    return f"{', '.join([*_FACTORIES, *_EIGHT_BIT])}; the torch.optim ones also with {forms}"


def check_optimizer(optimizer: Any) -> None:
    """Raise `InputError` unless `optimizer` is something that `optimizer_memory` takes."""
    if optimizer is not None and not (isinstance(optimizer, str) and optimizer in _EIGHT_BIT):
        _factory(optimizer, torch.device("cpu"))


def optimizer_memory(
    optimizer: str | OptimizerFactory | torch.optim.Optimizer | None,
    parameters: Sequence[Parameter],
    device: torch.device,
    master_weights: bool = False,
) -> OptimizerMemory:
    """States and temporaries of an optimizer, without allocating either.

    Args:
        optimizer: a name such as "adamw" or "adamw-foreach" (torch's default form for the device without a suffix), a
            function from parameters to an optimizer, an optimizer whose type and defaults are to be taken, or None.
        master_weights: half-precision parameters have float32 copies that the optimizer steps, with float32 states; their
            gradients are copied to float32 for it.
    Raises:
        InputError: an unknown name, or an optimizer that cannot be built or stepped on fake tensors.
    """
    if optimizer is None:
        return OptimizerMemory("none")
    masters: list[tuple[str, str, int]] = []
    if master_weights:
        half = [p for p in parameters if p.dtype in (torch.float16, torch.bfloat16)]
        masters = [(p.name, "float32 master copy", 4 * math.prod(p.shape)) for p in half]
        parameters = [replace(p, dtype=torch.float32) if p in half else p for p in parameters]
    if isinstance(optimizer, str) and optimizer in _EIGHT_BIT:
        found = OptimizerMemory(optimizer, tuple(_eight_bit_states(parameters, _EIGHT_BIT[optimizer])), ("step",))
    else:
        name, factory = _factory(optimizer, device)
        # All gradients are compressed, say: torch's optimizers refuse to hold nothing.
        record = _recorded_once if isinstance(factory, _Alike) else _recorded
        found = record(name, factory, tuple(parameters), device) if parameters else OptimizerMemory(name)
    shift = len(masters)
    operators = (*(f"float32 gradient of {p}" for p, _, _ in masters), *found.operators)
    end = len(operators) - 1
    upcast = [_temporary(operators[i], (), "torch.float32", size, i, end) for i, (_, _, size) in enumerate(masters)]
    shifted = [replace(t, born=t.born + shift, last=t.last + shift) for t in found.temporaries]
    return OptimizerMemory(found.name, (*masters, *found.states), operators, (*upcast, *shifted))


def named_optimizer(name: str, device: torch.device) -> OptimizerFactory:
    """The torch.optim optimizer that a name stands for.

    Raises:
        InputError: an unknown name, or that of an optimizer whose memory alone is known.
    """
    if name in _EIGHT_BIT:
        raise InputError(f"{name} is not in torch, and its memory alone is known: use one of {', '.join(_FACTORIES)} for a step.")
    return _factory(name, device)[1]


def unwrapped(optimizer: Any) -> Any:
    """The optimizer in the wrapper that accelerate puts around it; anything else as it is."""
    return getattr(optimizer, "optimizer", optimizer)


def _factory(optimizer: Any, device: torch.device) -> tuple[str, OptimizerFactory]:
    optimizer = unwrapped(optimizer)
    if isinstance(optimizer, torch.optim.Optimizer):
        kind = type(optimizer)
        known = inspect.signature(kind).parameters
        every = any(p.kind is p.VAR_KEYWORD for p in known.values())
        defaults: dict[str, Any] = {
            name: value.item() if isinstance(value, Tensor) and value.numel() == 1 else value  # a learning rate may be a tensor
            for name, value in optimizer.defaults.items()
            if every or name in known  # AdamW's hold an option of Adam's
        }
        return kind.__name__, _Alike.of(kind, defaults)
    if callable(optimizer):
        return getattr(optimizer, "__name__", "optimizer"), optimizer
    base, _, form = optimizer.partition("-") if isinstance(optimizer, str) else ("", "", "")
    if base not in _FACTORIES or (form and form not in _FORMS):
        raise InputError(f"unknown optimizer {optimizer!r}: use {optimizer_names()}.")
    form = form or ("foreach" if device.type == "cuda" else "loop")
    options = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}[form]
    return optimizer, _Alike.of(_FACTORIES[base], options)


def _recorded(name: str, factory: OptimizerFactory, parameters: tuple[Parameter, ...], device: torch.device) -> OptimizerMemory:
    """The second step of a real optimizer on fake parameters; the first one makes the states."""
    with compat.new_fake_mode():
        fakes = [nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device=device)) for p in parameters]
        for fake in fakes:
            fake.grad = torch.empty_like(fake)
        try:
            optimizer = factory(fakes)
            optimizer.step()
            recording = Recording()
            held = compat.pytree.tree_leaves([fakes, [f.grad for f in fakes], optimizer.state])
            recording.ignore([value for value in held if isinstance(value, Tensor)])
            with recording:
                optimizer.step()
        except Exception as error:
            raise InputError(
                f"the memory of {name} cannot be found by a trial on fake tensors ({type(error).__name__}: {error}). Pass "
                f"optimizer= one of {optimizer_names()}."
            ) from error
        states = tuple(
            (p.name, key, value.untyped_storage().nbytes())
            for p, fake in zip(parameters, fakes, strict=True)
            for key, value in optimizer.state.get(fake, {}).items()
            if isinstance(value, Tensor)
        )
        end = len(recording.operators) - 1
        temporaries = tuple(
            _temporary(s.operator, s.shape, s.dtype, s.size, s.born, end if s.last is None else s.last)
            for s in recording.storages
            if s.size
        )
    return OptimizerMemory(name, states, tuple(recording.operators), temporaries)


_recorded_once = functools.lru_cache(16)(_recorded)
"""Many plans that are compared under a limit on memory train the same tensors: what the optimizer holds is recorded once."""


def _temporary(name: str, shape: tuple[int, ...], dtype: str, size: int, born: int, last: int) -> Block:
    return Block(name, "", shape, dtype, "temporary", sympy.Integer(size), born, last, "temporary of the optimizer")


def _eight_bit_states(parameters: Sequence[Parameter], count: int) -> Iterable[tuple[str, str, int]]:
    """Block-wise 8-bit states (Dettmers et al., 2022): a byte per element, a float32 scale per block."""
    for p in parameters:
        elements = math.prod(p.shape)
        small = elements < EIGHT_BIT_MINIMUM
        size = 4 * elements if small else elements + 4 * -(-elements // EIGHT_BIT_BLOCK)
        for i in range(count):
            yield p.name, f"state {i + 1}{'' if small else ', 8 bit'}", size

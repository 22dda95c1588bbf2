"""What is known of a model's calls beside running them: captured graphs, for planning while training goes on.

A new call signature (sizes, dtype, training flags, `requires_grad` flags, autocast and the like) is a capture; where rows are
sampled, a new batch size is a substitution into a captured graph. The cache evicts the least recently used entry.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from graphopt import compat
from graphopt.calls import BatchDim, FlatInputs, batch_dims_of, batch_size_of, flatten_call
from graphopt.capture import TRACING, capture_to_run, tensors_of
from graphopt.errors import InputError
from graphopt.frontend.recording import record
from graphopt.graph import TrainingGraph
from graphopt.lower import Backend
from graphopt.planner.plan import Plan
from graphopt.planner.product_times import adopt_times, are_times, float32_precision, used_times
from graphopt.runtime.bounded_cache import BoundedCache
from graphopt.runtime.plain_values import from_plain
from graphopt.runtime.uniforms import Uniforms
from graphopt.transforms.symbolic_zeros import as_differentiated, without_other_outputs

CAPTURE_LIMIT = 8
"""Captured graphs kept per optimised model."""

logger = logging.getLogger(__name__)


@dataclass
class Counters:
    """How often the caches of an optimised model had to do work; for reports and tests."""

    captures: int = 0
    compilations: int = 0
    capture_seconds: float = 0.0
    compile_seconds: float = 0.0
    rewrite_seconds: float = 0.0


@dataclass(frozen=True)
class _CapturesState:
    uniforms: Any
    product_times: dict[str, dict[str, float]]


@dataclass(eq=False)
class Captures:
    """Finds or makes the captured graph for a call of `model`.

    Attributes:
        model, batch_dim, backend: see `graphopt.optimize`.
        symbolic: graphs hold for any batch size.
        rank: of this process among those that train the model: each has draws of its own.
        loss_alone: graphs return the loss, and no other output.
        own_loss: the loss that is trained by is the model's first output, if that is a scalar.
        several_graphs: the model is not one graph.
        long_to_eager: see `graphopt.compat.recurrent.left_to_eager_mode`.
        lock: is held while a step runs: one thread at a time.
    """

    model: nn.Module
    batch_dim: BatchDim
    backend: Backend
    symbolic: bool = False
    rank: int = 0
    loss_alone: bool = False
    own_loss: bool = True
    several_graphs: bool = False
    long_to_eager: bool = False

    def __post_init__(self) -> None:
        self.counters = Counters()
        self.uniforms = Uniforms(self.rank)
        self._graphs: BoundedCache[Any, TrainingGraph] = BoundedCache(CAPTURE_LIMIT)
        self._numbers: tuple[Any, ...] = ()
        self.lock = threading.RLock()

    def __getstate__(self) -> dict[str, Any]:
        """Without graphs, which are captured again, compiled code, and the lock, of which a copy has its own."""
        return {k: v for k, v in self.__dict__.items() if k not in ("_graphs", "lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _graphs=BoundedCache(CAPTURE_LIMIT), lock=threading.RLock())

    def graph(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> TrainingGraph:
        """The joint graph for this call, traced if it is new."""
        return self.captured(flatten_call(args, kwargs), args, kwargs)[1]

    def planned_on(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> TrainingGraph:
        """The graph of this call as planning takes it: of several graphs all as one, which takes a run of the model."""
        if self.several_graphs:
            with TRACING:
                return record(self.model, args, kwargs, self.batch_dim, "it is not one graph", self.long_to_eager)[0]
        if self._numbers != _numbers(self.model):
            self._graphs = BoundedCache(CAPTURE_LIMIT)
        return self.graph(args, kwargs)

    def not_separable(self, plan: Plan, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        """Why rows of this call's backward cannot be sampled; "" if they can."""
        inputs = flatten_call(args, kwargs)
        graph = self.captured(inputs, args, kwargs)[1]
        reason = plan.inseparable(plan.before_sampling().rewrite(graph)[0], tensors_of(self.model), inputs.tensors)
        if reason:
            logger.warning("rows of the backward are not sampled: %s", reason)
        return reason

    def snapshot(self) -> Any:
        """Generators, and the times by which orders were chosen; see `Stateful`."""
        return {"uniforms": self.uniforms.snapshot(), "product_times": used_times()}

    def prepare(self, snapshot: Any) -> Callable[[], None]:
        """See `Stateful`."""
        saved = from_plain(_CapturesState, snapshot, "captures")
        if not are_times(saved.product_times):
            raise InputError("captures.product_times has an entry that is no positive number of seconds of a product.")
        restore_uniforms = self.uniforms.prepare(saved.uniforms)

        def restore() -> None:
            restore_uniforms()
            adopt_times(saved.product_times)

        return restore

    def captured(self, inputs: FlatInputs, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, TrainingGraph]:
        """What the graph of this call depends on, and the graph, traced if it is new; `inputs` are `args` and `kwargs`, flat."""
        dims = batch_dims_of(inputs, self.batch_dim)
        batch_size = batch_size_of(inputs, dims)
        signature = self.signature(inputs, dims)
        for place in (signature, (signature, batch_size)):
            graph = self._graphs.get(place)
            if graph is not None and (batch_size is None or graph.accepts(batch_size)):
                return place, graph
        start = time.perf_counter()
        with compat.unobserved():
            graph = capture_to_run(self.model, args, kwargs, self.batch_dim, self.symbolic)
        if self.loss_alone:
            graph = without_other_outputs(graph)
        elif self.own_loss:
            graph = as_differentiated(graph)
        self._numbers = _numbers(self.model)
        self.counters.captures += 1
        self.counters.capture_seconds += time.perf_counter() - start
        # A graph can be limited to some batch sizes (1 is special, and kernels may differ between small and large ones);
        # others then get a graph of their own.
        place = signature if graph.symbolic and self._graphs.get(signature) is None else (signature, batch_size)
        return place, self._graphs.put(place, graph)

    def signature(self, inputs: FlatInputs, dims: tuple[int | None, ...]) -> Any:
        """What a captured graph depends on, but for the batch size and for what steps may count: see `_numbers`."""
        tensors = tuple(
            (t.dtype, t.device, t.requires_grad, tuple(-1 if i == d else s for i, s in enumerate(t.shape)))
            for t, d in zip(inputs.tensors, dims, strict=True)
        )
        model: list[Any] = []
        for module in self.model.modules():
            model.extend((name, v) for name, v in vars(module).items() if isinstance(v, (bool, str)))  # "training", too
            held = (*module._parameters.values(), *module._buffers.values())
            model.extend((t.requires_grad, t.dtype, t.device, t.shape) for t in held if t is not None)
        return (inputs.spec, _hashable(inputs.constants), tensors, tuple(model), _autocast_state(inputs), _settings())


def _numbers(model: nn.Module) -> tuple[Any, ...]:
    """Numbers that a model holds, such as how many layers it runs, and lengths of what it holds: hooks, lists of layers.

    Models count steps in such, so that a new value is no reason to trace a step anew, as planning anew is.
    """
    found: list[Any] = []
    for module in model.modules():
        for name, value in vars(module).items():
            if value is None or isinstance(value, (int, float)):
                found.append((name, value))
            elif isinstance(value, (list, tuple, dict)):
                found.append((name, len(value)))
    return tuple(found)


def _settings() -> tuple[Any, ...]:
    """Settings of torch that decide which kernels a captured graph has."""
    return torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), float32_precision()


def _autocast_state(inputs: FlatInputs) -> tuple[Any, ...]:
    types = {"cpu", *(t.device.type for t in inputs.tensors)}
    return tuple((kind, torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None) for kind in sorted(types))


def text_of(value: Any) -> str:
    """A text that is the same for equal values in every process, as far as theirs is."""
    if isinstance(value, frozenset):
        return f"{{{', '.join(sorted(map(text_of, value)))}}}"
    return f"({', '.join(map(text_of, value))})" if type(value) is tuple else repr(value)


class _Same:
    """Compares a value by identity, and keeps it, so that no other comes to lie at its address."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)

    def __repr__(self) -> str:
        return str(id(self.value))


def _hashable(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Constants of a call, compared by value where they can be and by identity where not."""
    result = []
    for value in values:
        try:
            hash(value)
            result.append((type(value), value))
        except TypeError:
            result.append((type(value), _Same(value)))
    return tuple(result)

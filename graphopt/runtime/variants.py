"""Compiled steps: one per (call signature, plan, batch size), made when first needed, kept in bounded caches.

A new batch size is a substitution into the captured graph; a new call signature (sequence length, dtype, training flags,
`requires_grad` flags, autocast, torch's default dtype and the like) is a capture, and so is another state of the model in Python
(attributes that forward() looks at, submodules, hooks). Both caches evict the least recently used entry.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from graphopt import compat
from graphopt.calls import BatchDim, FlatInputs, batch_dims_of, batch_size_of, flatten_call
from graphopt.capture import capture_to_run
from graphopt.compat.inductor import eager_draws
from graphopt.errors import CaptureError, InputError
from graphopt.graph import TrainingGraph
from graphopt.lower import Backend, lower
from graphopt.planner.independence import mixing_reason
from graphopt.planner.plan import Plan
from graphopt.planner.product_times import adopt_times, are_times, used_times
from graphopt.probe import make_probe, make_term_probe
from graphopt.runtime.bounded_cache import BoundedCache
from graphopt.runtime.compiled_step import CompiledStep, MeasuringStep
from graphopt.runtime.counters import Counters
from graphopt.runtime.draws import draws
from graphopt.runtime.plain_values import from_plain
from graphopt.runtime.uniforms import Uniforms
from graphopt.specialise import specialise

CAPTURE_LIMIT = 8
"""Captured graphs kept per optimised model."""
STEP_LIMIT = 16
"""Compiled steps kept per optimised model."""
STATE_LIMIT, TRACE_LIMIT = 8, 32
"""Different graphs, and traces, of calls of one signature because of a model's attributes."""

_REST = "Remedy: keep what changes in a buffer (register_buffer) and change that in place, or pass it in as an input."

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _VariantsState:
    uniforms: Any
    product_times: dict[str, dict[str, float]]


@dataclass(frozen=True)
class _Captured:
    """A captured graph, and its number among all captures."""

    number: int
    graph: TrainingGraph


class Variants:
    """Finds or makes the compiled step for a call of `model`."""

    def __init__(self, model: nn.Module, batch_dim: BatchDim, backend: Backend) -> None:
        """See `graphopt.optimize`."""
        self.model = model
        self.batch_dim = batch_dim
        self.backend = backend
        self.counters = Counters()
        self.uniforms = Uniforms()
        self._captures: BoundedCache[Any, tuple[_Captured, ...]] = BoundedCache(CAPTURE_LIMIT)
        self._steps: BoundedCache[Any, CompiledStep] = BoundedCache(STEP_LIMIT)
        self._verdicts: BoundedCache[Any, str] = BoundedCache(CAPTURE_LIMIT)
        self._moving: dict[Any, str] = {}
        self._told: set[str] = set()
        self._traces: dict[Any, int] = {}
        self._measuring: tuple[Any, MeasuringStep] | None = None

    def captured(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> TrainingGraph:
        """The joint graph for this call, traced if it is new."""
        inputs = flatten_call(args, kwargs)
        with compat.unobserved():
            return self._captured(inputs, args, kwargs)[1]

    def is_captured(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether this call needs no new trace."""
        inputs = flatten_call(args, kwargs)
        dims = batch_dims_of(inputs, self.batch_dim)
        return self._find(self._signature(inputs, dims), batch_size_of(inputs, dims)) is not None

    def step(self, plan: Plan, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[CompiledStep, FlatInputs]:
        """The compiled step for this call under `plan`; FLOP counters and the like do not see it made."""
        with compat.unobserved():
            return self._step(plan, args, kwargs)

    def _step(self, plan: Plan, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[CompiledStep, FlatInputs]:
        inputs = flatten_call(args, kwargs)
        signature, graph = self._captured(inputs, args, kwargs)
        batch_size = batch_size_of(inputs, graph.batch_dims) or graph.batch_size
        key = (signature, plan.key, batch_size)
        step = self._steps.get(key)
        if step is None:
            if plan.samples:
                plan = replace(plan, mixing=self._mixing(signature, graph, plan, inputs))
            step = self._steps.put(key, self._compile(graph, plan, batch_size, self.backend))
        elif step.graph.state is not graph.state:  # the same trace, but another state of the model
            step = self._steps.put(key, replace(step, graph=replace(step.graph, state=graph.state)))
        return step, inputs

    def step_with_eager_draws(self, plan: Plan, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CompiledStep:
        """As `step`, but where it draws random numbers (dropout) eager mode's kernels do; such a step is not kept."""
        inputs = flatten_call(args, kwargs)
        signature, graph = self._captured(inputs, args, kwargs)
        if self.backend == "aot_eager" or not any(map(draws, graph.graph.nodes)):
            return self.step(plan, args, kwargs)[0]
        batch_size = batch_size_of(inputs, graph.batch_dims) or graph.batch_size
        with eager_draws():
            return self._compile(graph, plan, batch_size, "aot_eager" if callable(self.backend) else self.backend)

    def place(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, int | None, Any]:
        """Everything about a call that its compiled step depends on but the plan; nothing is traced.

        Returns:
            Signature, batch size, and the number of the graph for the model's Python state; None if that was not captured yet.
        """
        inputs = flatten_call(args, kwargs)
        dims = batch_dims_of(inputs, self.batch_dim)
        signature, batch_size = self._signature(inputs, dims), batch_size_of(inputs, dims)
        found = self._find(signature, batch_size)
        return signature, batch_size, None if found is None else found[0][1]

    def last_plan(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], acceptable: Callable[[Plan], bool]) -> Plan | None:
        """The plan of the step that ran last for such a call, among those that are acceptable and still compiled."""
        signature, batch_size, wanted = self.place(args, kwargs)
        for ((place, number), _, size), step in self._steps.newest_first():
            alike = number == wanted and place in (signature, (signature, batch_size))
            if alike and size == (batch_size or step.graph.batch_size) and acceptable(step.plan):
                return step.plan
        return None

    def _mixing(self, signature: Any, graph: TrainingGraph, plan: Plan, inputs: FlatInputs) -> str:
        """Why this captured graph cannot be sampled; it is not what `optimize` saw if flags or the selection have changed."""
        key = (signature, plan.train)
        reason = self._verdicts.get(key)
        if reason is None:
            tensors = {
                **dict(self.model.named_parameters(remove_duplicate=False)),
                **dict(self.model.named_buffers(remove_duplicate=False)),
            }
            reason = mixing_reason(plan.before_sampling().rewrite(graph)[0], tensors, inputs.tensors)
            self._verdicts.put(key, reason)
            if reason:
                logger.warning("the backward is not sampled: %s", reason)
        return reason

    def mixing(self, plan: Plan, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        """Why the backward of this call cannot be sampled; "" if it can."""
        inputs = flatten_call(args, kwargs)
        signature, graph = self._captured(inputs, args, kwargs)
        return self._mixing(signature, graph, plan, inputs)

    def batch_size(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
        """Samples of this call."""
        inputs = flatten_call(args, kwargs)
        return batch_size_of(inputs, batch_dims_of(inputs, self.batch_dim)) or 1

    def measuring_step(self, plan: Plan, args: tuple[Any, ...], kwargs: Mapping[str, Any], seed: int | None) -> MeasuringStep:
        """The measuring step for this call under `plan`; only the last one is kept.

        Args:
            seed: of what it draws; None: it measures terms alone, see `make_term_probe`.
        """
        inputs = flatten_call(args, kwargs)
        signature, graph = self._captured(inputs, args, kwargs)
        batch_size = batch_size_of(inputs, graph.batch_dims) or graph.batch_size
        key = (signature, plan.key, batch_size, seed)
        if self._measuring is None or self._measuring[0] != key:
            start = time.perf_counter()
            rewritten = plan.rewrite(graph, batch_size)[0]
            probe = make_term_probe(rewritten) if seed is None else make_probe(rewritten, seed)
            static = specialise(probe.graph, batch_size, decompose=self.backend == "inductor")
            lowered = lower(static, self.backend)
            self.counters.compilations += 1
            self.counters.compile_seconds += time.perf_counter() - start
            place = self._signature(inputs, batch_dims_of(inputs, self.batch_dim))
            fingerprint = hashlib.sha256(_text((place, *key[1:])).encode()).hexdigest()
            self._measuring = (key, MeasuringStep(replace(probe, graph=static), lowered, batch_size, self.uniforms, fingerprint))
        return self._measuring[1]

    def snapshot(self) -> Any:
        """Generators, and the times by which orders were chosen; see `Stateful`."""
        return {"uniforms": self.uniforms.snapshot(), "product_times": used_times()}

    def prepare(self, snapshot: Any) -> Callable[[], None]:
        """See `Stateful`. Steps that were compiled by other times are compiled again."""
        saved = from_plain(_VariantsState, snapshot, "variants")
        if not are_times(saved.product_times):
            raise InputError("variants.product_times has an entry that is no positive number of seconds of a product.")
        restore_uniforms = self.uniforms.prepare(saved.uniforms)

        def restore() -> None:
            restore_uniforms()
            if adopt_times(saved.product_times):
                self._steps, self._measuring = BoundedCache(STEP_LIMIT), None

        return restore

    def _captured(self, inputs: FlatInputs, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, TrainingGraph]:
        dims = batch_dims_of(inputs, self.batch_dim)
        batch_size = batch_size_of(inputs, dims)
        signature = self._signature(inputs, dims)
        found = self._find(signature, batch_size)
        if found is not None:
            return found
        before = self._outdated(signature, batch_size)
        start = time.perf_counter()
        outdated = [captured.graph for _, captured in before]
        graph = capture_to_run(self.model, args, kwargs, self.batch_dim, outdated)
        self.counters.capture_seconds += time.perf_counter() - start
        same = next(((place, captured.number) for place, captured in before if captured.graph.module is graph.module), None)
        self.counters.captures += same is None
        # A graph can be limited to some batch sizes (1 is special, and kernels may differ between small and large ones);
        # others then get a graph of their own.
        shared = graph.symbolic and (self._captures.get(signature) is None or any(place == signature for place, _ in before))
        new = (signature if shared else (signature, batch_size), self.counters.captures)
        self._check_side_effects(signature, graph, outdated)
        place, number = same or new
        others = [c for c in self._captures.get(place) or () if c.number != number]
        alike = [c for c in self._captures.get(place) or () if c.number == number]
        self._captures.put(place, (*others, *alike[1 - STATE_LIMIT :], _Captured(number, graph)))
        return (place, number), graph

    def _find(self, signature: Any, batch_size: int | None) -> tuple[Any, TrainingGraph] | None:
        for place, captured in self._for(signature, batch_size):
            if captured.graph.state is None or captured.graph.state.holds():
                return (place, captured.number), captured.graph
        return None

    def _for(self, signature: Any, batch_size: int | None) -> list[tuple[Any, _Captured]]:
        """All graphs for such calls, whatever the model's Python state was."""
        places = (signature, (signature, batch_size))
        found = [(place, captured) for place in places for captured in self._captures.get(place) or ()]
        return [(place, captured) for place, captured in found if batch_size is None or captured.graph.accepts(batch_size)]

    def _outdated(self, signature: Any, batch_size: int | None) -> list[tuple[Any, _Captured]]:
        """Graphs that would do, were the model's Python state what it was.

        Raises:
            CaptureError: there are `STATE_LIMIT` of them, or `TRACE_LIMIT` traces were made.
        """
        if signature in self._moving:
            raise CaptureError(self._moving[signature])
        found = self._for(signature, batch_size)
        self._traces[signature] = self._traces.get(signature, 0) + bool(found)
        if len({captured.number for _, captured in found}) >= STATE_LIMIT or self._traces[signature] > TRACE_LIMIT:
            state = found[-1][1].graph.state
            raise CaptureError(
                "the model has been traced too often because its attributes change; it was traced last for "
                f"{state.difference() if state is not None else ''}. {_REST}"
            )
        return found

    def _check_side_effects(self, signature: Any, graph: TrainingGraph, before: Sequence[TrainingGraph]) -> None:
        """Warn of what a compiled step does not do; `before` are graphs that other attributes of the model have outdated.

        Raises:
            CaptureError: a call has changed what the next depends on, and every call will, as with a counter.
        """
        if graph.state is None:
            return
        for name in graph.state.lost:
            if name not in self._told:
                self._told.add(name)
                logger.warning("forward() changes %s, which compiled steps do not. %s", name, _REST)
        changed = frozenset(name for other in before if other.state is not None for name in other.state.rewritten)
        moving = changed & graph.state.rewritten
        if moving:
            self._moving[signature] = f"every call of the model changes {min(moving)}, which the next depends on. {_REST}"
            raise CaptureError(self._moving[signature])

    def _compile(self, graph: TrainingGraph, plan: Plan, batch_size: int, backend: Backend) -> CompiledStep:
        start = time.perf_counter()
        rewritten, reports = plan.rewrite(graph, batch_size)
        sampled_part = plan.sampled_part(graph, batch_size, reports)
        rewrite_seconds = time.perf_counter() - start
        self.counters.rewrite_seconds += rewrite_seconds
        backend = backend if plan.checking is None else "aot_eager"  # a checking step runs once in many
        static = specialise(rewritten, batch_size, decompose=backend == "inductor")
        lowered = lower(static, backend)
        elapsed = time.perf_counter() - start
        self.counters.compilations += 1
        self.counters.compile_seconds += elapsed
        return CompiledStep(plan, static, lowered, tuple(reports), elapsed, rewrite_seconds, self.uniforms, sampled_part)

    def _signature(self, inputs: FlatInputs, dims: tuple[int | None, ...]) -> Any:
        """Everything that a captured graph depends on, but for the batch size."""
        tensors = tuple(
            (t.dtype, t.device, t.requires_grad, tuple(-1 if i == d else s for i, s in enumerate(t.shape)))
            for t, d in zip(inputs.tensors, dims, strict=True)
        )
        model: list[Any] = []
        for module in self.model.modules():
            model.append(module.training)
            held = (*module._parameters.values(), *module._buffers.values())
            model.extend((t.requires_grad, t.dtype, t.device, t.shape) for t in held if t is not None)
        return (inputs.spec, _hashable(inputs.constants), tensors, tuple(model), _autocast_state(inputs), _settings())


def _settings() -> tuple[Any, ...]:
    """Settings of torch that decide which kernels a captured graph has."""
    return torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()


def _autocast_state(inputs: FlatInputs) -> tuple[Any, ...]:
    types = {"cpu", *(t.device.type for t in inputs.tensors)}
    return tuple((kind, torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None) for kind in sorted(types))


def _text(value: Any) -> str:
    """A text that is the same for equal values in every process, as far as theirs is."""
    if isinstance(value, frozenset):
        return f"{{{', '.join(sorted(map(_text, value)))}}}"
    return f"({', '.join(map(_text, value))})" if type(value) is tuple else repr(value)


def _hashable(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Constants of a call, compared by value where they can be and by identity where not."""
    result = []
    for value in values:
        try:
            hash(value)
            result.append((type(value), value))
        except TypeError:
            result.append((type(value), id(value)))
    return tuple(result)

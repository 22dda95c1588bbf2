"""A compiled step that measures what sampling rows would add."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from graphopt.passes.state import State
from graphopt.passes.vcas.variance_probe import COUNTS, Probe, make_probe
from torch import Tensor

from graphopt import compat
from graphopt.calls import FlatInputs, batch_dims_of, batch_size_of, flatten_call
from graphopt.compat import InputDesc, OutputDesc, pytree
from graphopt.graph import TrainingGraph
from graphopt.loss import LossFunction, gradients_of, scalar_loss
from graphopt.lower import lower
from graphopt.planner.plan import Plan
from graphopt.runtime.captures import Captures, text_of
from graphopt.runtime.supply import Supply
from graphopt.specialise import specialise


class Measured(State):
    """What a measuring step takes and returns.

    Attributes:
        counts: rows kept at each site; see `Probe`.
        slots: what the last backward returned beside gradients, by name.
    """

    counts: Tensor | None = None

    def __init__(self) -> None:
        self.slots: dict[str, Tensor] = {}

    def supply(self, desc: InputDesc, size: Sequence[int], like: Tensor) -> Tensor | None:
        """See `State`."""
        return self.counts if desc == COUNTS else None

    def take(self, desc: InputDesc | OutputDesc, value: Tensor) -> bool:
        """See `State`."""
        self.slots[desc.target] = value
        return True


@dataclass(frozen=True)
class MeasuringStep:
    """A compiled step of a `Probe`.

    Attributes:
        run, measured: the probe's graph, and what it takes and returns beside the model's own values.
        batch_size: samples.
        fingerprints: of what was decided and of the shapes that it was compiled for, the same in every process.
        key: what it was compiled for, in this one.
    """

    probe: Probe
    run: Callable[[FlatInputs, Mapping[str, Tensor]], list[Any]]
    measured: Measured
    batch_size: int
    fingerprints: tuple[str, str]
    key: Hashable

    def gradients(
        self, model_tensors: Mapping[str, Tensor], inputs: FlatInputs, counts: Tensor, loss: LossFunction | None
    ) -> dict[str, Tensor]:
        """The gradients of the loss by parameter; `.grad` and buffers stay as they are.

        Args:
            counts: rows kept at each site; see `Probe`.
        """
        graph = self.probe.graph
        mutated = {desc.target for desc in graph.outputs if desc.kind == "mutation"}
        names = [p.name for p in graph.trainable]
        tensors = dict(model_tensors)
        tensors |= {d.target: tensors[d.target].clone() for d in mutated if d.kind == "buffer"}
        tensors |= {name: tensors[name].detach().requires_grad_() for name in names}  # the user's hooks are not for these
        self.measured.counts = counts
        with torch.enable_grad():
            output = pytree.tree_unflatten(self.run(inputs, tensors), graph.out_spec)
            scalar, _ = scalar_loss(output, loss)
        with compat.no_autocast():
            found = gradients_of(scalar, [tensors[name] for name in names], _in_float16(graph))
        return {name: gradient.to_dense() for name, gradient in zip(names, found, strict=True) if gradient is not None}


def measuring_step(
    captures: Captures, plan: Plan, args: tuple[Any, ...], kwargs: Mapping[str, Any], seed: int, last: MeasuringStep | None
) -> MeasuringStep:
    """The measuring step for a call.

    Args:
        plan: of what runs before the sampler.
        seed: of what it draws.
        last: is returned where it is the one.
    """
    inputs = flatten_call(args, kwargs)
    place, graph = captures.captured(inputs, args, kwargs)
    batch_size = batch_size_of(inputs, graph.batch_dims) or graph.batch_size
    decided = (plan.key, batch_size, seed, bool(plan.not_separable))
    if last is not None and last.key == (place, decided):
        return last
    start = time.perf_counter()
    probe = make_probe(plan.rewrite(graph, batch_size)[0], seed, not plan.not_separable)
    measured = Measured()
    run = lower(specialise(probe.graph, batch_size), captures.backend, Supply(captures.uniforms, {"measured": measured}))
    captures.counters.compilations += 1
    captures.counters.compile_seconds += time.perf_counter() - start
    signature = captures.signature(inputs, batch_dims_of(inputs, captures.batch_dim))
    fingerprints = _digest(decided), _digest(signature)
    return MeasuringStep(probe, run, measured, batch_size, fingerprints, (place, decided))


def _in_float16(graph: TrainingGraph) -> bool:
    """Whether the backward has tensors of float16."""
    values = (node.meta.get("val") for node in graph.graph.nodes)
    return any(isinstance(value, Tensor) and value.dtype == torch.float16 for value in values)


def _digest(value: tuple[Any, ...]) -> str:
    return hashlib.sha256(text_of(value).encode()).hexdigest()

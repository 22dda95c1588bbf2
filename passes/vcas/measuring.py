"""A compiled step that measures what sampling rows would add."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from graphopt.passes.vcas.variance_probe import COUNTS, Probe, make_probe
from torch import Tensor

from graphopt.calls import FlatInputs, batch_dims_of, batch_size_of, flatten_call
from graphopt.compat import pytree
from graphopt.loss import LossFunction, scalar_loss
from graphopt.lower import Lowered, graph_inputs, lower
from graphopt.planner.plan import Plan
from graphopt.runtime.captures import Captures, text_of
from graphopt.runtime.uniforms import Uniforms
from graphopt.specialise import specialise


@dataclass(frozen=True)
class MeasuringStep:
    """A compiled step of a `Probe`.

    Attributes:
        probe: with the static graph that was lowered.
        batch_size: samples.
        fingerprint: of what it was compiled for, the same in every process.
        key: what it was compiled for, in this one.
    """

    probe: Probe
    lowered: Lowered
    batch_size: int
    uniforms: Uniforms
    fingerprint: str
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
        flat = graph_inputs(graph, inputs, tensors, self.uniforms, {COUNTS: counts})
        with torch.enable_grad():
            output = pytree.tree_unflatten(self.lowered.run(flat), graph.out_spec)
            scalar, _ = scalar_loss(output, loss)
            found = torch.autograd.grad(scalar, [tensors[name] for name in names], allow_unused=True)
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
    decided = (plan.key, batch_size, seed)
    if last is not None and last.key == (place, decided):
        return last
    start = time.perf_counter()
    probe = make_probe(plan.rewrite(graph, batch_size)[0], seed)
    static = specialise(probe.graph, batch_size, decompose=captures.backend == "inductor")
    lowered = lower(static, captures.backend)
    captures.counters.compilations += 1
    captures.counters.compile_seconds += time.perf_counter() - start
    signature = captures.signature(inputs, batch_dims_of(inputs, captures.batch_dim))
    fingerprint = hashlib.sha256(text_of((signature, *decided)).encode()).hexdigest()
    return MeasuringStep(replace(probe, graph=static), lowered, batch_size, captures.uniforms, fingerprint, (place, decided))

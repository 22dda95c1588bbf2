"""A compiled step that measures what sampling rows would add, and what a joint graph is given when it runs by itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from graphopt.passes.vcas.variance_probe import COUNTS, Probe
from torch import Tensor

from graphopt.calls import FlatInputs
from graphopt.compat import pytree
from graphopt.loss import LossFunction, scalar_loss
from graphopt.lower import Lowered, graph_inputs
from graphopt.runtime.uniforms import Uniforms


@dataclass(frozen=True)
class MeasuringStep:
    """A compiled step of a `Probe`.

    Attributes:
        probe: with the static graph that was lowered.
        batch_size: samples.
        fingerprint: of what it was compiled for, the same in every process.
    """

    probe: Probe
    lowered: Lowered
    batch_size: int
    uniforms: Uniforms
    fingerprint: str

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
        return {name: gradient for name, gradient in zip(names, found, strict=True) if gradient is not None}

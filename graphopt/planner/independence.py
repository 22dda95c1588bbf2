"""Whether samples are independent below the boundaries of a backward, tried on data.

Rows can be left out only where no operator mixes samples: what the backward computes for two halves of a batch must add up
to what it computes for the whole. Shapes alone cannot tell; this runs the rewritten graph on both halves, once, before training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from graphopt.analysis.batch_dims import batch_dim, gradient_cone
from graphopt.analysis.boundaries import Boundary, find_boundaries
from graphopt.capture import FlatInputs, tiled, unchanged_rng
from graphopt.compat import no_autocast
from graphopt.errors import PassError
from graphopt.graph import TrainingGraph, descendants
from graphopt.passes.vcas import ROWS, GivenDraws, sample
from graphopt.tangents import for_loss_alone

MOST_ROWS = 8
"""Samples that are tried; more would only cost time."""

TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}
"""Largest difference relative to a gradient's largest entry; 0.1 in half precision. Operators that mix samples are far beyond."""

_MIXING = ("batch_norm_backward", "native_batch_norm_backward", "cudnn_batch_norm_backward", "miopen_batch_norm_backward")


def mixing_reason(graph: TrainingGraph, tensors: Mapping[str, Tensor], inputs: FlatInputs) -> str:
    """Why rows of this graph's backward must not be left out, naming the operator; "" if they may.

    Args:
        graph: as captured, or with gradients cut.
        tensors: the model's parameters and buffers by name.
        inputs: the example batch.
    """
    if not graph.symbolic:
        return f"the batch is not symbolic: {graph.static_reason}"
    graph = for_loss_alone(graph)
    boundaries = find_boundaries(graph)
    if not boundaries:
        return "no gradient passes through one tensor whose rows are samples"
    below = descendants([b.node for b in boundaries])
    for node in graph.graph.nodes:
        name = str(getattr(node.target, "overloadpacket", "")).removeprefix("aten.")
        if node in below and name in _MIXING and _trains(node):
            return f"{node.target} mixes samples: it normalises over the batch"
    trial = _Trial(graph, tensors, inputs)
    if trial.batch_size < 2:
        return "the example batch has only one sample"
    try:
        return trial.run(boundaries)
    except PassError as error:
        return str(error)


def _trains(node: fx.Node) -> bool:
    """A batch norm in evaluation mode treats every sample by itself."""
    flags = [a for a in node.args if isinstance(a, bool)]
    return not flags or flags[0]


class _Trial:
    """A few samples, and what the graph computes for them."""

    def __init__(self, graph: TrainingGraph, tensors: Mapping[str, Tensor], inputs: FlatInputs) -> None:
        dims = graph.batch_dims
        own = next((int(t.shape[d]) for t, d in zip(inputs.tensors, dims, strict=True) if d is not None), 0)
        few = min(own, MOST_ROWS) if graph.accepts(min(own, MOST_ROWS)) else own
        rows = [t if d is None else t.detach().narrow(d, 0, few) for t, d in zip(inputs.tensors, dims, strict=True)]
        repeats = 2 if 2 <= few < 4 and graph.accepts(2 * few) else 1
        self.batch_size = few * repeats
        self.graph = replace(graph, batch_size=self.batch_size)
        self.first = [i for i in range(self.batch_size) if i % max(few, 1) < few / 2]
        self.rest = [i for i in range(self.batch_size) if i not in self.first]
        self.tensors = tensors
        self.inputs = tiled(rows, dims, repeats)

    def run(self, boundaries: Sequence[Boundary]) -> str:
        """Compare the whole with the sum of two parts."""
        count = max(len(self.first), len(self.rest), 2)
        rewritten = self.graph.clone()
        sample(rewritten, {ROWS + b.name: count / self.batch_size for b in boundaries}, GivenDraws(rewritten))
        whole = self._gradients(self.graph, self.first)
        first, rest = (self._gradients(rewritten, part) for part in (self.first, self.rest))
        sampled = {name for b in boundaries for name in b.parameters}
        largest = max((float(g.abs().max()) for g in whole.values() if g.numel()), default=0.0)
        for name, exact in whole.items():
            if exact.numel():
                ours = first[name] + rest[name] if name in sampled else first[name]
                if not self._agree(ours, exact, 1e-3 * largest):
                    return self._explain(rewritten, name)
        return ""

    def _agree(self, ours: Tensor, exact: Tensor, least: float = 0.0) -> bool:
        types = {t.dtype for t in self.tensors.values() if t.is_floating_point()}
        coarsest = min(types, key=lambda t: t.itemsize, default=torch.float32)
        scale = max(float(exact.abs().max()), least)
        return bool((ours - exact).abs().max() <= TOLERANCE.get(coarsest, 0.1) * scale)

    def _gradients(self, graph: TrainingGraph, part: Sequence[int]) -> dict[str, Tensor]:
        results = self._execute(graph, part, fx.Interpreter(graph.module))
        return {
            desc.target.target: value.double()
            for desc, value in zip(graph.outputs, results, strict=True)
            if desc.kind == "gradient" and desc.target.kind == "parameter" and isinstance(value, Tensor)
        }

    def _execute(self, graph: TrainingGraph, part: Sequence[int], interpreter: fx.Interpreter) -> Sequence[Any]:
        """Run a joint graph with random gradients of its outputs, on the rows of `part` below the first boundaries."""
        generator = torch.Generator().manual_seed(0)
        values: list[Any] = []
        for desc, node in zip(graph.inputs, graph.placeholders, strict=True):
            recorded = node.meta["val"]
            if desc.kind == "input":
                values.append(self.inputs[desc.target].detach())
            elif desc.kind == "tangent":
                shape = [graph.at(s, self.batch_size) for s in recorded.shape]
                values.append(torch.randn(shape, generator=generator).to(recorded.device, recorded.dtype))
            elif desc.kind == "given":
                values.append(self._given(part, int(recorded.shape[0]), *desc.target).to(recorded.device))
            else:
                values.append(self.tensors[desc.target].detach())
        with torch.no_grad(), no_autocast(), unchanged_rng(values):
            torch.manual_seed(0)
            results: Sequence[Any] = interpreter.run(*values)
        return results

    def _given(self, part: Sequence[int], count: int, _: int, what: str, whole: bool) -> Tensor:
        """Rows of `part`, filled up with others that count nothing; below that boundary all that are left, turned round."""
        others = [i for i in range(self.batch_size) if i not in part]
        if what == "rows":
            return torch.tensor([*part, *others][:count] if whole else list(range(count))[::-1])
        return torch.tensor([1.0] * len(part) + [0.0] * (count - len(part)) if whole else [1.0] * count, dtype=torch.float64)

    def _explain(self, rewritten: TrainingGraph, name: str) -> str:
        """The first operator whose rows differ from those of the whole batch."""
        whole, half = _Recorder(self.graph.module), _Recorder(rewritten.module)
        self._execute(self.graph, self.first, whole)
        self._execute(rewritten, self.first, half)
        cone = gradient_cone(self.graph)
        for node in self.graph.graph.nodes:
            ours, exact = half.values.get(node.name), whole.values.get(node.name)
            if node not in cone or ours is None or exact is None or ours.shape == exact.shape:
                continue
            rows = batch_dim(self.graph, node.meta["val"])
            if rows is None:
                continue
            exact = exact.unflatten(rows.dim, (-1, rows.inner)).index_select(rows.dim, torch.tensor(self.first))
            ours = ours.unflatten(rows.dim, (-1, rows.inner))
            either_way = (o.narrow(rows.dim, 0, len(self.first)) for o in (ours, ours.flip(rows.dim)))
            if not any(self._agree(o.double(), exact.double()) for o in either_way):
                return f"{node.target} mixes samples: its rows for half of the batch differ from those for all of it"
        return f"the gradients of {name} for two halves of the batch do not add up to that for all of it"


class _Recorder(fx.Interpreter):
    """Keeps every tensor by the name of its node."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.values: dict[str, Tensor] = {}

    def run_node(self, n: fx.Node) -> Any:
        """Run one node and keep its result."""
        result = super().run_node(n)
        if isinstance(result, Tensor):
            self.values[n.name] = result
        return result

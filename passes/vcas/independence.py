"""Whether samples are independent below the boundaries of a backward, tried on data.

Rows can be left out, and the others scaled, only where every operator is separable by sample and linear: what the backward
computes for two halves of a batch, with gradients twice as large, must on average be what it computes for the whole. Shapes alone
cannot tell; this runs the rewritten graph on both halves, once per captured graph.
Weights and inputs are disturbed and the gradients at the boundaries are random, so that a branch that does nothing yet, equal
samples or a loss that ignores some of them hide nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from graphopt.passes.vcas.boundaries import Boundary, find_boundaries
from graphopt.passes.vcas.ops import in_float64
from graphopt.passes.vcas.rewrite import ROWS, GivenDraws, sample
from torch import Tensor, fx

from graphopt.analysis.batch_dims import NoRows, batch_dim, gradient_cone
from graphopt.analysis.liveness import can_be_view
from graphopt.capture import tiled, unchanged_rng
from graphopt.compat import no_autocast
from graphopt.errors import GraphoptError
from graphopt.graph import TrainingGraph, descendants
from graphopt.transforms.symbolic_zeros import for_loss_alone

MOST_ROWS = 8
"""Samples that are tried; more would only cost time."""

TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4}
"""Largest difference relative to a gradient's largest entry, by the coarsest type in the graph; 0.1 in half precision."""

SCALE = 2.0
"""By which gradients of kept rows are scaled: 1 would not show that an operator clips them."""

NOISE = 0.1
"""How far weights are moved, relative to their spread; weights that are all alike are moved by this much."""


def why_not_separable(graph: TrainingGraph, tensors: Mapping[str, Tensor], inputs: Sequence[Tensor]) -> str:
    """Why rows of this graph's backward must not be left out, naming the operator; "" if they may.

    Args:
        graph: as captured, or with gradients cut.
        tensors: the model's parameters and buffers by name.
        inputs: a batch that the graph was captured for, in the order of `graph.batch_dims`.
    """
    if not graph.symbolic:
        return f"the batch is not symbolic: {graph.static_reason}"
    added = next((d.target for d in graph.inputs if d.kind == "input" and not isinstance(d.target, int)), None)
    if added is not None:
        return f"the step has an input of torch's own ({added}), as of checks in torch.linalg.cholesky; cholesky_ex has none"
    if any(desc.kind == "backward mutation" for desc in graph.outputs) or any(_is_written(node) for node in graph.placeholders):
        return "the backward of an operator writes to a tensor of the model, which would be computed of the rows that are drawn"
    try:
        graph = for_loss_alone(graph)
        boundaries = find_boundaries(graph)
        if not boundaries:
            return "no gradient passes through one tensor whose rows are samples"
        below = descendants([b.node for b in boundaries])
        for node in graph.graph.nodes:
            if node in below and _inseparable(graph, node):
                return f"{node.target} is not separable by sample"
        trial = _Trial(graph, tensors, inputs)
        if trial.batch_size < 2:
            return "the example batch has only one sample"
        return trial.run(boundaries)
    except GraphoptError as error:
        return str(error).rstrip(".")
    except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError) as error:
        return f"the samples could not be tried apart: {' '.join(str(error).split())[:300]}"


def _is_written(placeholder: fx.Node) -> bool:
    """Whether a captured graph writes to an input itself, as its backward alone does: what the forward writes is returned."""
    return any(user.target is torch.ops.aten.copy_.default and user.args[0] is placeholder for user in placeholder.users)


def _inseparable(graph: TrainingGraph, node: fx.Node) -> bool:
    """Whether an operator is known not to be separable by sample, whatever the data."""
    name = str(getattr(node.target, "overloadpacket", "")).removeprefix("aten.")
    if name == "embedding_dense_backward":
        return bool(node.args[4])  # scaled by how often an index occurs in the batch
    if not name.endswith("batch_norm_backward"):
        return False
    flags = [a for a in node.args if isinstance(a, bool)]
    try:
        rows = batch_dim(graph, node.args[0].meta["val"])  # type: ignore[union-attr]
    except NoRows:
        return True
    # In evaluation mode every sample is by itself; so it is where samples are channels, as instance norm has them.
    return (not flags or flags[0]) and (rows is None or rows.dim == 0)


class _Trial:
    """A few samples, and what the graph computes for them."""

    def __init__(self, graph: TrainingGraph, tensors: Mapping[str, Tensor], inputs: Sequence[Tensor]) -> None:
        dims = graph.batch_dims
        own = next((int(t.shape[d]) for t, d in zip(inputs, dims, strict=True) if d is not None), 0)
        few = min(own, MOST_ROWS) if graph.accepts(min(own, MOST_ROWS)) else own
        rows = [t if d is None else t.detach().narrow(d, 0, few) for t, d in zip(inputs, dims, strict=True)]
        repeats = 2 if 2 <= few < 4 and graph.accepts(2 * few) else 1
        self.batch_size = few * repeats
        self.graph = replace(graph, batch_size=self.batch_size)
        self.first = [i for i in range(self.batch_size) if i % max(few, 1) < few / 2]
        self.rest = [i for i in range(self.batch_size) if i not in self.first]
        self.generator = torch.Generator().manual_seed(0)
        used = {d.target for d in graph.inputs if d.kind == "parameter"}
        self.tensors = {name: self._moved(t.detach()) if name in used else t.detach() for name, t in tensors.items()}
        self.inputs = [self._other_data(t) for t in tiled(rows, dims, repeats)]
        types = {
            value.dtype
            for node in graph.graph.nodes
            if isinstance(value := node.meta.get("val"), Tensor) and value.is_floating_point()
        }
        self.tolerance = TOLERANCE.get(min(types, key=lambda t: t.itemsize, default=torch.float32), 0.1)

    def run(self, boundaries: Sequence[Boundary]) -> str:
        """Compare the whole with the mean of two parts, of each of which gradients are twice as large."""
        count = max(len(self.first), len(self.rest), 2)
        rewritten = self.graph.clone()
        sample(rewritten, {ROWS + b.name: count / self.batch_size for b in boundaries}, GivenDraws(rewritten))
        tops = {b.node.name: i for i, b in enumerate(boundaries) if b.parent is None}
        whole = self._gradients(self.graph, self.first, tops)
        first, rest = (self._gradients(rewritten, part, tops) for part in (self.first, self.rest))
        largest = max((float(g.abs().max()) for g in whole.values() if g.numel()), default=0.0)
        for name, exact in whole.items():
            if not exact.numel():
                continue
            ours = (first[name] + rest[name]) / SCALE
            if not torch.isfinite(exact).all() or not torch.isfinite(ours).all():
                return f"the samples could not be tried apart: the gradient of {name} is not finite"
            if not self._agree(ours, exact, 1e-3 * largest):
                return self._explain(rewritten, name, tops)
        return ""

    def _moved(self, tensor: Tensor) -> Tensor:
        """A weight near `tensor`, so that a branch scaled by zero is not out of sight."""
        if not (tensor.is_floating_point() or tensor.is_complex()) or not tensor.numel():
            return tensor
        spread = float(in_float64(tensor).std()) if tensor.numel() > 1 else 0.0
        return tensor + _noise(tensor.shape, self.generator, tensor) * NOISE * (spread or 1.0)

    def _other_data(self, tensor: Tensor) -> Tensor:
        """Numbers like those of an input, but other ones in every sample; masks stay as they are."""
        if tensor.is_floating_point() or tensor.is_complex():
            return self._moved(tensor)
        counts = tensor.dtype in (torch.int64, torch.int32) and tensor.numel()
        if not counts or int(tensor.max()) <= 1:
            return tensor
        drawn = torch.randint(int(tensor.max()) + 1, tensor.shape, generator=self.generator).to(tensor)
        return torch.where(tensor < 0, tensor, drawn)

    def _agree(self, ours: Tensor, exact: Tensor, least: float = 0.0) -> bool:
        if not exact.numel():
            return True
        scale = max(float(exact.abs().max()), least)
        return bool((ours - exact).abs().max() <= self.tolerance * scale)

    def _gradients(self, graph: TrainingGraph, part: Sequence[int], tops: Mapping[str, int]) -> dict[str, Tensor]:
        results = self._execute(graph, part, _Runner(graph.module, tops))
        return {
            f"input {desc.target.target}" if desc.target.kind == "input" else str(desc.target.target): in_float64(value)
            for desc, value in zip(graph.outputs, results, strict=True)
            if desc.kind == "gradient" and isinstance(value, Tensor)
        }

    def _execute(self, graph: TrainingGraph, part: Sequence[int], interpreter: fx.Interpreter) -> Sequence[Any]:
        """Run a joint graph on the rows of `part` below the first boundaries."""
        generator = torch.Generator().manual_seed(0)
        values: list[Any] = []
        for desc, node in zip(graph.inputs, graph.placeholders, strict=True):
            recorded = node.meta["val"]
            if not isinstance(recorded, Tensor):
                values.append(graph.at(recorded, self.batch_size))
            elif desc.kind == "input":
                values.append(self.inputs[desc.target].detach())
            elif desc.kind == "tangent":
                shape = [graph.at(s, self.batch_size) for s in recorded.shape]
                values.append(_noise(shape, generator, recorded))
            elif desc.kind == "given":
                values.append(self._given(part, int(recorded.shape[0]), *desc.target).to(recorded.device))
            else:
                values.append(self.tensors[desc.target])
        with torch.no_grad(), no_autocast(), unchanged_rng([v for v in values if isinstance(v, Tensor)]):
            torch.manual_seed(0)
            results: Sequence[Any] = interpreter.run(*values, enable_io_processing=False)
        return results

    def _given(self, part: Sequence[int], count: int, _: int, what: str, whole: bool) -> Tensor:
        """Rows of `part`, filled up with others that count nothing; below that boundary all that are left, turned round."""
        others = [i for i in range(self.batch_size) if i not in part]
        if what == "rows":
            return torch.tensor([*part, *others][:count] if whole else list(range(count))[::-1])
        return torch.tensor([SCALE] * len(part) + [0.0] * (count - len(part)) if whole else [1.0] * count, dtype=torch.float64)

    def _explain(self, rewritten: TrainingGraph, name: str, tops: Mapping[str, int]) -> str:
        """The first operator whose rows differ from those of the whole batch."""
        whole, half = _Runner(self.graph.module, tops, keep=True), _Runner(rewritten.module, tops, keep=True)
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
            first = torch.tensor(self.first, device=exact.device)
            exact = exact.unflatten(rows.dim, (-1, rows.inner)).index_select(rows.dim, first)
            ours = ours.unflatten(rows.dim, (-1, rows.inner))
            either_way = (o.narrow(rows.dim, 0, len(self.first)) for o in (ours, ours.flip(rows.dim)))
            if not any(self._agree(in_float64(o) / SCALE, in_float64(exact)) for o in either_way):
                if can_be_view(node):
                    return f"{node.target} joins the batch with a dimension before it, so that a sample's rows are not together"
                source = node.args[0] if isinstance(node.args[0], fx.Node) and "getitem" in str(node.target) else node
                why = "its rows for half of the batch, with gradients twice as large, are not twice those for all of it"
                return f"{source.target} is not linear and separable by sample: {why}"
        return f"the gradients of {name} for two halves of the batch do not add up to that for all of it"


def _noise(shape: Sequence[int], generator: torch.Generator, like: Tensor) -> Tensor:
    """Normal random numbers, complex ones in both of their parts."""
    drawn = torch.randn(shape, generator=generator, dtype=like.dtype if like.is_complex() else None)
    return drawn.to(like.device, like.dtype)


class _Runner(fx.Interpreter):
    """Runs a joint graph with random gradients at the first boundaries; can keep every tensor by its node's name."""

    def __init__(self, module: fx.GraphModule, tops: Mapping[str, int], keep: bool = False) -> None:
        super().__init__(module)
        self.tops = tops
        self.keep = keep
        self.values: dict[str, Tensor] = {}

    def run_node(self, n: fx.Node) -> Any:
        """Run one node."""
        result = super().run_node(n)
        if isinstance(result, Tensor) and n.name in self.tops:
            result = _noise(result.shape, torch.Generator().manual_seed(self.tops[n.name]), result)
        if isinstance(result, Tensor) and self.keep:
            self.values[n.name] = result
        return result

"""A region as it was compiled, and whom its compilation works for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import SymInt, Tensor, fx, nn

from graphopt.compat import expression, versions_of
from graphopt.frontend.region import Region
from graphopt.frontend.values import Values
from graphopt.graph import TrainingGraph, ancestors
from graphopt.passes import PassReport
from graphopt.planner.plan import Plan


@dataclass(frozen=True)
class Surroundings:
    """What is the same around every run of a region: Dynamo compiles another region where it changes.

    Attributes:
        loss: which output is the first leaf of what the model returns; None: none is.
        unasked: of each output without a backward: its position, its number among the autograd node's outputs, and the leaf's.
        autocast: automatic mixed precision, as arguments of `torch.autocast`.
    """

    loss: int | None
    unasked: tuple[tuple[int, int, int], ...]
    autocast: tuple[tuple[str, torch.dtype, bool], ...]

    @staticmethod
    def of(region: CompiledRegion, outputs: Sequence[Any], node: Any, leaves: Sequence[Any], model: nn.Module) -> Surroundings:
        """Find them after a run: `outputs` are the region's, made by the autograd node, `leaves` the model's."""
        found = [next((k for k, leaf in enumerate(leaves) if leaf is output), None) for output in outputs]
        own = [i for i in region.unasked if outputs[i].grad_fn is node]  # others were cut
        unasked = [(i, outputs[i].output_nr, k) for i in own if (k := found[i]) is not None]
        devices = sorted({"cpu", *(p.device.type for p in model.parameters())})
        autocast = [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in devices]
        return Surroundings(found.index(0) if 0 in found else None, tuple(unasked), tuple(autocast))


@dataclass(eq=False)
class CompiledRegion:
    """A region as it was compiled.

    Attributes:
        region: its parameters.
        graph: the joint graph that runs; None where there is no backward, or where all came from torch's cache on disk.
        halves: the forward and the backward before they were compiled; None likewise, and until asked for with `again` where all
            came from torch's cache on disk.
        again: makes the halves that came from there.
        reports: what each pass did.
        compile_seconds: of compiling, rewriting included; `rewrite_seconds` is the passes' share.
        sizes: of the last run, in the order of the placeholders that are numbers.
        sampled_part: see `Plan.sampled_part`.
        reduced: the plan's approximations could not be carried out.
        needless: positions of its inputs that require a gradient which leads to nothing that is trained.
        unasked: positions of its outputs that have no backward; see `graphopt.frontend.outputs`.
        surroundings: None until the model has returned.
        gated: it waits by itself for what is still to be done to its weights; see `graphopt.ops.host_callback.gate`.
    """

    region: Region
    graph: TrainingGraph | None = None
    halves: tuple[fx.GraphModule, fx.GraphModule] | None = None
    again: Callable[[], None] | None = None
    reports: tuple[PassReport, ...] = ()
    compile_seconds: float = 0.0
    rewrite_seconds: float = 0.0
    sizes: tuple[int, ...] = ()
    sampled_part: float = 1.0
    reduced: bool = False
    gated: bool = False
    needless: tuple[int, ...] = ()
    unasked: tuple[int, ...] = ()
    surroundings: Surroundings | None = None

    def graph_of_last_run(self) -> TrainingGraph | None:
        """`graph`, with the sizes of the last run in the place of those that it was compiled with."""
        if self.graph is None or not self.sizes:
            return self.graph
        numbers = [n.meta.get("val") for n in self.graph.placeholders]
        symbols = [next(iter(s.free_symbols)) for v in numbers if isinstance(v, SymInt) and (s := expression(v)).is_Symbol]
        return replace(self.graph, sizes={**self.graph.sizes, **dict(zip(symbols, self.sizes, strict=False))})

    def sources(self, trained: Collection[str]) -> list[tuple[int, tuple[int, ...]]]:
        """By output that reads no parameter that is trained, the inputs that it reads."""
        graph, names = self.graph, self.region.names
        if graph is None:
            return []
        positions: dict[fx.Node, int] = {}
        kept: set[fx.Node] = set()
        for desc, node in zip(graph.inputs, graph.placeholders, strict=True):
            if desc.target in trained:
                kept.add(node)
            elif desc.kind == "input" and isinstance(desc.target, int):
                positions[node] = desc.target
            elif desc.kind == "buffer":  # which may require a gradient that the caller holds
                positions[node] = names.index(desc.target)
            elif desc.target not in names:  # something of torch's own
                kept.add(node)
        found = []
        for made_by, result in zip(graph.outputs, graph.results, strict=True):
            if made_by.kind == "output" and isinstance(made_by.target, int) and isinstance(result, fx.Node):
                read = ancestors([result])
                if not read & kept:
                    found.append((made_by.target, tuple(positions[node] for node in read if node in positions)))
        return found


@dataclass(eq=False, slots=True)
class Ran:
    """What a step ran and read.

    Attributes:
        region: that it consists of.
        numbers: that it took.
        tensors: that it took, without buffers that it changes, and their versions before it ran.
    """

    region: CompiledRegion
    numbers: tuple[int, ...]
    tensors: Sequence[Tensor]
    versions: Sequence[int]

    def has_changed(self, but: Collection[int]) -> bool:
        """Whether a tensor was modified since, but for those of these ids."""
        found = zip(self.tensors, versions_of(self.tensors), self.versions, strict=True)
        return any(now != before and id(t) not in but for t, now, before in found)

    def is_like(self, other: Ran) -> bool:
        """Whether the other one is the same region, with the same numbers and values."""
        if self.region is not other.region or self.numbers != other.numbers:
            return False
        return all(a is b or _equal(a.detach(), b.detach()) for a, b in zip(self.tensors, other.tensors, strict=True))


class Host(Protocol):
    """Whom a backend works for; what has a body here is that of a graph by itself.

    Attributes:
        modes: that watch operators; see `observed_by`.
        begun: another region has run in the call under way.
        settled: nothing is expected to be compiled; if something is after all, `Unsettled` has the host prepare for it.
        planned: the parameters that a plan knows of; others are trained.
        values: that passes have graphs exchange with Python.
    """

    modes: Sequence[Any] = ()
    begun: bool = False
    settled: bool = False
    planned: Collection[str]
    values: Values

    def names(self) -> Mapping[int, Sequence[str]]:
        """See `tensor_names`; others are named by where Dynamo found them."""
        return {}

    def batch_size(self) -> int:
        """Of the call under way; 1 where it is not known."""
        return 1

    def batch_dims(self, values: Sequence[Any]) -> Sequence[int | None]:
        """Which dimension of each value is the batch, among the tensors of the call under way."""
        return [None] * len(values)

    def is_given(self, tensor: Tensor) -> bool:
        """Whether a tensor is an argument of the call under way."""
        return False

    def check(self, plan: Plan) -> None:
        """Raise what the user has to know before anything is compiled under a plan; Dynamo itself guards what is frozen."""
        return

    def compiled(self, region: CompiledRegion) -> None:
        """Called with a region that was compiled."""
        return

    def ran(self, region: CompiledRegion) -> None:
        """Called with a region that runs."""
        return

    def returned(self, node: Any, outputs: Sequence[Any], ran: Ran) -> None:
        """Called with the outputs of a region of which some have no backward.

        Args:
            node: of autograd, which wants an `ask`; see `graphopt.frontend.outputs.answer`.
        """
        return

    def drop_unselected(self) -> None:
        """Tensors that are not selected are to lose every gradient that reaches them."""
        ...

    def note(self, text: str) -> None:
        """Warn, once, of what runs in another way than planned."""
        ...


def _equal(a: Tensor, b: Tensor) -> bool:
    alike = (a.shape, a.dtype, a.layout) == (b.shape, b.dtype, torch.strided)
    return alike and torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=a.is_floating_point() or a.is_complex())

"""A region as it was compiled, and whom its compilation works for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import SymInt, fx

from graphopt.compat import expression
from graphopt.frontend.region import Region
from graphopt.frontend.values import Values
from graphopt.graph import TrainingGraph
from graphopt.passes import PassReport
from graphopt.planner.plan import Plan


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
        gated: it waits by itself for what is still to be done to its weights; see `graphopt.passes.lsp.offload_nodes`.
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

    def graph_of_last_run(self) -> TrainingGraph | None:
        """`graph`, with the sizes of the last run in the place of those that it was compiled with."""
        if self.graph is None or not self.sizes:
            return self.graph
        numbers = [n.meta.get("val") for n in self.graph.placeholders]
        symbols = [next(iter(s.free_symbols)) for v in numbers if isinstance(v, SymInt) and (s := expression(v)).is_Symbol]
        return replace(self.graph, sizes={**self.graph.sizes, **dict(zip(symbols, self.sizes, strict=False))})


class Host(Protocol):
    """Whom a backend works for.

    Attributes:
        modes: that watch operators; see `observed_by`.
        settled: nothing is expected to be compiled; if something is after all, `Unsettled` has the host prepare for it.
        values: that passes have graphs exchange with Python.
    """

    modes: Sequence[Any]
    settled: bool
    values: Values

    def names(self) -> Mapping[int, Sequence[str]]:
        """See `tensor_names`."""
        ...

    def planned(self) -> Collection[str]:
        """The parameters that a plan knows of; others are trained."""
        ...

    def batch_size(self) -> int:
        """Of the call under way."""
        ...

    def batch_dims(self, values: Sequence[Any]) -> Sequence[int | None]:
        """Which dimension of each value is the batch, among the tensors of the call under way."""
        ...

    def check(self, plan: Plan) -> None:
        """Raise what the user has to know before anything is compiled under a plan."""
        ...

    def compiled(self, region: CompiledRegion) -> None:
        """Called with a region that was compiled."""
        ...

    def ran(self, region: CompiledRegion) -> None:
        """Called with a region that runs."""
        ...

    def drop_unselected(self) -> None:
        """Tensors that are not selected are to lose every gradient that reaches them."""
        ...

    def note(self, text: str) -> None:
        """Warn, once, of what runs in another way than planned."""
        ...

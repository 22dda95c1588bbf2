"""The contract of a pass, and the one way to run it.

A pass is a small object. `applicable` lists the sites that it could rewrite, `apply` carries out decisions that the planner
took. It never sees the caller's graph: `run_pass` gives it a clone, verifies the result and measures the difference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Protocol, TypeVar, runtime_checkable

from torch import Tensor

from graphopt.analysis.flops import flop_profile
from graphopt.analysis.kept import kept
from graphopt.analysis.saved import saved_bytes
from graphopt.compat import InputDesc, OutputDesc
from graphopt.graph import TrainingGraph
from graphopt.transforms.verify import verify

Desc = TypeVar("Desc", InputDesc, OutputDesc)


class Preserves(Enum):
    """What a pass keeps of the gradients of eager autograd.

    EXACT: every gradient that is still computed equals autograd's to rounding. UNBIASED: its expectation does.
    PROJECTED: it is a stated linear image of autograd's.
    """

    EXACT = "exact"
    UNBIASED = "unbiased"
    PROJECTED = "projected"


@dataclass(frozen=True)
class Site:
    """A place that a pass could rewrite, named by what the user knows (a parameter, a layer)."""

    name: str


@dataclass(frozen=True)
class Changes:
    """What `apply` did.

    Attributes:
        changed: names of the sites that were rewritten.
        left_alone: reason by name of each site that was not.
    """

    changed: tuple[str, ...]
    left_alone: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class PassReport:
    """What a pass did to one graph, measured on the graph.

    Attributes:
        name, preserves: of the pass.
        changes: see `Changes`.
        step_flops_before, step_flops_after: FLOPs of forward and backward at the captured batch size.
        saved_bytes_before, saved_bytes_after: bytes of activations that the forward keeps for the backward.
        choices: how the planner decided, one per site, where it says so.
    """

    name: str
    preserves: Preserves
    changes: Changes
    step_flops_before: int
    step_flops_after: int
    saved_bytes_before: int
    saved_bytes_after: int
    choices: tuple[Any, ...] = ()


@runtime_checkable
class Pass(Protocol):
    """The contract."""

    @property
    def name(self) -> str:
        """By which reports and errors call it."""
        ...

    @property
    def preserves(self) -> Preserves:
        """What it keeps of the gradients."""
        ...

    @property
    def serves(self) -> tuple[str, ...]:
        """The fields of `Budget` that it can meet."""
        ...

    def applicable(self, graph: TrainingGraph) -> list[Site]:
        """The sites of `graph` that the pass could rewrite."""
        ...

    def apply(self, graph: TrainingGraph, decisions: Any) -> Changes:
        """Rewrite `graph` in place as `decisions` say."""
        ...


@runtime_checkable
class Projected(Pass, Protocol):
    """What a pass that is PROJECTED also has, so that `graphopt.testing.check_pass` can hold it to its contract.

    Its graphs have inputs of kind "given", and of kind "compressed", whose gradients they return in place of parameters'.
    """

    def example_inputs(self, graph: TrainingGraph, seed: int) -> Mapping[InputDesc, Tensor]:
        """A value for every input that was added to the rewritten `graph`."""
        ...

    def image(self, name: str, given: Mapping[InputDesc, Tensor], gradients: Mapping[str, Tensor]) -> Tensor:
        """What the compressed gradient of parameter `name` must be, from autograd's `gradients`."""
        ...


@runtime_checkable
class Supplying(Pass, Protocol):
    """What a pass also has that adds inputs or results of its own to a graph; "random" inputs need none of it."""

    def supply(self, desc: InputDesc, size: Sequence[int], like: Tensor) -> Tensor:
        """The value of an added input in the step under way, on the device of `like`."""
        ...

    def take(self, desc: InputDesc | OutputDesc, value: Tensor) -> None:
        """The gradient of an added input, or the value of a slot of the backward; called in the middle of it."""
        ...


def numbered(name: str, known: Iterable[str]) -> str:
    """The name of a site; the second of one name, and every further one, gets a number."""
    count = 1 + sum(other.partition(" #")[0] == name for other in known)
    return name if count == 1 else f"{name} #{count}"


def run_pass(rewrite: Pass, graph: TrainingGraph, decisions: Any) -> tuple[TrainingGraph, PassReport]:
    """Apply a pass to a clone of `graph`, verify the clone, and report.

    Raises:
        PassError: the pass refused the decisions or left an inconsistent graph.
    """
    rewritten = graph.clone()
    changes = rewrite.apply(rewritten, decisions)
    rewritten.inputs = _owned(rewritten.inputs, graph.inputs, rewrite.name)
    rewritten.outputs = _owned(rewritten.outputs, graph.outputs, rewrite.name)
    verify(rewritten, graph)
    flops_before, saved_before = _figures(graph)
    flops_after, saved_after = _figures(rewritten)
    report = PassReport(rewrite.name, rewrite.preserves, changes, flops_before, flops_after, saved_before, saved_after)
    return rewritten, report


def _owned(descs: Iterable[Desc], before: Iterable[Desc], owner: str) -> tuple[Desc, ...]:
    """What a graph takes or returns, knowing which pass added it: its values come from that pass, and go to it, alone."""
    left, found = Counter(before), []  # another pass may add what one before it has added, such as a result of the same name
    for desc in descs:
        left[desc] -= 1
        if left[desc] < 0:
            target = replace(desc.target, owner=owner) if desc.kind == "gradient" else desc.target
            desc = replace(desc, target=target, owner=owner)
        found.append(desc)
    return tuple(found)


def _figures(graph: TrainingGraph) -> tuple[int, int]:
    """FLOPs of a step and bytes that it saves, counted once."""
    return kept(graph, "counts", None, lambda: (flop_profile(graph).step, saved_bytes(graph)))

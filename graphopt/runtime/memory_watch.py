"""Steps that need more memory than those that a plan within `Budget(memory=...)` was made for."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Hashable, Sequence

import torch

from graphopt import compat
from graphopt.calls import FlatInputs, batch_size_of
from graphopt.errors import InputError, first_line
from graphopt.frontend.step import RegionStep
from graphopt.graph import TrainingGraph
from graphopt.runtime.bounded_cache import BoundedCache

logger = logging.getLogger(__name__)


Shapes = tuple[torch.Size, ...]

KEPT = 64
"""Shapes that are known to have been looked at in a step."""


class MemoryWatch:
    """Predicts the peak of steps whose inputs are larger than those that are known to fit, or that train more.

    Of inputs that are larger than some of which the user was told there is nothing new to tell.
    """

    def __init__(self) -> None:
        self._seen: BoundedCache[Shapes, weakref.ref[RegionStep]] = BoundedCache(KEPT)
        self._fitting: dict[Hashable, list[Shapes]] = {}
        self._told: dict[Hashable, list[Shapes]] = {}

    def __reduce__(self) -> tuple[type[MemoryWatch], tuple[()]]:
        return MemoryWatch, ()  # a copy has its own steps

    def warning(
        self, step: RegionStep, inputs: FlatInputs, planned: TrainingGraph, captured: Callable[[], TrainingGraph]
    ) -> str | None:
        """What to tell of a step that needs more memory than its plan's budget allows; None where there is nothing new to tell.

        Args:
            planned: that the plan was made on.
            captured: the graph of these inputs.
        """
        limit = step.plan.memory
        shapes = tuple(t.shape for t in inputs.tensors)
        seen = self._seen.get(shapes)
        if limit is None or step.plan.measures or (seen is not None and seen() is step):
            return None
        self._seen.put(shapes, weakref.ref(step))
        more = {p.name for graph in step.graphs for p in graph.trainable}.difference(p.name for p in planned.trainable)
        kind = step.plan.key, frozenset(more)
        fitting, told = self._fitting.setdefault(kind, []), self._told.setdefault(kind, [])
        if not more and _no_larger(shapes, _input_shapes(planned)):
            return None
        if any(_no_larger(shapes, known) for known in fitting) or any(_no_larger(known, shapes) for known in told):
            return None
        plan, size = step.plan.without_sampling(), _batch_size(inputs, planned) or step.graph.batch_size
        try:
            graph = captured()
            with compat.unobserved():
                peak = limit.peak_once(graph, plan.key, lambda: plan.rewrite(graph, size)[0], size)
        except Exception as error:  # training never dies of an optimisation
            logger.warning("the memory of a batch of %d cannot be predicted: %s", size, first_line(error))
            return None
        (fitting if peak <= limit.peak_bytes else told).append(shapes)
        if peak <= limit.peak_bytes:
            return None
        given = ", ".join(str(tuple(shape)) for shape in shapes)
        why = (
            "fewer trained tensors: have opt.reselect(batch) plan anew"
            if more
            else "a smaller example: give optimize() the largest batch, or use smaller ones"
        )
        needs = f"a step of inputs {given} needs {peak:,} bytes where memory={limit.peak_bytes:,}"
        return f"{needs}, because the plan was made for {why}"


def _batch_size(inputs: FlatInputs, planned: TrainingGraph) -> int | None:
    """Samples in a call; None where its inputs are not those that the plan was made on."""
    try:
        return batch_size_of(inputs, planned.batch_dims)
    except (InputError, ValueError, IndexError):
        return None


def _input_shapes(graph: TrainingGraph) -> list[tuple[int, ...]]:
    """Of the caller's tensors, at the batch size that the graph is planned for."""
    nodes = zip(graph.inputs, graph.placeholders, strict=True)
    by_position = {desc.target: node.meta["val"].shape for desc, node in nodes if desc.kind == "input"}
    return [tuple(int(graph.at(size, graph.batch_size)) for size in by_position[i]) for i in sorted(by_position)]


def _no_larger(shapes: Shapes, others: Sequence[tuple[int, ...]]) -> bool:
    return len(shapes) == len(others) and all(
        len(a) == len(b) and all(x <= y for x, y in zip(a, b, strict=True)) for a, b in zip(shapes, others, strict=True)
    )

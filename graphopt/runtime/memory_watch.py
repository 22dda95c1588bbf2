"""Steps that need more memory than those that a plan within `Budget(memory=...)` was made for."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch

from graphopt import compat
from graphopt.calls import FlatInputs, batch_size_of
from graphopt.errors import InputError, first_line
from graphopt.frontend.step import RegionStep
from graphopt.graph import TrainingGraph

logger = logging.getLogger(__name__)


class MemoryWatch:
    """Predicts the peak of steps whose inputs are larger than the planned ones, or that train more, once per shape and step."""

    def __init__(self) -> None:
        self._seen: dict[tuple[torch.Size, ...], weakref.ref[RegionStep]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Without steps: a copy has its own."""
        return {"_seen": {}}

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
        self._seen[shapes] = weakref.ref(step)
        more = {p.name for graph in step.graphs for p in graph.trainable}.difference(p.name for p in planned.trainable)
        if not more and _no_larger(shapes, _input_shapes(planned)):
            return None
        plan, size = step.plan.without_sampling(), _batch_size(inputs, planned) or step.graph.batch_size
        try:
            graph = captured()
            with compat.unobserved():
                peak = limit.peak_once(graph, plan.key, lambda: plan.rewrite(graph, size)[0], size)
        except Exception as error:  # training never dies of an optimisation
            logger.warning("the memory of a batch of %d cannot be predicted: %s", size, first_line(error))
            return None
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


def _no_larger(shapes: tuple[torch.Size, ...], others: list[tuple[int, ...]]) -> bool:
    return len(shapes) == len(others) and all(
        len(a) == len(b) and all(x <= y for x, y in zip(a, b, strict=True)) for a, b in zip(shapes, others, strict=True)
    )

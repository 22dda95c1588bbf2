"""Memory profiles for the page: every storage, so that it adds up what the prediction adds up, at several batch sizes."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from typing import Any

from graphopt.analysis.memory import CATEGORIES, PHASES, MemoryProfile
from graphopt.graph import TrainingGraph

MOST_BATCHES = 12
"""On the slider, beside the batch itself."""

MOST_TIMES = 2**20
"""The batch that is looked at, where memory does not grow with it."""

MOST_ROWS = 1000
"""Of the timeline per phase: more than a screen has columns."""


def memory_data(
    graph: TrainingGraph, profiles: Sequence[tuple[str, MemoryProfile]], batch: int, capacity: int | None, reason: str
) -> dict[str, Any]:
    """What the page draws of profiles of one graph, which come with a label each.

    Args:
        batch: of the report.
        capacity: bytes of the device, where it is known.
        reason: why there is one batch size alone, if there is.
    """
    symbolic = all(profile.symbolic for _, profile in profiles)
    batches = _batches(graph, profiles[-1][1], batch, capacity) if symbolic else [batch]
    texts: dict[str, int] = {}
    drawn = [{"label": label, **_profile(profile, batches, texts)} for label, profile in profiles]
    told = {"batch": batch, "batches": batches, "capacity": capacity, "reason": reason, "categories": CATEGORIES}
    return {**told, "texts": list(texts), "profiles": drawn}


def _batches(graph: TrainingGraph, profile: MemoryProfile, batch: int, capacity: int | None) -> list[int]:
    """The batch itself and powers of 2, at equal distances: up to what no longer fits, or 16 times the batch."""
    found, size = {batch}, 1
    while size <= (16 if capacity is None else MOST_TIMES) * batch:
        if graph.accepts(size):
            found.add(size)
        if capacity is not None and size > batch and profile.at(size).peak_bytes > capacity:
            break
        size *= 2
    return sorted({batch, *sorted(found)[:: -math.ceil(len(found) / MOST_BATCHES)]})


def _profile(profile: MemoryProfile, batches: Sequence[int], texts: dict[str, int]) -> dict[str, Any]:
    def text(value: str) -> int:
        return texts.setdefault(value, len(texts))

    at_batches = [profile.at(batch) for batch in batches]
    kept = _kept(profile, {at.peak_row for at in at_batches})
    sizes: dict[tuple[int, ...], int] = {}
    blocks = []
    for k, b in enumerate(profile.blocks):
        born, last = bisect.bisect_left(kept, b.born), bisect.bisect_right(kept, b.last) - 1
        if born > last:
            continue  # it lives between two rows that are drawn
        size = sizes.setdefault(tuple(at.sizes[k] for at in at_batches), len(sizes))
        shape = " × ".join(map(str, b.shape))
        category = CATEGORIES.index(b.category)
        blocks.append((text(b.name), text(b.module), category, born, last, size, text(b.why), text(shape)))
    phases: list[dict[str, Any]] = []
    for k, row in enumerate(kept):
        phase = profile.rows[row].phase
        if not phases or phases[-1]["name"] != phase:
            phases.append({"name": phase, "start": k, "end": k})
        phases[-1]["end"] = k + 1
    steps = [text(profile.rows[row].node) for row in kept]
    return {"steps": steps, "phases": phases, "blocks": blocks, "sizes": list(sizes)}


def _kept(profile: MemoryProfile, wanted: set[int]) -> list[int]:
    """Rows to draw: of a phase with many, those with the most bytes among their neighbours, and `wanted` ones."""
    kept = set(wanted)
    for phase in PHASES:
        rows = [row for row in profile.timeline if row.phase == phase]
        wide = max(1, math.ceil(len(rows) / MOST_ROWS))
        for start in range(0, len(rows), wide):
            kept.add(max(rows[start : start + wide], key=lambda row: row.live).step)
    return sorted(kept)

"""The memory of a rank whose weights `fully_shard` divides: the timeline of one device, with what FSDP2 holds on it.

Every repeated block is gathered before its forward and again before its backward, into a buffer and from there into its weights.
The buffer of a forward is kept until the next gather; that of a backward is filled one block ahead, also for a block that the
backward does not reach. A block's gradients are copied into a buffer once its backward has ended, of which each rank keeps its
rows; that buffer is kept until the next one. What no block has is gathered for the whole step. The model runs as one graph for
each block, so that outputs beside the loss have a gradient, too: zeros.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from graphopt.analysis.memory import MemoryProfile
from graphopt.distributed.predicted import block_of

STATIC = ("parameter", "buffer", "input", "optimizer state")

SCALAR = 8
"""Bytes that a state of an optimizer takes at most that is a number and has no rows."""

Held = tuple[int, int, int]
"""Bytes, and the first moment at which they exist, and the first at which they do not."""


def sharded_peak(profile: MemoryProfile, ranks: int, copies: bool = False) -> int:
    """Peak bytes on the rank that holds most.

    Args:
        profile: of one device, at some batch size.
        copies: the transport copies what it gathers, as gloo does.
    """
    if ranks == 1:
        return profile.peak_bytes
    rank = _Rank(profile, ranks)
    changes = np.zeros(_at(len(profile.rows)) + 1, dtype=np.int64)
    for size, first, after in (*rank.kept(), *rank.gathered(copies), *rank.scattered()):
        changes[first] += size
        changes[after] -= size
    return int(np.cumsum(changes).max())


def _at(row: int, moment: int = 0) -> int:
    """The number of a moment: a row, and three after it. The first four are before all rows."""
    return 4 * (row + 1) + moment


@dataclass(frozen=True)
class _Rank:
    """What one of several ranks holds."""

    profile: MemoryProfile
    ranks: int

    @cached_property
    def sizes(self) -> dict[int, int]:
        """Bytes of each block of the timeline on one device, by `id`."""
        return dict(zip(map(id, self.profile.blocks), self.profile.sizes, strict=True))

    @cached_property
    def shards(self) -> dict[str, int]:
        """Bytes of this rank's rows of each parameter."""
        found = {}
        for block in self.profile.blocks:
            if block.category == "parameter":
                rows = max(1, int(block.shape[0])) if block.shape else 1
                found[block.name] = self.sizes[id(block)] // rows * math.ceil(rows / self.ranks)
        return found

    @cached_property
    def backward(self) -> range:
        """Rows of the backward."""
        rows = [i for i, row in enumerate(self.profile.rows) if row.phase == "backward"]
        return range(rows[0], rows[-1] + 1)

    @cached_property
    def made(self) -> dict[str, list[int]]:
        """Rows in which something of each repeated block is made; blocks without any in the forward are left out."""
        found: dict[str, list[int]] = {}
        for block in self.profile.blocks:
            part = block_of(f"{block.module}.")
            if part and block.category not in STATIC and block.born < self.backward.stop:
                found.setdefault(part, []).append(block.born)
        own = {block_of(name) for name in self.shards}
        return {part: sorted(rows) for part, rows in found.items() if part in own and min(rows) < self.backward.start}

    @cached_property
    def elsewhere(self) -> set[str]:
        """Blocks of which the timeline does not say when they run: that of eager mode knows no modules."""
        return {block_of(name) for name in self.shards} - {"", *self.made}

    @cached_property
    def in_forward(self) -> list[tuple[str, int]]:
        """Each block and the row before its forward, in order."""
        return sorted(((part, rows[0] - 1) for part, rows in self.made.items()), key=lambda found: found[1])

    @cached_property
    def in_backward(self) -> list[tuple[str, int, int]]:
        """Each block that the backward reaches, the row before its backward, and the last one of it, in order."""
        reached = {part: [row for row in rows if row in self.backward] for part, rows in self.made.items()}
        return sorted(((part, rows[0] - 1, rows[-1]) for part, rows in reached.items() if rows), key=lambda found: found[1])

    def whole(self, part: str) -> int:
        """Bytes of a block's weights, rows that pad them included."""
        return self.ranks * sum(size for name, size in self.shards.items() if block_of(name) == part)

    def kept(self) -> Iterator[Held]:
        """What is on the timeline of one device, with its rows of weights, gradients and optimizer states."""
        ends = {part: last for part, _, last in self.in_backward} | {"": self.backward[-1]}
        end = _at(len(self.profile.rows))
        for block in self.profile.blocks:
            size, first, after = self.sizes[id(block)], _at(block.born), _at(block.last) + 1
            name = block.name.partition(": ")[0].removeprefix("gradient of ")
            if block.category == "parameter":
                yield self.shards[block.name], 0, end
            elif block.category == "optimizer state":
                yield (size if size <= SCALAR else math.ceil(size / self.ranks)), 0, end
            elif block.category == "gradient" and name in self.shards:
                if block_of(name) in self.elsewhere:
                    yield math.ceil(size / self.ranks), first, after
                else:
                    last = ends.get(block_of(name), block.last)
                    yield size, min(first, _at(last)), _at(last, 2)
            else:
                yield (math.ceil(size / self.ranks) if block.born >= self.backward.stop else size), first, after
                if block.why == "output of the model":
                    first_gather = self.in_backward[0][1] if self.in_backward else self.backward[-1]
                    yield size, _at(self.backward.start - 1, 3), _at(first_gather, 1)

    def gathered(self, copies: bool) -> Iterator[Held]:
        """Weights and buffers."""
        forward_ends = _at(self.backward.start - 1, 1)
        moments = [_at(row, 1) for _, row in self.in_forward] + [forward_ends]
        gathers = [(self.whole(""), 0)]
        yield self.whole(""), 0, moments[0] + 1
        yield self.whole(""), 1, _at(self.backward[-1], 2)
        for (part, _), moment, following in zip(self.in_forward, moments, moments[1:], strict=False):
            gathers.append((self.whole(part), moment))
            yield self.whole(part), moment, following + 1
            yield self.whole(part), moment + 1, following
        ahead = _at(self.backward.start - 1, 2)
        for part, before, last in self.in_backward:
            gathers.append((self.whole(part), ahead))
            yield self.whole(part), ahead, _at(before, 2)
            yield self.whole(part), _at(before, 1), _at(last, 1)
            ahead = _at(before, 2)
        reached = {part for part, _, _ in self.in_backward}
        below = [part for part, _ in self.in_forward if part not in reached]
        if reached and below:  # the last is gathered ahead, and kept, as the backward ends above it
            gathers.append((self.whole(below[-1]), ahead))
            yield self.whole(below[-1]), ahead, _at(self.backward[-1], 3)
        largest = sorted(map(self.whole, self.elsewhere))[-2:]  # one that runs and one ahead, and gradients
        yield sum(largest), 0, _at(self.backward[-1], 2)
        yield max(largest, default=0), _at(self.backward[0]), _at(self.backward[-1], 2)
        if copies:
            yield from ((size, moment, moment + 1) for size, moment in gathers)

    def scattered(self) -> Iterator[Held]:
        """Buffers of gradients, and this rank's rows of them."""
        trained = {block.name.removeprefix("gradient of ") for block in self.profile.blocks if block.category == "gradient"}
        ends = [*((part, last) for part, _, last in self.in_backward), ("", self.backward[-1])]
        for number, (part, last) in enumerate(ends):
            size = sum(size for name, size in self.shards.items() if name in trained and block_of(name) == part)
            following = _at(ends[number + 1][1], 1) if number + 1 < len(ends) else _at(last, 3)
            yield self.ranks * size, _at(last, 1), following
            yield size, _at(last, 2), _at(len(self.profile.rows))

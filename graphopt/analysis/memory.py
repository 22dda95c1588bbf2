"""Memory of a training step as a timeline of named storages, at any batch size.

A profile holds one `Block` per storage, with its bytes as a formula of the batch size and the rows of the timeline during which
it exists. Everything else (the peak, its phase, the largest batch that fits) is evaluated from that, without running anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np
import sympy

from graphopt.budget import parse_bytes
from graphopt.errors import InputError
from graphopt.graph import BATCH

Category = Literal["parameter", "buffer", "input", "optimizer state", "gradient", "saved activation", "temporary"]
CATEGORIES: tuple[Category, ...] = get_args(Category)
PHASES = ("forward", "backward", "optimizer")
_LARGEST_BATCH = 2**40


@dataclass(frozen=True)
class Row:
    """One moment of a step: a node of the forward or backward graph, or an operator of the optimizer."""

    node: str
    phase: str


@dataclass(frozen=True)
class Block:
    """One storage.

    Attributes:
        name: the node that makes it, or the parameter, buffer or input that it is.
        module: path of the module that the node comes from; "" if unknown.
        shape: of the tensor that made it, as ints or expressions of `B`.
        dtype: of that tensor.
        category: what it is for.
        size: bytes, as an expression of `B`.
        born, last: first and last row during which it exists.
        why: why it still exists in its last row.
    """

    name: str
    module: str
    shape: tuple[int | sympy.Expr, ...]
    dtype: str
    category: Category
    size: sympy.Expr
    born: int
    last: int
    why: str


def held_block(
    name: str, category: Category, size: sympy.Expr, last: int, shape: Iterable[Any] = (), dtype: str = "", why: str = ""
) -> Block:
    """A storage that exists during the whole step, whose last row is `last`."""
    why = f"{why or category}, for the whole step"
    return Block(name, name.rpartition(".")[0], tuple(shape), dtype, category, size, 0, last, why)


@dataclass(frozen=True)
class Live:
    """One tensor alive at the peak, with its bytes and why it is still there."""

    name: str
    module: str
    shape: tuple[int, ...]
    dtype: str
    category: str
    bytes: int
    why: str


@dataclass(frozen=True)
class TimelineRow:
    """Bytes around one node: `live` counts everything that exists while it runs, what it makes included.

    Attributes:
        freed: bytes released once it has run.
        by_category: live bytes per category; categories without any are left out.
    """

    step: int
    node: str
    phase: str
    allocated: int
    freed: int
    live: int
    by_category: dict[str, int]


@dataclass(frozen=True)
class MemoryProfile:
    """Bytes of one training step at one batch size.

    Attributes:
        rows, blocks: the timeline, see there.
        batch_size: samples; every figure is for this many.
        symbolic: whether `at` other batch sizes is defined.
        assumptions: what the figures rest on, in words.
    """

    rows: tuple[Row, ...]
    blocks: tuple[Block, ...]
    batch_size: int
    symbolic: bool = True
    assumptions: tuple[str, ...] = ()
    _shared: dict[str, object] = field(default_factory=dict, repr=False, compare=False)

    def at(self, batch: int) -> MemoryProfile:
        """The same timeline at another batch size.

        Raises:
            InputError: below 1, or the model fixes the batch.
        """
        if batch == self.batch_size:
            return self
        if not self.symbolic:
            raise InputError(f"the model fixes the batch size to {self.batch_size}: analyse it again with {batch} samples.")
        if batch < 1:
            raise InputError(f"batch must be at least 1, not {batch}.")
        return replace(self, batch_size=batch)

    @cached_property
    def peak_bytes(self) -> int:
        """Largest sum of bytes alive at once."""
        return int(self._live.max())

    @property
    def peak_row(self) -> int:
        """First row at which the peak is reached."""
        return int(self._live.argmax())

    @property
    def peak_phase(self) -> str:
        """`forward`, `backward` or `optimizer`: when the peak occurs."""
        return self.rows[self.peak_row].phase

    @property
    def static_bytes(self) -> int:
        """Bytes that exist during the whole step: parameters, buffers, inputs, optimizer states."""
        return int(sum(s for s, b in zip(self._sizes, self.blocks, strict=True) if b.born == 0 and b.last == len(self.rows) - 1))

    @cached_property
    def breakdown(self) -> dict[str, int]:
        """Bytes per category at the peak; they sum to `peak_bytes`."""
        return self._breakdown(self.peak_row)

    @cached_property
    def timeline(self) -> tuple[TimelineRow, ...]:
        """One row per node, in execution order."""
        allocated, freed = np.zeros((2, len(self.rows)), dtype=np.int64)
        born, last = self._spans
        np.add.at(allocated, born, self._sizes)
        np.add.at(freed, last, self._sizes)
        return tuple(
            TimelineRow(i, row.node, row.phase, int(allocated[i]), int(freed[i]), int(self._live[i]), self._breakdown(i))
            for i, row in enumerate(self.rows)
        )

    def top(self, count: int = 10) -> tuple[Live, ...]:
        """The largest tensors alive at the peak."""
        row = self.peak_row
        alive = [(int(s), b) for s, b in zip(self._sizes, self.blocks, strict=True) if b.born <= row <= b.last]
        alive.sort(key=lambda pair: -pair[0])
        return tuple(
            Live(b.name, b.module, tuple(self._int(s) for s in b.shape), b.dtype, b.category, size, b.why)
            for size, b in alive[:count]
        )

    def fits(self, capacity: int | str) -> bool:
        """Whether the peak is at most `capacity` (bytes, or a text such as "24GiB").

        Raises:
            BudgetError: `capacity` is not an amount of memory.
        """
        return self.peak_bytes <= parse_bytes(capacity)

    def max_batch(self, capacity: int | str) -> int:
        """The largest batch whose peak is at most `capacity`; 0 when not even one sample fits.

        Raises:
            BudgetError: `capacity` is not an amount of memory.
            InputError: the model fixes the batch, or every batch fits.
        """
        limit = parse_bytes(capacity)
        return largest_batch(lambda batch: self.at(batch).peak_bytes <= limit)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each block."""
        return tuple(int(s) for s in self._sizes)

    @cached_property
    def _sizes(self) -> np.ndarray:
        formulas, index = self._distinct
        values = [self._int(f) for f in formulas]
        if max(values, default=0) * len(index) > np.iinfo(np.int64).max:
            raise InputError(f"the bytes of a batch of {self.batch_size} cannot be counted in 64 bits: give a smaller batch.")
        return np.array(values, dtype=np.int64)[index] if values else np.zeros(0, dtype=np.int64)

    @cached_property
    def _live(self) -> np.ndarray:
        return self.alive(self._sizes)

    def alive(self, sizes: np.ndarray) -> np.ndarray:
        """The sum over the blocks that exist in each row, of `sizes` in the place of their own."""
        changes = np.zeros(len(self.rows) + 1, dtype=np.int64)
        born, last = self._spans
        np.add.at(changes, born, sizes)
        np.add.at(changes, last + 1, -sizes)
        return np.cumsum(changes)[:-1]

    @property
    def _distinct(self) -> tuple[list[sympy.Expr], np.ndarray]:
        """The different size formulas, and which one each block has; the same for every batch size."""
        if "distinct" not in self._shared:
            positions: dict[sympy.Expr, int] = {}
            index = [positions.setdefault(b.size, len(positions)) for b in self.blocks]
            self._shared["distinct"] = (list(positions), np.array(index, dtype=np.int64))
        return self._shared["distinct"]  # type: ignore[return-value]

    @property
    def _spans(self) -> tuple[np.ndarray, np.ndarray]:
        if "spans" not in self._shared:
            spans = np.array([(b.born, b.last) for b in self.blocks], dtype=np.int64).reshape(-1, 2)
            self._shared["spans"] = (spans[:, 0], spans[:, 1])
        return self._shared["spans"]  # type: ignore[return-value]

    @cached_property
    def _by_category(self) -> dict[str, np.ndarray]:
        """Bytes alive of each category in each row."""
        categories = np.array([b.category for b in self.blocks], dtype=str)
        return {c: self.alive(np.where(categories == c, self._sizes, 0)) for c in CATEGORIES}

    def _breakdown(self, row: int) -> dict[str, int]:
        return {c: int(total[row]) for c, total in self._by_category.items() if total[row]}

    def _int(self, value: int | sympy.Expr) -> int:
        return value if isinstance(value, int) else int(value.subs(BATCH, self.batch_size))


def largest_batch(fits: Callable[[int], bool]) -> int:
    """The largest batch that fits, by doubling and bisection; 0 if one sample does not.

    Raises:
        InputError: there is no largest, because memory does not grow with the batch.
    """
    if not fits(1):
        return 0
    good, bad = 1, 2
    while fits(bad):
        good, bad = bad, 2 * bad
        if good >= _LARGEST_BATCH:
            raise InputError("the memory of this model does not grow with its batch: every batch size fits.")
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good

"""The rows of a linear program, as SciPy takes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import LinearConstraint
from scipy.sparse import coo_array


@dataclass
class Rows:
    """Linear constraints, row by row; `width` is the number of variables."""

    width: int
    rows: list[int] = field(default_factory=list)
    columns: list[int] = field(default_factory=list)
    entries: list[float] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)

    def at_least(self, entries: Mapping[int, float], bound: float) -> None:
        """Sum of entries >= bound."""
        self._add(entries, bound, np.inf)

    def at_most(self, entries: Mapping[int, float], bound: float) -> None:
        """Sum of entries <= bound."""
        self._add(entries, -np.inf, bound)

    def _add(self, entries: Mapping[int, float], low: float, high: float) -> None:
        self.rows.extend([len(self.low)] * len(entries))
        self.columns.extend(entries)
        self.entries.extend(entries.values())
        self.low.append(low)
        self.high.append(high)

    def constraints(self) -> list[LinearConstraint]:
        """All of them."""
        matrix = coo_array((self.entries, (self.rows, self.columns)), shape=(len(self.low), self.width)).tocsr()
        return [LinearConstraint(matrix, np.asarray(self.low), np.asarray(self.high))]

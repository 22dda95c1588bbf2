"""Whether all ranks of a tensor parallel model run the same collectives in a step.

The sums that they make together are right only if they are of the same tensors. Eager mode computes gradients, and sends sums of
them, that a plan has cut: so a rank that has to run the model itself would add what others do not expect, without any error.
Before the backward of every step, ranks compare what they are about to run.
"""

from __future__ import annotations

import hashlib
import uuid
from typing import TYPE_CHECKING, Any

from graphopt.analysis.communication import communication
from graphopt.compat.distributed import store_of
from graphopt.distributed.divided import group_of_parts
from graphopt.distributed.ranks import lost
from graphopt.errors import RankError
from graphopt.passes.state import State

if TYPE_CHECKING:
    from graphopt.frontend.step import RegionStep
    from graphopt.runtime.module import OptimizedModule


class SameStep(State):
    """Compares each step with that of the other ranks among which weights are divided."""

    saved = False

    def __init__(self, opt: OptimizedModule) -> None:
        group = group_of_parts(opt._graphopt_model)
        self._store = store_of(group)
        self._name = opt.ranks.same(uuid.uuid4().hex, "starting to train")
        self._first = group.rank() == 0
        self._number = 0
        self._last: tuple[Any, str] = (self, "")

    def after_forward(self, step: RegionStep | None, output: Any) -> None:
        """Raise `RankError` where another rank runs something else; the first to come has said what."""
        if step is not self._last[0]:
            self._last = step, _signature(step)
        self._number += 1
        mine = self._last[1]
        try:
            theirs = self._store.compare_set(self._key(self._number), "", mine).decode()
            if self._first:  # all have compared that step: they have summed with this rank in the forward since
                self._store.delete_key(self._key(self._number - 1))
        except RuntimeError as error:  # the process that kept the store is gone
            raise lost() from error
        if theirs != mine:
            raise RankError(
                "this rank runs other sums in a step than another among which weights are divided, so that none would be right. "
                "The notes of opt.report say what could not be compiled here; see those of the other ranks, too, and whether all "
                "have the same versions."
            )

    def _key(self, number: int) -> str:
        return f"graphopt/step/{self._name}/{number}"


def _signature(step: RegionStep | None) -> str:
    """Text that is the same for steps with the same collectives."""
    if step is None:
        return "the model itself"
    graphs = [[] if region.graph is None else [region.graph] for region in step.regions]
    kinds = [[found.kind for found in communication(*graph).collectives] for graph in graphs]
    found = [(bool(graph), region.reduced, kind) for graph, region, kind in zip(graphs, step.regions, kinds, strict=True)]
    return hashlib.sha256(repr((step.plan.key, step.broken, found)).encode()).hexdigest()

"""Bytes that a step of a sharded model hands to other ranks: gathered weights and scattered gradients.

`fully_shard` issues these collectives in hooks, so that no graph has them. They are counted by its rules, from what a forward has
gathered and what autograd will differentiate. Of a part that runs several times, all runs are taken to be differentiated.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from graphopt.analysis.communication import Collective
from graphopt.compat import functions_behind, pytree
from graphopt.compat.fsdp import Part, parts_of, post_forward_order
from graphopt.passes.state import State

if TYPE_CHECKING:
    from graphopt.frontend.step import RegionStep
    from graphopt.runtime.module import OptimizedModule


class Traffic(State):
    """Counts again whenever a step, its plan, or what is reduced is another."""

    saved = False

    def __init__(self, opt: OptimizedModule) -> None:
        self._opt = opt
        self._counted: tuple[Any, ...] = ()
        self._sent: Sequence[Collective] = ()

    @property
    def collectives(self) -> Sequence[Collective]:
        """See `State`; in no order."""
        return self._sent

    def after_forward(self, step: RegionStep | None, output: Any) -> None:
        """See `State`."""
        model: nn.Module = self._opt._graphopt_model
        parts = parts_of(model)
        key = (step, self._opt.plan, tuple(part.reduces for part in parts))
        if not self._counted or not all(now is before or now == before for now, before in zip(key, self._counted, strict=True)):
            self._counted = key
            leaves = _differentiated(output)
            reached = {part.number: [p.names for p in part.parameters if id(p.whole) in leaves] for part in parts}
            back = {number for number, found in reached.items() if found}
            wanted = {number: [n for n in found if self._opt.selects_tensor(n[0])] for number, found in reached.items()}
            self._sent = tuple(collectives(parts, post_forward_order(model), back, wanted))


def collectives(
    parts: Sequence[Part], order: Sequence[int], back: Set[int], wanted: Mapping[int, Sequence[tuple[str, ...]]]
) -> Iterable[Collective]:
    """Of one forward and its backward.

    Args:
        order: the numbers of the parts as the forward has run them, each as often as that.
        back: those that the backward reaches.
        wanted: by number, the names of the parameters whose gradients are kept.
    """
    # what is gathered before it is asked for
    ahead = {before for before, number in itertools.pairwise(order) if number in back}
    for part in parts:
        runs = order.count(part.number)
        times = min(runs, 1) if not part.reshards else runs * (2 if part.number in back | ahead else 1)
        if part.ranks > 1:
            yield from [Collective("all_gather", part.gathered_bytes)] * times
        found = wanted[part.number]
        if found and part.reduces:
            size = sum(part.scattered_bytes[names] for names in found)
            if part.ranks > 1:
                yield Collective("reduce_scatter", size)
            if part.replicas > 1:
                yield Collective("all_reduce", size // part.ranks)


def _differentiated(output: Any) -> set[int]:
    """The leaves, by `id`, that autograd reaches from what a model has returned."""
    tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
    leaves = (getattr(node, "variable", None) for node in functions_behind(tensors))
    return {id(leaf) for leaf in leaves if isinstance(leaf, Tensor)}

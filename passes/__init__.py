"""The techniques: a room for each. See `base` for the contract of a pass and `technique` for the hooks of one with a policy."""

from collections.abc import Iterable

from graphopt.passes import dead_rows, distribute, greentrainer, linear_cross_entropy, lsp, recompute, runlora, vcas
from graphopt.passes.base import Pass, PassReport, Preserves, Site, run_pass
from graphopt.passes.dead_rows import DeadRows
from graphopt.passes.distribute import Distribute
from graphopt.passes.greentrainer import GreenTrainer
from graphopt.passes.linear_cross_entropy import LinearCrossEntropy
from graphopt.passes.lsp import Lsp
from graphopt.passes.recompute import Recompute
from graphopt.passes.runlora import RunLora
from graphopt.passes.technique import Technique
from graphopt.passes.vcas import Vcas

BY_NAME: dict[str, type[Technique]] = {
    "recompute": Recompute,
    "dead_rows": DeadRows,
    "greentrainer": GreenTrainer,
    "runlora": RunLora,
    "linear_cross_entropy": LinearCrossEntropy,
    "vcas": Vcas,
    "lsp": Lsp,
}
"""Passes that `optimize(passes=[...])` accepts by name, in the order in which they run; see `in_order`."""


def in_order(passes: Iterable[Pass]) -> tuple[Pass, ...]:
    """The passes in the order of the pipeline, whatever the order they were listed in.

    1. recompute marks segments of the forward as it was captured, so that they are the same whatever else is done.
    2. dead_rows narrows tensors to the rows that are read: all that follows works on what is left.
    3. greentrainer drops gradients: everything after it has less to do.
    4. runlora reorders the products of layers with adapters, while all samples are there and their number is a formula.
    5. linear_cross_entropy computes heads in chunks of tokens, adapters included.
    6. A user's pass that is EXACT, then one that is UNBIASED: it sees the graph of the whole batch.
    7. vcas leaves out rows: from here on the graph holds for one batch size alone.
    8. lsp compresses the gradients that are left, as products over the rows that are left: P'(A_k)(B_k)Q. The image of an
       unbiased gradient is unbiased. (Were it to run before vcas, terms would be drawn by the norms of other matrices.)
    9. A user's pass that is PROJECTED.
    10. distribute averages over ranks what is returned after all of that.

    Users' passes of one kind stay in the order they were listed in.
    """
    known = {name: float(i) for i, name in enumerate(BY_NAME)}
    own = {Preserves.EXACT: known["vcas"] - 0.6, Preserves.UNBIASED: known["vcas"] - 0.4, Preserves.PROJECTED: float(len(known))}
    known[Distribute.name] = len(known) + 1.0
    return tuple(sorted(passes, key=lambda p: known.get(p.name, own[p.preserves])))


def communicating(group: str, size: int, elsewhere: frozenset[str] = frozenset()) -> Technique:
    """What `optimize(mesh=...)` adds: the last technique, which has graphs communicate.

    Args:
        group: the name of the process group.
        size: its number of ranks.
        elsewhere: parameters whose gradients something else averages.
    """
    return Distribute(group, size, elsewhere=elsewhere)


__all__ = [
    "BY_NAME",
    "DeadRows",
    "Distribute",
    "GreenTrainer",
    "LinearCrossEntropy",
    "Lsp",
    "Pass",
    "PassReport",
    "Preserves",
    "Recompute",
    "RunLora",
    "Site",
    "Vcas",
    "communicating",
    "dead_rows",
    "distribute",
    "greentrainer",
    "in_order",
    "linear_cross_entropy",
    "lsp",
    "recompute",
    "run_pass",
    "runlora",
    "vcas",
]  # fmt: skip

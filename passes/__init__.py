"""The rewrites: one file per pass. See `base` for their contract."""

from collections.abc import Iterable

from graphopt.passes import greentrainer, lsp, runlora, vcas
from graphopt.passes.base import Pass, PassReport, Preserves, Site, run_pass
from graphopt.passes.greentrainer import GreenTrainer
from graphopt.passes.lsp import Lsp
from graphopt.passes.runlora import RunLora
from graphopt.passes.vcas import Vcas

BY_NAME = {"greentrainer": GreenTrainer, "runlora": RunLora, "vcas": Vcas, "lsp": Lsp}
"""Passes that `optimize(passes=[...])` accepts by name, in the order in which they run; see `in_order`."""


def in_order(passes: Iterable[Pass]) -> tuple[Pass, ...]:
    """The passes in the order of the pipeline, whatever the order they were listed in.

    1. greentrainer drops gradients: everything after it has less to do.
    2. runlora reorders the products of layers with adapters, while all rows are there and their number is a formula.
    3. A user's pass that is EXACT, then one that is UNBIASED: it sees the graph of the whole batch.
    4. vcas leaves out rows: from here on the graph holds for one batch size alone.
    5. lsp compresses the gradients that are left, as products over the rows that are left: P'(A_k)(B_k)Q. The image of an
       unbiased gradient is unbiased. (Were it to run before vcas, terms would be drawn by the norms of other matrices.)
    6. A user's pass that is PROJECTED.

    Users' passes of one kind stay in the order they were listed in.
    """
    known = {name: float(i) for i, name in enumerate(BY_NAME)}
    own = {Preserves.EXACT: known["vcas"] - 0.6, Preserves.UNBIASED: known["vcas"] - 0.4, Preserves.PROJECTED: float(len(known))}
    return tuple(sorted(passes, key=lambda p: known.get(p.name, own[p.preserves])))


__all__ = [
    "BY_NAME",
    "GreenTrainer",
    "Lsp",
    "Pass",
    "PassReport",
    "Preserves",
    "RunLora",
    "Site",
    "Vcas",
    "greentrainer",
    "in_order",
    "lsp",
    "run_pass",
    "runlora",
    "vcas",
]  # fmt: skip

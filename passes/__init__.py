"""The rewrites: one file per pass. See `base` for their contract."""

from graphopt.passes import greentrainer, lsp, recompute, runlora, vcas
from graphopt.passes.base import Pass, PassReport, Preserves, Site, run_pass
from graphopt.passes.greentrainer import GreenTrainer
from graphopt.passes.lsp import Lsp
from graphopt.passes.recompute import Recompute
from graphopt.passes.runlora import RunLora
from graphopt.passes.vcas import Vcas

BY_NAME = {"greentrainer": GreenTrainer, "runlora": RunLora, "recompute": Recompute, "lsp": Lsp, "vcas": Vcas}
"""Passes that `optimize(passes=[...])` accepts by name."""

__all__ = [
    "BY_NAME",
    "GreenTrainer",
    "Lsp",
    "Pass",
    "PassReport",
    "Preserves",
    "Recompute",
    "RunLora",
    "Site",
    "Vcas",
    "greentrainer",
    "lsp",
    "recompute",
    "run_pass",
    "runlora",
    "vcas",
]  # fmt: skip

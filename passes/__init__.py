"""The rewrites: one file per pass. See `base` for their contract."""

from graphopt.passes import greentrainer, lsp, runlora, vcas
from graphopt.passes.base import Pass, PassReport, Preserves, Site, run_pass
from graphopt.passes.greentrainer import GreenTrainer
from graphopt.passes.lsp import Lsp
from graphopt.passes.runlora import RunLora
from graphopt.passes.vcas import Vcas

BY_NAME = {"greentrainer": GreenTrainer, "runlora": RunLora, "lsp": Lsp, "vcas": Vcas}
"""Passes that `optimize(passes=[...])` accepts by name."""

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
    "lsp",
    "run_pass",
    "runlora",
    "vcas",
]  # fmt: skip

"""The rewrites: one file per pass. See `base` for their contract."""

from graphopt.passes import greentrainer, runlora
from graphopt.passes.base import Pass, PassReport, Preserves, Site, run_pass
from graphopt.passes.greentrainer import GreenTrainer
from graphopt.passes.runlora import RunLora

BY_NAME = {"greentrainer": GreenTrainer, "runlora": RunLora}
"""Passes that `optimize(passes=[...])` accepts by name."""

__all__ = [
    "BY_NAME", "GreenTrainer", "Pass", "PassReport", "Preserves", "RunLora", "Site", "greentrainer", "run_pass", "runlora",
]  # fmt: skip

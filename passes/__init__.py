"""The rewrites: one file per pass. See `base` for their contract."""

from graphopt.passes import greentrainer
from graphopt.passes.base import Pass, PassReport, Preserves, Site, run_pass
from graphopt.passes.greentrainer import GreenTrainer

BY_NAME = {"greentrainer": GreenTrainer}
"""Passes that `optimize(passes=[...])` accepts by name."""

__all__ = ["BY_NAME", "GreenTrainer", "Pass", "PassReport", "Preserves", "Site", "greentrainer", "run_pass"]

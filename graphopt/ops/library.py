"""The namespace of graphopt's operators: `torch.ops.graphopt`."""

from __future__ import annotations

import torch

library = torch.library.Library("graphopt", "DEF")

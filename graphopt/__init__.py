"""graphopt: the same training, cheaper.

`optimize` turns a model into one whose training step is compiled under a budget; `analyze` counts what a step costs in
FLOPs and bytes; `plan` says how to train on given devices.

Map of the package: `api` is the pipeline; `capture`, `graph`, `specialise`, `lower` carry a model through the compiler;
`analysis` counts, `planner` decides, `passes` rewrite, `runtime` runs; `report`, `dump`, `cli` show; `compat` holds every
non-public torch API.
"""

from typing import TYPE_CHECKING, Any

from graphopt import errors, passes
from graphopt.api import Analysis, analyze, optimize, plan
from graphopt.budget import Budget
from graphopt.errors import (
    BudgetError,
    CaptureError,
    CheckpointError,
    GraphoptError,
    ImportanceError,
    InputError,
    PassError,
    TorchVersionError,
)
from graphopt.runtime.controllers import MergeController, SelectionController
from graphopt.runtime.module import OptimizedModule

if TYPE_CHECKING:
    from graphopt.integrations.trainer import TrainerCallback as TrainerCallback

__version__ = "0.1.0"

__all__ = [
    "Analysis",
    "Budget",
    "BudgetError",
    "CaptureError",
    "CheckpointError",
    "GraphoptError",
    "ImportanceError",
    "InputError",
    "MergeController",
    "OptimizedModule",
    "PassError",
    "SelectionController",
    "TorchVersionError",
    "analyze",
    "errors",
    "optimize",
    "passes",
    "plan",
]


def __getattr__(name: str) -> Any:
    """`TrainerCallback` when first asked for: it needs transformers, which graphopt does not."""
    if name == "TrainerCallback":
        from graphopt.integrations.trainer import TrainerCallback

        return TrainerCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""graphopt: the same training, cheaper.

`optimize` turns a model into one whose training step is compiled under a budget; `analyze` counts what a step costs in
FLOPs and bytes; `plan` says how to train on given devices.

The house, room by room:

* `api` is the pipeline, top to bottom; `budget`, `calls`, `loss`, `errors` are what users and all rooms speak of.
* `frontend` has torch.compile hand us its graphs: recorded to plan on, rewritten while AOTAutograd partitions them.
* `capture`, `graph`, `transforms`, `specialise`, `lower`: the joint graph itself, and how it is edited, verified and run alone.
* `analysis` counts FLOPs and bytes; `planner` decides what is trained and how budgets are met.
* `passes` are the techniques, a room for each: `technique` has their hooks, `state` what they keep while training goes on.
* `runtime` is the optimised model, its checkpoints and controllers; `integrations` the Trainer and `backend="graphopt"`.
* `report` and `cli` show; `testing` holds passes to their contracts; `bench` measures; `compat` has every non-public torch API.
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

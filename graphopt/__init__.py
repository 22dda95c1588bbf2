"""graphopt: the same training, cheaper.

`optimize` turns a model into one whose training step is compiled under a budget, and `prepare` has a training loop of your own
run it; `fit` says whether a step fits a GPU; `analyze` counts what it costs in FLOPs and bytes; `pareto` says what each budget
buys; `plan` says how to train on given devices, and `distribute` divides a model so. `dir(graphopt)` is all of it. torch is
loaded when the first of these names is used.

The house, room by room:

* `api` is the pipeline, top to bottom; `budget`, `calls`, `loss`, `errors` are what users and all rooms speak of.
* `frontend` has torch.compile hand us its graphs: recorded to plan on, rewritten while AOTAutograd partitions them.
* `capture`, `graph`, `transforms`, `specialise`, `lower`: the joint graph itself, and how it is edited, verified and run alone.
* `analysis` counts FLOPs and bytes; `planner` decides what is trained and how budgets are met.
* `passes` are the techniques, a room for each: `technique` has their hooks, `state` what they keep while training goes on.
* `distributed` is what several processes that train one model agree on.
* `runtime` is the optimised model, its checkpoints and controllers; `integrations` training loops and `backend="graphopt"`.
* `report` and `cli` show; `testing` holds passes to their contracts; `bench` measures; `compat` has every non-public torch API.
"""

import importlib
from typing import TYPE_CHECKING, Any

from graphopt import errors
from graphopt.errors import (
    BudgetError,
    CaptureError,
    CheckpointError,
    GraphoptError,
    ImportanceError,
    InputError,
    PassError,
    RankError,
    TorchVersionError,
)

if TYPE_CHECKING:
    from graphopt import passes as passes, testing as testing
    from graphopt.api import Analysis, analyze, optimize, pareto, plan
    from graphopt.budget import Budget
    from graphopt.distributed.distributing import distribute
    from graphopt.integrations.fit import fit
    from graphopt.integrations.prepare import prepare
    from graphopt.integrations.trainer import TrainerCallback as TrainerCallback
    from graphopt.runtime.controllers import MergeController, SelectionController
    from graphopt.runtime.module import OptimizedModule

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
    "RankError",
    "SelectionController",
    "TorchVersionError",
    "analyze",
    "distribute",
    "errors",
    "fit",
    "optimize",
    "pareto",
    "passes",
    "plan",
    "prepare",
    "testing",
]

_HOMES = {
    "Analysis": "graphopt.api",
    "Budget": "graphopt.budget",
    "MergeController": "graphopt.runtime.controllers",
    "OptimizedModule": "graphopt.runtime.module",
    "SelectionController": "graphopt.runtime.controllers",
    "TrainerCallback": "graphopt.integrations.trainer",  # needs transformers, which graphopt does not: not in __all__
    "analyze": "graphopt.api",
    "distribute": "graphopt.distributed.distributing",
    "fit": "graphopt.integrations.fit",
    "optimize": "graphopt.api",
    "pareto": "graphopt.api",
    "plan": "graphopt.api",
    "prepare": "graphopt.integrations.prepare",
}
"""Where names are that are looked up when first asked for, as all of these load torch."""


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        found = getattr(importlib.import_module(_HOMES[name]), name)
    elif name in ("passes", "testing"):
        found = importlib.import_module(f"graphopt.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted([*__all__, "TrainerCallback", "__version__"])

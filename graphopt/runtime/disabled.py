"""The model itself in the place of an optimised one: with GRAPHOPT_DISABLE=1, or where `verify=True` has found a difference.

Code written for an `OptimizedModule` runs unchanged: `make_optimizer` makes the ordinary optimizer, controllers do nothing, and
states that are loaded and saved keep their plan, for when it is in force again.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from graphopt.analysis.flops import FlopProfile
from graphopt.budget import Budget
from graphopt.distributed.ranks import Ranks
from graphopt.errors import GraphoptError
from graphopt.frontend.running import Running
from graphopt.graph import TrainingGraph
from graphopt.loss import LossFunction
from graphopt.lower import Backend
from graphopt.planner.plan import Plan
from graphopt.report.files import json_text, make_folder_of
from graphopt.report.plan import StepClock, summarise
from graphopt.report.summary import Report
from graphopt.runtime import checkpoint
from graphopt.runtime.captures import Captures
from graphopt.runtime.load_optimizer import put_back
from graphopt.runtime.module import OptimizedModule
from graphopt.runtime.reselection import Reselection

VARIABLE = "GRAPHOPT_DISABLE"
"""The environment variable that switches every optimisation off, unless it is empty or 0."""


def switched_off() -> bool:
    """Whether the user has switched every optimisation off."""
    return os.environ.get(VARIABLE, "") not in ("", "0")


class DisabledModule(OptimizedModule):
    """`model`, trained as it is: its forward is the model's own, uncompiled."""

    def __init__(
        self,
        model: nn.Module,
        budget: Budget,
        reason: str,
        backend: Backend = "inductor",
        loss: LossFunction | None = None,
        compiles: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        """Set up; `optimize` does it.

        Args:
            reason: for the report.
            compiles: the model runs as torch.compile has it, for want of anything that could be planned.
            ranks: that train the model together.
        """
        captures = Captures(model, None, backend, long_to_eager=True)
        super().__init__(model, captures, None, Plan(budget, ()), loss, ranks=ranks)  # type: ignore[arg-type]
        self.__dict__.update(_reason=reason, _compiles=compiles, _kept=None)
        self.start_techniques()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward."""
        if not self._compiles or not torch.is_grad_enabled():
            return self._graphopt_model(*args, **kwargs)
        return super().forward(*args, **kwargs)

    def _step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._running is None:
            self.__dict__["_running"] = Running(self.captures, (), self._fallback.note, lambda: None)
        return self._fallback.compiled_or_not(self, self._running, self.plan, args, kwargs)[0]

    @property
    def graph(self) -> TrainingGraph:
        """There is none."""
        raise GraphoptError(f"no graph was captured: {self._reason}.")

    @property
    def flops(self) -> FlopProfile:
        """Nothing was counted."""
        raise GraphoptError(f"no FLOPs were counted: {self._reason}. Use graphopt.analyze().")

    def reselect(self, batch: Any, optimizer: torch.optim.Optimizer | None = None, tolerance: float = 0.05) -> Reselection:
        """Everything stays trained."""
        return Reselection(False, 0.0, 0.0)

    def save_state(self, path: str | os.PathLike[str], optimizer: torch.optim.Optimizer | None = None) -> None:
        """Write the optimizer's state, beside the plan of the state that was loaded.

        If none was loaded, the plan in the file that is overwritten stays there, with a warning; one of another version is not
        overwritten (`InputError`).

        Args, Raises:
            See `OptimizedModule.save_state`.
        """
        kept = self._kept
        if kept is None and (kept := checkpoint.held(path, self._graphopt_model)) is not None:
            self.note(f"{path} holds a plan that was not loaded: it stays there, with the optimizer's state of this run")
        checkpoint.save(path, self, None, optimizer, kept)

    def load_state(self, path: str | os.PathLike[str], optimizer: torch.optim.Optimizer | None = None) -> None:
        """Load the optimizer's state. A plan is kept as it is, for `save_state`; its budget and passes are not compared.

        Args, Raises:
            See `OptimizedModule.load_state`.
        """
        prepare = functools.partial(checkpoint.prepare, path, self, None, optimizer)
        _, load, restore = self.ranks.together(prepare, "loading a state")
        kept = checkpoint.held(path, self._graphopt_model)
        with put_back(optimizer):
            self.ranks.together(load, "loading an optimizer's state")
        restore()
        self.__dict__["_kept"] = kept

    @property
    def report(self) -> Report:
        """That nothing was done, and why; FLOPs are not counted (0)."""
        trained = [name for name, p in self._graphopt_model.named_parameters() if p.requires_grad]
        backend = self.captures.backend
        how = "as torch.compile has it" if self._compiles else "uncompiled"
        return Report(
            budget=self.plan.budget.stated(),
            trained=len(trained),
            trainable=len(trained),
            selected=trained,
            batch=f"any: the model runs {how}",
            device=str(next((p.device for p in self._graphopt_model.parameters()), "cpu")),
            backend=backend if isinstance(backend, str) else getattr(backend, "__name__", "callable"),
            notes=[f"the model is trained as it is: {self._reason}"],
            plan=summarise(self.plan, (), {"flops": 1.0, "variance": 0.0}, StepClock()),
        )

    def dump(self, directory: str | Path) -> list[Path]:
        """Write the report alone to `directory`; there is no graph."""
        path = Path(directory) / "report.json"
        make_folder_of(path)
        path.write_text(json_text(self.report.to_dict()) + "\n", encoding="utf-8")
        return [path]

"""What is known of an optimised model: its plan, its graph, what ran, and the report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from graphopt.analysis.flops import FlopProfile, flop_profile
from graphopt.budget import Budget
from graphopt.capture import tensors_of
from graphopt.distributed.ranks import Ranks
from graphopt.errors import GraphoptError
from graphopt.frontend.step import RegionStep
from graphopt.graph import TrainingGraph
from graphopt.loss import LossFunction
from graphopt.passes.state import State
from graphopt.planner.plan import Plan
from graphopt.report.summary import Report
from graphopt.runtime.captures import Captures, Counters
from graphopt.runtime.shared_module import SharedModule
from graphopt.runtime.stateful import Controllers, Stateful
from graphopt.transforms.symbolic_zeros import planned_names


class PlannedModule(SharedModule):
    """The part of an `OptimizedModule` that tells, and changes nothing.

    Attributes:
        plan: in force; `adopt` puts another one in force.
        ranks: the processes that train the model together.
        states: what techniques keep while training goes on, by their names.
        controllers: the user's.
        captures: the captured graphs of this model's calls.
        last_step: the compiled step that ran last; None before the first.
        loss_given: as given to `optimize`.
    """

    plan: Plan
    ranks: Ranks
    states: dict[str, State]
    controllers: Controllers
    captures: Captures
    last_step: RegionStep | None
    loss_given: LossFunction | None
    only_read = ("plan", "ranks", "states", "captures", "last_step", "loss_given")

    def tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers by every name, as they are now: users may move or replace them between steps."""
        return tensors_of(self._graphopt_model)

    @property
    def selected(self) -> frozenset[str]:
        """Names of the parameters that are trained."""
        if self._graph is None:
            train, parameters = self.plan.train, self._graphopt_model.named_parameters()
            return frozenset(name for name, p in parameters if p.requires_grad and (train is None or name in train))
        names = frozenset(p.name for p in self._graph.trainable)
        if self.plan.train is not None:
            return names & self.plan.train
        others = frozenset(p.name for p in self._graph.parameters) - planned_names(self._graph)
        return names | others  # as soon as an output that leads to them is differentiated

    @property
    def selects(self) -> bool:
        """Whether only some tensors are trained."""
        return self.plan.train is not None

    def selects_tensor(self, name: str) -> bool:
        """Whether parameter `name` is trained: the plan says so, or knows nothing of what torch.compile traces no use of."""
        if self.plan.train is None or name in self.plan.train:
            return True
        return self._graph is not None and name not in planned_names(self._graph)

    @property
    def graph(self) -> TrainingGraph:
        """The captured joint graph that the plan was made on.

        Raises:
            GraphoptError: the model was unpickled, and has not run a step since.
        """
        if self._graph is None:
            raise GraphoptError("graphs are not part of a pickled model: run a step first.")
        return self._graph

    @property
    def flops(self) -> FlopProfile:
        """FLOPs of the captured graph; `.cost(opt.selected)` is the cut backward's."""
        if self.__dict__["_profile"] is None:
            self.__dict__["_profile"] = flop_profile(self.graph)
        return self.__dict__["_profile"]

    @property
    def budget(self) -> Budget:
        """As given to `optimize`."""
        return self.plan.budget

    @property
    def counters(self) -> Counters:
        """How often the model was captured and a step compiled."""
        return self.captures.counters

    @property
    def controller(self) -> Any:
        """What adapts the plan while training goes on, as a sampler's ratios under `Budget(variance=...)`; None: nothing does."""
        return next((state for state in self.states.values() if state.adapts), None)

    @property
    def report(self) -> Report:
        """What was cut, FLOPs before and after, and which approximations are in force."""
        from graphopt.report.summary import make_report

        return make_report(
            self.graph, self.flops, self.plan, self.captures, self.last_step, self._select_seconds, self.states,
            self._fallback.notes, self._clock,
        )  # fmt: skip

    @property
    def model_runs(self) -> int:
        """Training steps so far in which the model itself stood in, because none could be compiled."""
        return self._fallback.model_runs

    def dump(self, directory: str | Path) -> list[Path]:
        """Write the graphs of every stage, a diff per pass, a picture and the report to `directory`.

        Returns:
            The files written.
        """
        from graphopt.report.graph_dump import dump

        return dump(directory, self.report, self.last_step)

    def _parts(self) -> dict[str, Stateful]:
        """Everything but the plan that has a state."""
        states = {name: state for name, state in self.states.items() if state.saved}
        return {"captures": self.captures, "controllers": self.controllers, **states}

    def _names(self) -> dict[int, str]:
        """Of parameters and of what optimizers step in their place, by `id`."""
        others = {id(v): n for state in self.states.values() for n, v in state.variables().items()}
        return {id(p): n for n, p in self._graphopt_model.named_parameters()} | others

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
from graphopt.runtime.captures import Captures
from graphopt.runtime.counters import Counters
from graphopt.runtime.shared_module import SharedModule
from graphopt.runtime.stateful import Stateful
from graphopt.transforms.symbolic_zeros import planned_names


class PlannedModule(SharedModule):
    """The part of an `OptimizedModule` that tells, and changes nothing."""

    @property
    def ranks(self) -> Ranks:
        """The processes that train the model together."""
        return self._ranks

    @property
    def states(self) -> dict[str, State]:
        """What techniques keep while training goes on, by their names."""
        return self.__dict__["_states"]

    def tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers by every name, as they are now: users may move or replace them between steps."""
        return tensors_of(self._model)

    @property
    def loss_function(self) -> LossFunction | None:
        """As given to `optimize`."""
        return self.__dict__["_loss"]

    @property
    def selected(self) -> frozenset[str]:
        """Names of the parameters that are trained."""
        if self._graph is None:
            train, parameters = self._plan.train, self._model.named_parameters()
            return frozenset(name for name, p in parameters if p.requires_grad and (train is None or name in train))
        names = frozenset(p.name for p in self._graph.trainable)
        if self._plan.train is not None:
            return names & self._plan.train
        others = frozenset(p.name for p in self._graph.parameters) - planned_names(self._graph)
        return names | others  # as soon as an output that leads to them is differentiated

    @property
    def plan(self) -> Plan:
        """The plan in force."""
        return self._plan

    @property
    def selects(self) -> bool:
        """Whether only some tensors are trained."""
        return self._plan.train is not None

    def selects_tensor(self, name: str) -> bool:
        """Whether parameter `name` is trained: the plan says so, or knows nothing of what torch.compile traces no use of."""
        if self._plan.train is None or name in self._plan.train:
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
        return self._plan.budget

    @property
    def captures(self) -> Captures:
        """The captured graphs of this model's calls."""
        return self._captures

    @property
    def counters(self) -> Counters:
        """How often the model was captured and a step compiled."""
        return self._captures.counters

    @property
    def controller(self) -> Any:
        """What adapts the plan while training goes on, as a sampler's ratios under `Budget(variance=...)`; None: nothing does."""
        return next((state for state in self.states.values() if state.adapts), None)

    @property
    def not_separable(self) -> str:
        """Why the backward is not sampled; "" if it may be."""
        return self._plan.not_separable

    @property
    def report(self) -> Report:
        """What was cut, FLOPs before and after, and which approximations are in force."""
        from graphopt.report.summary import make_report

        return make_report(
            self.graph,
            self.flops,
            self._plan,
            self._captures,
            self._last_step,
            self._select_seconds,
            self.states,
            self._fallback.notes,
            self._clock,
        )

    @property
    def model_runs(self) -> int:
        """Training steps so far in which the model itself stood in, because none could be compiled."""
        return self._fallback.model_runs

    @property
    def last_step(self) -> RegionStep | None:
        """The compiled step that ran last; None before the first."""
        return self._last_step

    def dump(self, directory: str | Path) -> list[Path]:
        """Write the graphs of every stage, a diff per pass, a picture and the report to `directory`.

        Returns:
            The files written.
        """
        from graphopt.report.graph_dump import dump

        return dump(directory, self.graph, self._plan, self.report, self._last_step)

    def _parts(self) -> dict[str, Stateful]:
        """Everything but the plan that has a state."""
        states = {name: state for name, state in self.states.items() if state.saved}
        return {"captures": self._captures, "controllers": self.controllers, **states}

    def _names(self) -> dict[int, str]:
        """Of parameters and of what optimizers step in their place, by `id`."""
        others = {id(v): n for state in self.states.values() for n, v in state.variables().items()}
        return {id(p): n for n, p in self._model.named_parameters()} | others

"""OptimizedModule: the caller's model, with a cheaper training step."""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import nn

from graphopt import compat
from graphopt.analysis.flops import FlopProfile
from graphopt.calls import as_call, flatten_call
from graphopt.compat.fsdp import is_sharded
from graphopt.distributed.agreement import in_common, plan_of_rank_0
from graphopt.distributed.divided import is_parallel
from graphopt.distributed.ranks import Ranks
from graphopt.distributed.same_step import SameStep
from graphopt.distributed.sharded_traffic import Traffic
from graphopt.distributed.wrapping import Wrapping
from graphopt.frontend.accepted import require_optimizer
from graphopt.frontend.running import Running
from graphopt.graph import TrainingGraph
from graphopt.loss import LossFunction
from graphopt.passes import BY_NAME
from graphopt.passes.state import MakeOptimizer, State
from graphopt.passes.technique import Decision, technique
from graphopt.planner.plan import Plan
from graphopt.planner.product_times import used_times
from graphopt.report.plan import StepClock
from graphopt.runtime.captures import Captures
from graphopt.runtime.fallback import Fallback
from graphopt.runtime.load_optimizer import put_back
from graphopt.runtime.memory_watch import MemoryWatch
from graphopt.runtime.planned_module import PlannedModule
from graphopt.runtime.reselection import Reselection, select_anew
from graphopt.runtime.stateful import Controllers
from graphopt.runtime.supply import Supply
from graphopt.transforms.symbolic_zeros import planned_names


class OptimizedModule(PlannedModule):
    """`model` with its training step compiled under a plan; made by `graphopt.optimize`.

    It passes for the model: see `SharedModule`. With gradients enabled a call runs the compiled step, else the model itself.
    """

    without_code = ("_running", "last_step")
    without_graphs = ("_graph", "_profile")

    def __init__(
        self,
        model: nn.Module,
        captures: Captures,
        graph: TrainingGraph,
        plan: Plan,
        loss: LossFunction | None = None,
        select_seconds: float = 0.0,
        several_graphs: bool = False,
        fullgraph: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__(model)
        captures.several_graphs = several_graphs
        self.__dict__.update(
            plan=plan, ranks=ranks or Ranks.alone(), states={}, controllers=Controllers(), captures=captures, last_step=None,
            loss_given=loss, _graph=graph, _profile=None, _running=None, _fullgraph=fullgraph, _select_seconds=select_seconds,
            _fallback=Fallback(model), _wrapping=Wrapping(), _clock=StepClock(), _memory=MemoryWatch(),
        )  # fmt: skip

    def start_techniques(self) -> None:
        """Make what techniques keep while training goes on; `optimize` does it."""
        kept: dict[str, State | None] = {p.name: technique(p).start(self) for p in self.plan.passes}
        kept |= {name: kind.stand_in(self) for name, kind in BY_NAME.items() if name not in kept}
        if self._graph is not None:  # else states are told of no steps
            kept["traffic"] = Traffic(self) if is_sharded(self._graphopt_model) else None
            kept["same step"] = SameStep(self) if self.ranks.several and is_parallel(self._graphopt_model) else None
        self.states.update((name, state) for name, state in kept.items() if state is not None)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the model's, for gradients that a technique keeps elsewhere, too."""
        self._graphopt_model.zero_grad(set_to_none)
        for state in self.states.values():
            state.clear_gradients()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the model's forward: same arguments, same structure of the result. Found through `Forward`."""
        if not torch.is_grad_enabled():
            return self._graphopt_model(*args, **kwargs)
        if torch.compiler.is_compiling():
            return self._graphopt_model(*args, **kwargs) if torch.compiler.is_exporting() else _left_out(self._step, args, kwargs)
        return self._step(args, kwargs)

    def _step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A training step's forward, with what techniques do before and after it."""
        with self.captures.lock:
            self._fallback.put_in_force()
            self._wrapping.check(self)
            if not self.states or compat.in_function_transform():  # whose batches are no steps
                return self._planned_step(self.plan, args, kwargs)
            return self._step_with(self.states.values(), args, kwargs)

    def _step_with(self, states: Collection[State], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        plan = self.plan
        for state in states:
            plan = state.before_forward(plan, self._graphopt_model, args, kwargs)
        before = self._fallback.model_runs
        try:
            output = self._planned_step(plan, args, kwargs)
        except Exception as error:
            instead = next((p for state in states if (p := state.instead(plan, error)) is not None), None)
            if instead is None:
                raise
            output = self._planned_step(instead, args, kwargs)
        step = self._running.step if self._fallback.model_runs == before else None
        for state in states:
            state.after_forward(step, output)
        return output

    def check_wrapping(self) -> None:
        """Raise `InputError` if the DistributedDataParallel whose forward is under way cannot train as this does."""
        self._wrapping.check(self)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients gather on each rank by themselves; the next backward outside averages them all.

        As `DistributedDataParallel.no_sync`, for `optimize(mesh=...)`: it is the forward that has to be inside. Without a mesh it
        does nothing.
        """
        with contextlib.ExitStack() as stack:
            for state in self.states.values():
                stack.enter_context(state.no_sync())
            yield

    def _planned_step(self, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A step under a plan; the model itself where torch.compile fails."""
        if self._graph is None:
            self.__dict__["_graph"] = self.captures.planned_on(args, kwargs)
        if self._running is None:
            if self.selects:
                self._drop_gradients(planned_names(self._graph) - self.selected)
            me, fallback = weakref.ref(self), self._fallback  # what runs a model must not keep alive who has it run
            self.__dict__["_running"] = Running(
                self.captures,
                planned_names(self._graph),
                fallback.note,
                lambda: fallback.drop_unselected(me()),
                self.captures.several_graphs or is_sharded(self._graphopt_model),
                self._fullgraph,
                Supply(self.captures.uniforms, self.states),
            )
        running: Running = self._running
        output, compiled = self._fallback.compiled_or_not(self, running, plan, args, kwargs)
        if not compiled:
            self.__dict__["last_step"] = None
            return output
        if plan.memory is not None and running.step is not None:
            inputs = flatten_call(args, kwargs)
            told = self._memory.warning(running.step, inputs, self._graph, lambda: self.captures.planned_on(args, kwargs))
            if told is not None:
                self.note(told)
        if not plan.measures:
            self.__dict__["last_step"] = running.step
        self._clock.tick(running.step)
        return output

    def make_optimizer(self, make: MakeOptimizer, params: Any = None, **options: Any) -> torch.optim.Optimizer:
        """An optimizer for this model; where a technique keeps gradients elsewhere than in `.grad`, one that steps those, too.

        Args:
            make: such as `torch.optim.AdamW`.
            params: parameters of the model or groups of them, as `make` takes them; by default all that require a gradient.
            options: for `make`, such as `lr`.
        Raises:
            InputError: an optimizer or an option that such a technique does not support.
        """
        groups = [p for p in self._graphopt_model.parameters() if p.requires_grad] if params is None else params
        for state in self.states.values():
            optimizer = state.optimizer(self._graphopt_model, make, groups, options)
            if optimizer is not None:
                return optimizer
        return make(groups, **options)

    def reselect(self, batch: Any, optimizer: torch.optim.Optimizer | None = None, tolerance: float = 0.05) -> Reselection:
        """Rate tensors again and change the selection if that gains enough.

        The default rule measures no gradients again: only where tensors were frozen or unfrozen does its selection change.

        Args:
            batch: what the model is called with: a tuple, or a dict with labels.
            optimizer: the one that trains the model; see `Rater`.
            tolerance: the current selection stays unless the new one's importance exceeds its by this fraction, because a
                change costs a compilation (a selection that was in force recently is still compiled).
        Returns:
            Whether it changed. A NaN or infinite importance, a batch that cannot be traced and too little memory keep the
            selection and warn.
        Raises:
            InputError: the batch is none, its inputs do not fit together, or the optimizer or the tolerance is none.
        """
        require_optimizer(optimizer)
        if optimizer is not None and any(state.steps_with(optimizer) for state in self.states.values()):
            optimizer = None  # it steps other gradients than those by which tensors are rated
        if self._graph is None:
            self.__dict__["_graph"] = self.ranks.together(
                lambda: self.captures.planned_on(*as_call(batch)), "capturing the model"
            )
        outcome, new = select_anew(self, batch, optimizer, tolerance)
        self.__dict__["_select_seconds"] += outcome.seconds
        if new is not None:
            self._install(*new)
        return outcome

    def decide(self, name: str, decision: Decision) -> None:
        """Put a technique's decision in force."""
        self.__dict__["plan"] = self.plan.decided(name, decision)

    def adopt(self, plan: Plan) -> None:
        """Put a plan in force for the same captured graph, such as with another selection; on every rank, the same."""
        self.ranks.check_same(in_common(plan), "a plan to adopt")
        self._install(plan, self._graph, self.__dict__["_profile"])

    def recheck_merges(self) -> bool:
        """Measure again where merging a weight with its adapters would lose them to rounding (half precision, TF32).

        Returns:
            Whether that changed for a layer; its next step is then compiled anew.
        """
        plan, tensors = self.plan, self.tensors()
        for rewrite in plan.passes:
            plan = technique(rewrite).measured(plan, self.graph, tensors)
        plan = plan_of_rank_0(plan, self.ranks, plan.passes, "measuring merges")
        changed = plan.key != self.plan.key
        self.__dict__["plan"] = plan
        return changed

    def _install(self, plan: Plan, graph: TrainingGraph | None, profile: FlopProfile | None) -> None:
        before = self.selected
        known, planned = ({p.name for p in g.parameters} if g is not None else set() for g in (self._graph, graph))
        self.__dict__.update(plan=plan, _graph=graph, _profile=profile, last_step=None)
        if planned != known:
            self.__dict__["_running"] = None  # it trains what the plan did not know
        self._drop_gradients((before | (planned - known)) - self.selected)
        for state in self.states.values():
            state.selected(self.selected - before)

    def _drop_gradients(self, names: Collection[str]) -> None:
        """Clear gradients that are left over, even of zeros: an optimizer would go on moving what is not selected by them."""
        for name, parameter in self._graphopt_model.named_parameters():
            if name in names:
                parameter.grad = None
        for state in self.states.values():
            state.clear_gradients(names)

    def save_state(self, path: str | os.PathLike[str], optimizer: torch.optim.Optimizer | None = None) -> None:
        """Write what graphopt itself knows to one file, so that training goes on from it as if it had never stopped.

        Of several ranks, one may write it for all; random draws of samplers then go on exactly on that rank alone.

        Call it between two steps, and save the model's weights (`state_dict()`) and the random state with it. The file is
        safetensors with JSON, and appears at once or not at all. See `graphopt.runtime.checkpoint`.

        Args:
            optimizer: whose state is saved in the same file.
        Raises:
            InputError: a value that such a file cannot hold, in the optimizer's state or a batch; or the optimizer is none.
            CheckpointError: the file could not be written; what was there is as it was.
        """
        from graphopt.runtime import checkpoint

        for state in self.states.values():
            state.synchronize()
        checkpoint.save(path, self, self.plan, optimizer)

    def load_state(self, path: str | os.PathLike[str], optimizer: torch.optim.Optimizer | None = None) -> None:
        """Go on from what `save_state` wrote, in a model that was optimised with the same passes and budget; on every rank.

        Make controllers and the optimizer before, and load the model's weights, too. A state without a plan, as it is saved where
        graphopt is switched off, leaves the plan of this model as it is, with a warning.

        Args:
            optimizer: to which the optimizer's state in the file is given; without it, that is left out.
        Raises:
            InputError: the file is damaged or of another kind, version, model, budget, pass, controller or optimizer. Nothing is
                changed then.
        """
        from graphopt.runtime import checkpoint

        prepare = functools.partial(checkpoint.prepare, path, self, self.plan, optimizer)
        plan, load, restore = self.ranks.together(prepare, "loading a state")
        if plan is None:
            self.note(f"{path} holds no plan, as graphopt was off or unable when it was saved: the plan of optimize() stays")
            plan = self.plan
        self.ranks.check_same(in_common(plan), "the plan of a state file")
        with put_back(optimizer):
            self.ranks.together(load, "loading an optimizer's state")
        times = used_times()
        restore()
        if used_times() != times:  # orders of products are chosen anew
            self.__dict__["_running"] = None
        self._install(plan, self._graph, self._profile)

    def drop_unselected(self) -> None:
        """Have tensors that are not selected lose any gradient that the model itself computes for them."""
        self._fallback.drop_unselected(self)

    def rest(self) -> None:
        """Let all gradients of the model through until the next step of this one: it is trained by itself."""
        self._fallback.rest()

    def note(self, text: str) -> None:
        """Warn of something that training goes on without, once, and have the report say it."""
        self._fallback.note(text)


@torch.compiler.disable
def _left_out(step: Callable[..., Any], *args: Any) -> Any:
    """`step(*args)`, which is compiled by itself, where torch.compile traces what calls an optimised model."""
    return step(*args)

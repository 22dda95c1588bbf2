"""Running a model under a plan, through torch.compile."""

from __future__ import annotations

import contextlib
import itertools
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from graphopt import compat
from graphopt.calls import flatten_call
from graphopt.capture import TRACING, caching_configs, without_cache
from graphopt.compat import draws, pytree
from graphopt.compat.dynamo import (
    Settings,
    cause_of,
    compiled_by,
    graph_breaks,
    is_traced_elsewhere,
    nothing_compiles,
    symbolic_dims,
    with_own_code,
)
from graphopt.errors import ALL_FROZEN, GraphoptError, LossNotFirst, PassError
from graphopt.frontend.backend import PlanBackend, Unsettled
from graphopt.frontend.batch import batch_of
from graphopt.frontend.before import Before
from graphopt.frontend.compiled_region import CompiledRegion, Ran, Surroundings
from graphopt.frontend.loss_only import loss_alone, not_kept
from graphopt.frontend.outputs import finishing
from graphopt.frontend.region import frozen_names, tensor_names
from graphopt.frontend.rerun import Rerun
from graphopt.frontend.step import RegionStep
from graphopt.frontend.values import Values
from graphopt.planner.plan import Plan
from graphopt.runtime.bounded_cache import BoundedCache
from graphopt.transforms.symbolic_zeros import NO_LOSS

if TYPE_CHECKING:
    from graphopt.runtime.captures import Captures
    from graphopt.runtime.supply import Supply

_models = itertools.count()

FIRST_CALLS = 4
"""Calls until it is known what is differentiated: a step may have to run again, so what it writes to is remembered."""

PLANS = 16
"""Plans whose compiled graphs are kept."""

_UNCOMPILED = (
    "a step ran uncompiled: torch.compile compiles nothing here, or has compiled this model too often for what changes from step "
    "to step. TORCH_LOGS=recompiles says what"
)


class Running:
    """Runs a model's training steps under plans; a plan that comes again is still compiled.

    Attributes:
        step: that ran last; None before the first.
        modes, planned, settled, values: see `Host`.
    """

    def __init__(
        self,
        captures: Captures,
        planned: Collection[str],
        note: Callable[[str], None],
        drop_unselected: Callable[[], None],
        parts: bool = False,
        fullgraph: bool = False,
        supply: Supply | None = None,
    ) -> None:
        """Set up; nothing is compiled before the first call.

        Args:
            captures: of the model; who calls holds their lock, which backwards that run a step again take themselves.
            parts: the model is not one graph.
            supply: of what passes have graphs take and return beside the model's own values.
        """
        model = captures.model
        self.model = model
        self.captures = captures
        self._fullgraph = fullgraph
        self.note = note
        self.drop_unselected = drop_unselected
        self.step: RegionStep | None = None
        self.modes: Sequence[Any] = ()
        self.values = Values(supply)
        self.planned = frozenset(planned)
        self._frozen = frozen_names(model)
        self._compiled: BoundedCache[Hashable, Callable[..., Any]] = BoundedCache(PLANS)
        self._steps: BoundedCache[Hashable, RegionStep] = BoundedCache(PLANS)
        self._last: RegionStep | None = None
        self._watched: Sequence[weakref.ref[nn.Parameter]] = ()
        self._ran: list[CompiledRegion] = []
        self._call: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        self._configs = caching_configs(model)
        self._broken = parts
        self._breaks: int | None = None  # before the call under way; None where it compiles nothing
        self._loss_alone = captures.loss_alone
        self._watches = not (parts or captures.loss_alone)
        self._returned: tuple[Any, Sequence[Any], Ran] | None = None
        self._positions: Sequence[int] = ()
        self._calls = 0
        self._run_last: tuple[Plan | None, frozenset[int] | None, Callable[..., Any]] = (None, None, model)
        self._sized: tuple[Any, int, Any] = (None, 0, None)
        self._settings = Settings(model, captures.long_to_eager, whole=bool(planned) and not parts)
        self.settled = False
        self._draws: bool | None = None
        self._asked: frozenset[int] | None = None
        self._name = f"step_of_model_{next(_models)}"
        self._differentiated = None if parts else frozenset({0})

    def __call__(self, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The model's output, compiled under `plan`.

        Raises:
            PassError: everything that the plan trains is frozen.
        """
        if plan.samples:
            plan = self._for_batch(plan, args, kwargs)
        start = time.perf_counter()
        before: Before | None = None
        if self._watches:
            first, self._calls = self._calls < FIRST_CALLS, self._calls + 1
            before = Before(self._draws is not False, self.model if first else None) if self._draws or first else None
            self._watches = first or bool(self._positions)
        differentiated = self._differentiated
        output, positions = self._run(plan, differentiated, args, kwargs)
        if before is not None:
            before.keep_changed()
        if positions is None:
            raise LossNotFirst(NO_LOSS)
        last, self._last = self._last, self._as_step(plan)
        if self._last is not last or last is None:
            self.step = self._last if self._last is not None and self._last.graphs else None
            self._draws = bool(self._draws) or self.step is None or self.step.draws  # for good: kinds may take turns
            self._watches = self._watches or self._returned is not None
        elif not self.settled:  # one graph, and nothing was compiled: Dynamo need not be prepared for it
            self.settled = not self._broken and len(self._ran) == 1 and not self._settings.always
        if self.step is not None:
            self.step.note_seconds(output, start)
        if self._loss_alone:
            return not_kept(output, positions)
        if self._returned is not None:
            node, outputs, ran = self._returned
            self._returned, self._positions = None, positions
            if ran.region.surroundings is None:
                ran.region.surroundings = Surroundings.of(ran.region, outputs, node, pytree.tree_leaves(output), self.model)
            node.ask = Rerun(self, plan, differentiated, (args, kwargs), before, outputs, ran)
            if before is not None and 1 < self._calls <= FIRST_CALLS and before.has_changed():
                self.differentiate_all()
        return output

    # What a step that runs again asks for; see `Rerun`.

    def again(self, plan: Plan, wanted: frozenset[int], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The output of a step whose leaves at some positions are differentiated; later steps are prepared for those, too."""
        with self.captures.lock:
            output, _ = self._run(plan, wanted, args, kwargs)
            self._returned = None
            self._asked = self._differentiated = wanted if self._asked is None else self._asked | wanted
        return output

    def read_again(
        self, plan: Plan, differentiated: frozenset[int] | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Ran | None:
        """What the step would read if it ran as before; None where that is unknown."""
        with self.captures.lock:
            self._run(plan, differentiated, args, kwargs)
            returned, self._returned = self._returned, None
        return None if returned is None else returned[2]

    def differentiate_all(self) -> None:
        """Have later steps be prepared for every output that may be differentiated."""
        self._asked = self._differentiated = frozenset((0, *self._positions))

    def draws_again(self) -> bool:
        """Whether the step that ran last draws random numbers."""
        return any(draws(node) for region in self._ran if region.graph is not None for node in region.graph.graph.nodes)

    def _run(
        self, plan: Plan, differentiated: frozenset[int] | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any]:
        """The output, and which leaves of it have no backward though they could be differentiated, or are not kept."""
        last, differentiated_last, run = self._run_last
        if plan is not last or differentiated is not differentiated_last:
            run = self._compiled_for(plan, differentiated)
            self._run_last = (plan, differentiated, run)
        self._ran, self._returned, self._breaks, self._call = [], None, None, (args, kwargs)
        found: tuple[Any, Any]
        try:
            if self.settled and not compat.is_observed():
                nothing_compiles(Unsettled)
                if not self._configs:
                    found = run(*args, **kwargs)
                else:
                    with self._prepared():
                        found = run(*args, **kwargs)
                self._call = ((), {})
                return found
        except Exception as error:
            if not (isinstance(cause_of(error), Unsettled) or is_traced_elsewhere(error)):
                self._call = ((), {})
                raise
        finally:
            nothing_compiles(None)
        self.settled, self._ran, self._returned, self._breaks = False, [], None, graph_breaks()
        batch = batch_of(args, kwargs, self.captures.batch_dim)[:2] if plan.samples else ((), ())  # so rows of samples are known
        try:
            with TRACING, self._settings, symbolic_dims(*batch), self._prepared():
                found = run(*args, **kwargs)
                return found
        except Exception as error:
            cause = cause_of(error)
            if isinstance(cause, GraphoptError):
                raise cause from None
            raise
        finally:
            self._call = ((), {})

    def _compiled_for(self, plan: Plan, differentiated: frozenset[int] | None) -> Callable[..., Any]:
        key = (plan.key, differentiated)
        known = self._compiled.get(key)
        if known is not None:
            return known
        model, graphopt_finish = self.model, loss_alone if self._loss_alone else finishing(differentiated)

        def call(*args: Any, **kwargs: Any) -> Any:
            return graphopt_finish(model(*args, **kwargs))  # by this name Dynamo leaves out guards: see `compiled_by`

        backend = "aot_eager" if plan.measures else self.captures.backend  # it runs once in many
        own, planned = with_own_code(call, self._name), PlanBackend(plan, weakref.ref(self), backend)  # type: ignore[arg-type]
        with TRACING, self._settings:
            return self._compiled.put(key, compiled_by(own, planned, self._fullgraph))

    def _for_batch(self, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
        """`Plan.for_batch`, the same object as long as it is the same."""
        self._call = (args, kwargs)
        size = self.batch_size()
        if self._sized[0] is not plan or self._sized[1] != size:
            self._sized = (plan, size, plan.for_batch(size))
        return self._sized[2]

    @contextlib.contextmanager
    def _prepared(self) -> Iterator[None]:
        """Generative models are not to return a cache; what watches operators sees those of compiled graphs alone."""
        with without_cache(self._configs):
            if not compat.is_observed():
                yield
                return
            with compat.unobserved() as modes:
                self.modes = tuple(modes)
                try:
                    yield
                finally:
                    self.modes = ()

    def _check_all_planned(self, plan: Plan) -> None:
        """See that what ran was compiled: what Dynamo has left to eager mode must not train tensors that are not selected."""
        self._broken = self._broken or self._breaks not in (None, graph_breaks())
        if not self._ran:
            self.note(_UNCOMPILED)
        seen = {p.name for region in self._ran for p in region.region.parameters}
        missing = self.planned.intersection(n for n, p in self.model.named_parameters() if p.requires_grad) - seen
        if plan.train is not None and (self._broken or not missing <= plan.train):
            self._watched = [weakref.ref(p) for p in self.model.parameters()]
            self.drop_unselected()
            if self._broken and missing and self._differentiated is not None:  # it was one graph
                self.note(
                    f"torch.compile breaks the graph of a step, and traces no use of {len(missing)} parameters (the first is "
                    f"{min(missing)}). What is used in eager mode, as where modules have backward hooks or a recurrent layer "
                    "another length, takes all FLOPs of its gradients, whatever the budget. TORCH_LOGS=graph_breaks says where"
                )

    def _as_step(self, plan: Plan) -> RegionStep | None:
        """What has just run, the same object for the same regions, of which each is of one plan; None if nothing was compiled."""
        ran, last = tuple(self._ran), self._last
        if last is not None and len(ran) == 1 == len(last.regions) and ran[0] is last.regions[0] and not self._watched:
            return last
        step = self._steps.get(ran) if ran else None
        if step is None:
            self._check_all_planned(plan)
            if ran:
                step = self._steps.put(ran, RegionStep(plan, ran, deque(maxlen=32), self._broken))
                final = self._returned is None or self.captures.own_loss  # else loss= may differentiate more outputs
                if final and self._frozen.issuperset(frozen_names(self.model)):  # else full training takes less
                    step.tell_of_flops(self.note)
        elif self._watched and [id(known()) for known in self._watched] != list(map(id, self.model.parameters())):
            self._check_all_planned(plan)  # others are in the place of what loses its gradients
        return step

    # What a backend asks for; see `Host`.

    def names(self) -> Mapping[int, Sequence[str]]:
        """See `tensor_names`."""
        return tensor_names(self.model)

    def batch_size(self) -> int:
        """Of the call under way; 1 where it has none."""
        return batch_of(*self._call, self.captures.batch_dim)[2]

    def batch_dims(self, values: Sequence[Any]) -> Sequence[int | None]:
        """Which dimension of each value is the batch; None for what is none of the call's tensors."""
        tensors, dims, _ = batch_of(*self._call, self.captures.batch_dim)
        found = dict(zip(map(id, tensors), dims, strict=True))
        return [found.get(id(value)) for value in values]

    def check(self, plan: Plan) -> None:
        """Raise `PassError` if the user has frozen what is selected, and not all: nothing would be trained."""
        trainable = [name for name, p in self.model.named_parameters() if p.requires_grad]
        if plan.train is not None and trainable and plan.train.isdisjoint(trainable):
            raise PassError(ALL_FROZEN)

    def compiled(self, region: CompiledRegion) -> None:
        """Count."""
        counters = self.captures.counters
        counters.compilations += 1
        counters.compile_seconds += region.compile_seconds
        counters.rewrite_seconds += region.rewrite_seconds

    @property
    def begun(self) -> bool:
        """Whether another region has run in the call under way."""
        return bool(self._ran)

    def is_given(self, tensor: Tensor) -> bool:
        """Whether a tensor is an argument of the call under way."""
        return any(tensor is given for given in flatten_call(*self._call).tensors)

    def returned(self, node: Any, outputs: Sequence[Any], ran: Ran) -> None:
        """Remember until the call has returned."""
        self._returned = (node, outputs, ran)

    def ran(self, region: CompiledRegion) -> None:
        """Note that a region runs in the step under way."""
        nothing_compiles(None)  # an operator of the user's may have Dynamo compile its own Python
        self._ran.append(region)
        if not region.gated and self.values.supply is not None:
            self.values.supply.finish()

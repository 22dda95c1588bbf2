"""Running a model under a plan, through torch.compile."""

from __future__ import annotations

import contextlib
import itertools
import time
import types
import weakref
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from graphopt import compat
from graphopt.calls import BatchDim, batch_dims_of, batch_size_of, flatten_call
from graphopt.capture import TRACING, caching_configs
from graphopt.compat import pytree
from graphopt.compat.dynamo import Settings, cause_of, compiled_by, graph_breaks, symbolic_dims
from graphopt.errors import GraphoptError, InputError, LossNotFirst, PassError
from graphopt.frontend.backend import PlanBackend, Unsettled
from graphopt.frontend.compiled_region import CompiledRegion
from graphopt.frontend.outputs import detached, loss_alone, not_kept, reattached
from graphopt.frontend.region import tensor_names
from graphopt.frontend.step import RegionStep
from graphopt.frontend.values import Supplier, Values
from graphopt.lower import Backend
from graphopt.planner.plan import Plan
from graphopt.runtime.bounded_cache import BoundedCache
from graphopt.runtime.counters import Counters
from graphopt.runtime.draws import draws
from graphopt.testing.compare import tolerance_of
from graphopt.transforms.symbolic_zeros import NO_LOSS

_models = itertools.count()

_CHANGED = (
    "an output of the model beside the loss was differentiated, for which the step was to run again, but its inputs or "
    "attributes are no longer what they were: forward() changes them. Repeat the step; later ones are prepared for it."
)

FIRST_CALLS = 4
"""Calls in which buffers are remembered, in case that the step has to run again; by then it is known what is differentiated."""

PLANS = 16
"""Plans whose compiled graphs are kept."""


class Running:
    """Runs a model's training steps under plans; a plan that comes again is still compiled.

    Attributes:
        step: that ran last; None before the first.
        modes, values: see `Host`.
    """

    def __init__(
        self,
        model: nn.Module,
        backend: Backend,
        counters: Counters,
        planned: Collection[str],
        note: Callable[[str], None],
        drop_unselected: Callable[[], None],
        batch_dim: BatchDim = 0,
        fullgraph: bool = False,
        parts: bool = False,
        supplier: Supplier | None = None,
        loss_alone: bool = False,
    ) -> None:
        """Set up; nothing is compiled before the first call.

        Args:
            parts: the model is not one graph.
            supplier: of what passes have graphs take and return beside the model's own values.
            loss_alone: outputs beside the loss are not kept.
        """
        self.model = model
        self.backend = backend
        self.counters = counters
        self.batch_dim = batch_dim
        self.fullgraph = fullgraph
        self.note = note
        self.drop_unselected = drop_unselected
        self.step: RegionStep | None = None
        self.modes: Sequence[Any] = ()
        self.values = Values(supplier)
        self._planned = frozenset(planned)
        self._compiled: BoundedCache[Hashable, Callable[..., Any]] = BoundedCache(PLANS)
        self._checked: set[Hashable] = set()
        self._steps: dict[Hashable, RegionStep] = {}
        self._ran: list[CompiledRegion] = []
        self._call: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        self._configs = caching_configs(model)
        self._broken = parts
        self._breaks = graph_breaks()
        self._loss_alone = loss_alone
        self._detaches = not loss_alone
        self._calls = 0
        self._run_last: tuple[Plan | None, frozenset[int] | None, Callable[..., Any]] = (None, None, model)
        self._sized: tuple[Any, int, Any] = (None, 0, None)
        self._settings = Settings(model)
        self._last: tuple[Plan | None, list[CompiledRegion]] = (None, [])
        self.settled = False
        self._trainable: list[nn.Parameter] | None = None
        self._devices: list[str] = []
        self._draws = True
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
        may_run_again = self._detaches and self._differentiated is not None
        before = torch.get_rng_state() if self._draws and may_run_again else None
        inputs = _tensors((args, kwargs)) if may_run_again else []
        versions = [t._version for t in inputs]
        self._calls += 1
        watched = list(self.model.buffers()) if may_run_again and self._calls <= FIRST_CALLS else []
        buffers = [(b, b.detach().clone()) for b in watched]
        output, positions = self._run(plan, self._differentiated, args, kwargs)
        if positions is None:
            raise LossNotFirst(NO_LOSS)
        if plan is not self._last[0] or self._ran != self._last[1]:
            self._last = (plan, self._ran)
            self._check_all_planned(plan)
            self.step = self._as_step(plan)
            self._draws = self.step is None or self.step.draws
        else:  # one graph, and nothing was compiled: Dynamo need not be prepared for it
            self.settled = not self._broken and len(self._ran) == 1 and not self._settings.always
        if self.step is not None and len(self.step.seconds) < (self.step.seconds.maxlen or 0):
            _when_backward_ends(output, lambda: self.step.seconds.append(time.perf_counter() - start))  # type: ignore[union-attr]
        if self._loss_alone:
            return not_kept(output, positions)
        if not positions:
            self._detaches = False
            return output
        if not may_run_again:  # the first call of this kind
            inputs = _tensors((args, kwargs))
            versions = [t._version for t in inputs]
        self._detaches = True
        if not self.settled or self._trainable is None:  # else Dynamo's guards hold: they are the same
            self._trainable = [p for p in self.model.parameters() if p.requires_grad]
            self._devices = sorted({"cpu", *(p.device.type for p in self._trainable)})
        anchors = [*self._trainable, *(t for t in inputs if t.requires_grad)]
        leaves, spec = pytree.tree_flatten(output)
        seen, everything = [leaves[i] for i in positions], frozenset(range(len(leaves)))  # `rerun` must not hold what holds it
        own = vars(self.model)
        called = [own.get(name, _ABSENT) for name in _OF_A_CALL]
        autocast = [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in self._devices]

        def rerun(wanted: Sequence[int], gradients: Sequence[Tensor]) -> Sequence[Tensor | None]:
            if versions != [t._version for t in inputs]:
                self._asked = self._differentiated = everything
                raise GraphoptError(_CHANGED)
            with self._as_before(before, buffers), contextlib.ExitStack() as stack:
                for kind, dtype, enabled in autocast:
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
                vars(self.model).pop("forward", None)  # a loop's own, which would compute a step in this one
                vars(self.model).update((k, v) for k, v in zip(_OF_A_CALL, called, strict=True) if v is not _ABSENT)
                again, _ = self._run(plan, frozenset(wanted), args, kwargs)
                more = frozenset() if self._asked is None else self._asked
                self._asked = self._differentiated = more | frozenset(wanted)
                found = pytree.tree_leaves(again)
                self._check_same([(found[i], before) for i, before in zip(positions, seen, strict=True) if i in wanted])
                return torch.autograd.grad([found[i] for i in wanted], anchors, gradients, allow_unused=True)

        return pytree.tree_unflatten(reattached(leaves, positions, anchors, rerun), spec)

    def _run(
        self, plan: Plan, differentiated: frozenset[int] | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any]:
        """The output, and which leaves of it are detached though they could be differentiated, or not kept."""
        last, differentiated_last, run = self._run_last
        if plan is not last or differentiated is not differentiated_last:
            run = self._compiled_for(plan, differentiated)
            self._run_last = (plan, differentiated, run)
        self._ran, self._call = [], (args, kwargs)
        try:
            if self.settled and not compat.is_observed():
                if not self._configs:
                    return run(*args, **kwargs)
                with self._prepared():
                    return run(*args, **kwargs)
        except Exception as error:
            if not isinstance(cause_of(error), Unsettled):
                raise
        self.settled = False
        try:
            with TRACING, self._settings, self._symbolic_batch(plan):
                if not self._configs and not compat.is_observed():
                    found: tuple[Any, Any] = run(*args, **kwargs)
                else:
                    with self._prepared():
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
        """What runs the model under a plan."""
        key = (plan.key, differentiated)
        run = self._compiled.get(key)
        if run is None:
            with TRACING:
                run = self._compiled.put(key, self._under(plan, differentiated))
        return run

    def _for_batch(self, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
        """`Plan.for_batch`, the same object as long as it is the same."""
        self._call = (args, kwargs)
        size = self.batch_size()
        if self._sized[0] is not plan or self._sized[1] != size:
            self._sized = (plan, size, plan.for_batch(size))
        return self._sized[2]

    @contextlib.contextmanager
    def _as_before(self, draws: Tensor | None, before: Sequence[tuple[Tensor, Tensor]]) -> Iterator[None]:
        """A step runs again: with the same random numbers of the CPU and buffers, and without a trace in them and attributes."""
        buffers = [(b, b.detach().clone()) for b in self.model.buffers()]
        versions = [b._version for b, _ in buffers]
        attributes = [(vars(module), dict(vars(module))) for module in self.model.modules()]
        now = torch.get_rng_state()
        try:
            if draws is not None:
                torch.set_rng_state(draws)
            with torch.no_grad():
                for buffer, value in before:
                    buffer.copy_(value)
            with torch.enable_grad():
                yield
        finally:
            torch.set_rng_state(now)
            for held, values in attributes:
                held.clear()
                held.update(values)
            with torch.no_grad():
                for (buffer, value), version in zip(buffers, versions, strict=True):
                    buffer.copy_(value)
                    compat.set_version(buffer, version)  # the first run's backward may still read it

    def _check_same(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Raise, or tell, if a step that ran again gave another output."""
        if all(_close(a.detach(), b.detach()) for a, b in pairs):
            return
        if any(draws(node) for region in self._ran if region.graph is not None for node in region.graph.graph.nodes):
            self.note("an output beside the loss was differentiated; in this first step its dropout was drawn again")
            return
        raise GraphoptError(_CHANGED)

    @contextlib.contextmanager
    def _prepared(self) -> Iterator[None]:
        """Generative models are not to return a cache; what watches operators sees those of compiled graphs alone."""
        cached = [config for config in self._configs if config.use_cache]
        for config in cached:
            config.use_cache = False
        try:
            if not compat.is_observed():
                yield
                return
            with compat.unobserved() as modes:
                self.modes = tuple(modes)
                yield
        finally:
            self.modes = ()
            for config in cached:
                config.use_cache = True

    def _under(self, plan: Plan, differentiated: frozenset[int] | None) -> Callable[..., Any]:
        model, alone = self.model, self._loss_alone

        def call(*args: Any, **kwargs: Any) -> Any:
            output = model(*args, **kwargs)
            if alone:
                return loss_alone(output)
            return (output, ()) if differentiated is None else detached(output, differentiated)

        backend = "aot_eager" if plan.measures else self.backend  # it runs once in many
        # Dynamo keeps what it compiles with the code object, which is to go when the model does, and what it has learned about
        # sizes by the code's name, which is this model's own.
        code = call.__code__.replace(co_name=self._name)
        own = types.FunctionType(code, call.__globals__, self._name, None, call.__closure__)
        return compiled_by(own, PlanBackend(plan, weakref.ref(self), backend), self.fullgraph)  # type: ignore[arg-type]

    def _check_all_planned(self, plan: Plan) -> None:
        """See that what ran was compiled: what Dynamo has left to eager mode must not train tensors that are not selected."""
        key = (plan.key, tuple(map(id, self._ran)))
        if key in self._checked:
            return
        self._checked.add(key)
        self._broken = self._broken or graph_breaks() != self._breaks
        if not self._ran:
            self.note(
                "a step ran uncompiled: torch.compile compiles nothing here, or has compiled this model too often for what "
                "changes from step to step. TORCH_LOGS=recompiles says what"
            )
        seen = {p.name for region in self._ran for p in region.region.parameters}
        trainable = {name for name, p in self.model.named_parameters() if p.requires_grad}
        if plan.train is not None and (self._broken or not trainable & self._planned <= seen | plan.train):
            self.drop_unselected()

    def _as_step(self, plan: Plan) -> RegionStep | None:
        """The step that has just run, the same object for the same regions."""
        ran = tuple(self._ran)
        if not any(region.graph is not None for region in ran):
            return None
        key = (*map(id, ran), self._broken)
        if key not in self._steps:
            if len(self._steps) >= PLANS:
                self._steps.clear()
            self._steps[key] = RegionStep(plan, ran, deque(maxlen=32), self._broken)
        return self._steps[key]

    # What a backend asks for; see `Host`.

    def names(self) -> Mapping[int, Sequence[str]]:
        """See `tensor_names`."""
        return tensor_names(self.model)

    def planned(self) -> Collection[str]:
        """Parameters that the plans know of."""
        return self._planned

    def batch_size(self) -> int:
        """Of the call under way; 1 where it has none."""
        inputs = flatten_call(*self._call)
        try:
            return batch_size_of(inputs, batch_dims_of(inputs, self.batch_dim)) or 1
        except InputError:  # the inputs are no batch of samples
            return 1

    def batch_dims(self, values: Sequence[Any]) -> Sequence[int | None]:
        """Which dimension of each value is the batch; None for what is none of the call's tensors."""
        found = self._batch_dims()
        return [found.get(id(value)) for value in values]

    def _batch_dims(self) -> dict[int, int | None]:
        """Of the call under way, by the tensors' `id`."""
        inputs = flatten_call(*self._call)
        try:
            dims = batch_dims_of(inputs, self.batch_dim)
            batch_size_of(inputs, dims)
        except InputError:  # no batch of samples
            return {}
        return {id(tensor): dim for tensor, dim in zip(inputs.tensors, dims, strict=True)}

    def _symbolic_batch(self, plan: Plan) -> contextlib.AbstractContextManager[None]:
        """What is compiled to leave out rows is traced for any number of them: so it is known which rows are samples."""
        if not plan.samples:
            return contextlib.nullcontext()
        dims, tensors = self._batch_dims(), flatten_call(*self._call).tensors
        return symbolic_dims(tensors, [dims.get(id(tensor)) for tensor in tensors])

    def check(self, plan: Plan) -> None:
        """Raise `PassError` if the user has frozen everything that is selected: nothing would be trained."""
        if plan.train is not None and not any(p.requires_grad for n, p in self.model.named_parameters() if n in plan.train):
            raise PassError("every selected tensor is frozen now: call reselect(batch), or unfreeze one of them.")

    def compiled(self, region: CompiledRegion) -> None:
        """Count."""
        self.counters.compilations += 1
        self.counters.compile_seconds += region.compile_seconds
        self.counters.rewrite_seconds += region.rewrite_seconds

    def ran(self, region: CompiledRegion) -> None:
        """Note that a region runs in the step under way."""
        self._ran.append(region)
        if not region.gated and self.values.supplier is not None:
            self.values.supplier.finish()


_OF_A_CALL = ("forward", "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""Attributes of a model that a training loop changes around a call; a step that runs again has those of its call."""

_ABSENT = object()


def _tensors(tree: Any) -> list[Tensor]:
    """The tensors in nested containers."""
    return [leaf for leaf in pytree.tree_flatten(tree)[0] if isinstance(leaf, Tensor)]  # tree_leaves takes four times as long


def _close(again: Tensor, before: Tensor) -> bool:
    tolerance = tolerance_of([before.dtype])
    largest = float(before.abs().max()) if before.numel() else 0.0
    return torch.allclose(again, before, rtol=tolerance, atol=tolerance * largest, equal_nan=True)


def _when_backward_ends(output: Any, then: Callable[[], None]) -> None:
    """Call `then` at the end of the first backward from what a model has returned."""
    leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.grad_fn is not None]
    if leaves:
        handle: Any = None

        def begun(_: Tensor) -> None:
            handle.remove()
            torch.autograd.Variable._execution_engine.queue_callback(then)

        handle = leaves[0].register_hook(begun)

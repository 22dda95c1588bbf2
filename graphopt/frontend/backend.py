"""The backend of torch.compile that carries out a plan: each graph's joint graph is rewritten, and nothing else is different.

What cannot be rewritten is compiled as torch.compile would; tensors that are not selected still get no gradient there.
"""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import SymInt, Tensor, fx, nn

from graphopt.compat import InputDesc, OutputDesc, expression, observed_by, output_list
from graphopt.compat.aot import Hooks, compile_joint, compile_plainly, joint_graph, split_again
from graphopt.compat.dynamo import differentiates, example_of, is_restart, outside_tracing
from graphopt.compat.graph_modules import copied, graph_module
from graphopt.errors import CaptureError, first_line
from graphopt.frontend.history import needs_gradient
from graphopt.frontend.region import Region, drop_gradients, fix_sizes, region_of, training_graph, write_mutations
from graphopt.frontend.values import Values
from graphopt.graph import TrainingGraph, ancestors, remove_dead_nodes
from graphopt.lower import Backend
from graphopt.passes import PassReport, Preserves
from graphopt.passes.technique import technique
from graphopt.planner.plan import Plan
from graphopt.runtime.stages import stage
from graphopt.transforms.symbolic_zeros import for_loss_alone


class Unsettled(Exception):
    """A graph was to be compiled in a step for which nothing was prepared; see `Host.settled`."""


@dataclass(eq=False)
class CompiledRegion:
    """A region as it was compiled.

    Attributes:
        region: its parameters.
        graph: the joint graph that runs; None where there is no backward, or where all came from torch's cache on disk.
        halves: the forward and the backward before they were compiled; None likewise, and until asked for with `again` where all
            came from torch's cache on disk.
        again: makes the halves that came from there.
        reports: what each pass did.
        compile_seconds: of compiling, rewriting included; `rewrite_seconds` is the passes' share.
        sizes: of the last run, in the order of the placeholders that are numbers.
        sampled_part: see `Plan.sampled_part`.
        reduced: the plan's approximations could not be carried out.
        needless: positions of its inputs that require a gradient which leads to nothing that is trained.
        gated: it waits by itself for what is still to be done to its weights; see `graphopt.passes.lsp.offload_nodes`.
    """

    region: Region
    graph: TrainingGraph | None = None
    halves: tuple[fx.GraphModule, fx.GraphModule] | None = None
    again: Callable[[], None] | None = None
    reports: tuple[PassReport, ...] = ()
    compile_seconds: float = 0.0
    rewrite_seconds: float = 0.0
    sizes: tuple[int, ...] = ()
    sampled_part: float = 1.0
    reduced: bool = False
    gated: bool = False
    needless: tuple[int, ...] = ()

    def graph_of_last_run(self) -> TrainingGraph | None:
        """`graph`, with the sizes of the last run in the place of those that it was compiled with."""
        if self.graph is None or not self.sizes:
            return self.graph
        numbers = [n.meta.get("val") for n in self.graph.placeholders]
        symbols = [next(iter(s.free_symbols)) for v in numbers if isinstance(v, SymInt) and (s := expression(v)).is_Symbol]
        return replace(self.graph, sizes={**self.graph.sizes, **dict(zip(symbols, self.sizes, strict=False))})


class Host(Protocol):
    """Whom a backend works for.

    Attributes:
        modes: that watch operators; see `observed_by`.
        settled: nothing is expected to be compiled; if something is after all, `Unsettled` has the host prepare for it.
        values: that passes have graphs exchange with Python.
    """

    modes: Sequence[Any]
    settled: bool
    values: Values

    def names(self) -> Mapping[int, Sequence[str]]:
        """See `tensor_names`."""
        ...

    def planned(self) -> Collection[str]:
        """The parameters that a plan knows of; others are trained."""
        ...

    def batch_size(self) -> int:
        """Of the call under way."""
        ...

    def batch_dims(self, values: Sequence[Any]) -> Sequence[int | None]:
        """Which dimension of each value is the batch, among the tensors of the call under way."""
        ...

    def check(self, plan: Plan) -> None:
        """Raise what the user has to know before anything is compiled under a plan."""
        ...

    def compiled(self, region: CompiledRegion) -> None:
        """Called with a region that was compiled."""
        ...

    def ran(self, region: CompiledRegion) -> None:
        """Called with a region that runs."""
        ...

    def drop_unselected(self) -> None:
        """Tensors that are not selected are to lose every gradient that reaches them."""
        ...

    def note(self, text: str) -> None:
        """Warn, once, of what runs in another way than planned."""
        ...


class PlanBackend:
    """What Dynamo calls with each graph of a model under one plan."""

    def __init__(self, plan: Plan, host: Callable[[], Host], backend: Backend) -> None:
        """Set up.

        Args:
            host: a weak reference, since Dynamo keeps backends for ever.
        """
        self.plan = plan
        self.host = host
        self.backend = backend

    def __call__(self, module: fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        """What Dynamo is to run in the place of a graph."""
        if self.host().settled:
            raise Unsettled
        copy = graph_module(module, copied(module.graph))  # compiling changes the graph
        placeholders = module.graph.find_nodes(op="placeholder")
        values = [example_of(node) for node in placeholders]
        first = self._made(module, examples, region_of(placeholders, values, self.host().names()), values)
        return _Regions(self, copy, placeholders, values, first)

    def _made(self, module: fx.GraphModule, examples: Sequence[Any], region: Region, values: Sequence[Any]) -> _Made:
        """Compile a region.

        Args:
            values: of the placeholders in the call under way.
        """
        start = time.perf_counter()
        host, found = self.host(), CompiledRegion(region, needless=self.needless(values))
        with stage("compile"):
            run = self._compile(module, examples, found, host, values)
        found.compile_seconds = time.perf_counter() - start
        host.compiled(found)
        trained = [p.name for p in region.parameters if p.trainable and self._trains(p.name, host.planned())]
        cuts = any(p.trainable for p in region.parameters if p.name not in trained)
        return _Made(found, run, _sources(found, trained) if cuts else ())

    def needless(self, values: Sequence[Any]) -> tuple[int, ...]:
        """Positions of inputs that require a gradient, but only for what the plan does not train, or for nothing at all."""
        if self.plan.train is None:
            return ()
        tensors = [(i, v) for i, v in enumerate(values) if isinstance(v, Tensor) and v.requires_grad]
        return tuple([i for i, v in tensors if not isinstance(v, nn.Parameter) and not needs_gradient(v, self._wanted)])

    def _wanted(self, leaf: Tensor) -> bool:
        """Whether the gradient of a leaf is asked for: it is trained, or no parameter, so that the caller may hold it."""
        host = self.host()
        if not isinstance(leaf, nn.Parameter):
            return True
        names = host.names().get(id(leaf), ())
        return not names or self._trains(names[0], host.planned())

    def _trains(self, name: str, planned: Collection[str]) -> bool:
        return self.plan.train is None or name in self.plan.train or name not in planned

    def _compile(
        self, module: fx.GraphModule, examples: Sequence[Any], found: CompiledRegion, host: Host, values: Sequence[Any]
    ) -> Callable[..., Any]:
        """The region under the plan; as torch.compile has it where that fails; in eager mode where that fails, too."""
        if not differentiates(module):
            return compile_plainly(module, examples, self.backend)
        copy = graph_module(module, copied(module.graph))  # compiling changes it
        host.check(self.plan)
        hooks = self._hooks(found, host, values)
        try:
            run = compile_joint(module, examples, self.backend, hooks)
            if found.graph is not None:
                return run
            try:  # all of it came from torch's cache on disk: for reports it is traced once more
                joint, num_forward = joint_graph(graph_module(copy, copied(copy.graph)), examples)
            except CaptureError:  # no output depends on what requires a gradient
                return compile_plainly(copy, examples, self.backend)
            (hooks.rewrite or hooks.see)(joint, num_forward)
            found.again = functools.partial(split_again, copy, list(examples), hooks)
            return run
        except Exception as error:
            if is_restart(error):
                raise
            why = first_line(error)
            host.note(f"a part of the model could not be compiled under the plan ({why}); it runs as torch.compile has it")
        host.drop_unselected()
        found.graph, found.halves, found.reports, found.gated, found.reduced = None, None, (), False, True
        try:
            return compile_plainly(graph_module(copy, copied(copy.graph)), examples, self.backend)
        except Exception as error:
            if is_restart(error):
                raise
            host.note(f"a part of the model could not be compiled ({first_line(error)}); it runs uncompiled")
        return copy

    def _hooks(self, found: CompiledRegion, host: Host, values: Sequence[Any]) -> Hooks:
        weak = self.host  # torch keeps these functions for as long as the compiled graph, which nothing collects in cycles
        dims: Sequence[int | None] = host.batch_dims(values) if self.plan.samples else ()
        trial: dict[str, Tensor] = {}
        if self.plan.samples:  # not held for longer: they are the caller's
            trial = {str(i): value for i, value in enumerate(values) if isinstance(value, Tensor)}

        def see(joint: fx.GraphModule, num_forward: int) -> None:
            remove_dead_nodes(joint)  # a draw that nobody reads is more than torch's simpler partitioner can split
            found.graph = training_graph(found.region, graph_module(joint, copied(joint.graph)), num_forward, weak().batch_size())

        def rewrite(joint: fx.GraphModule, num_forward: int) -> fx.GraphModule:
            start = time.perf_counter()
            num_outputs = len(output_list(joint))
            graph = training_graph(found.region, joint, num_forward, weak().batch_size(), dims)
            graph = self._rewritten(_without(graph, found.needless), found, weak(), trial)
            trial.clear()
            found.graph = graph.clone()
            found.gated = any(node.target is torch.ops.graphopt.gate.default for node in graph.graph.nodes)
            weak().values.connect(graph, num_outputs)
            write_mutations(graph, num_outputs)
            if any(dim is not None for dim in dims):
                fix_sizes(graph)
            found.rewrite_seconds = time.perf_counter() - start
            return graph.module

        def halves(forward: fx.GraphModule, backward: fx.GraphModule) -> None:
            found.halves = (graph_module(forward, copied(forward.graph)), graph_module(backward, copied(backward.graph)))

        def failed(error: Exception) -> None:
            weak().note(f"a backward could not be compiled ({first_line(error)}); it runs uncompiled")

        changes = bool(self.plan.passes)
        return Hooks(
            rewrite if changes else None, see, halves, failed, self._key(found.region, found.needless, host), self.plan.samples
        )

    def _rewritten(self, graph: TrainingGraph, found: CompiledRegion, host: Host, trial: Mapping[str, Tensor]) -> TrainingGraph:
        """A region under the plan; without approximations, or with nothing but the cuts, where that fails."""
        plan = self.plan
        others = [p for p in plan.passes if not technique(p).loss_alone]
        if len(others) < len(plan.passes) and len(for_loss_alone(graph).inputs) < len(graph.inputs):
            plan = plan.with_passes(others)
        if plan.samples:
            try:
                reason = _unsampled(plan, graph, found.region, host.planned(), trial)
            except Exception as error:
                reason = first_line(error)
            if reason:
                host.note(f"the backward is not sampled: {reason}")
                plan = replace(plan, not_separable=reason)
        candidates = [plan]
        if any(p.preserves is not Preserves.EXACT for p in plan.passes):
            candidates.append(plan.without_approximations())
        for candidate in candidates:
            try:
                rewritten, reports = candidate.rewrite_region(graph, host.planned())
            except Exception as error:
                instead = "without approximations" if candidate is not candidates[-1] else "as torch.compile has it"
                host.note(f"a part of the model could not be rewritten ({first_line(error)}); it runs {instead}")
                continue
            found.reports, found.reduced = tuple(reports), candidate is not plan
            found.sampled_part = plan.sampled_part(graph, graph.batch_size, reports)
            return rewritten
        self._drop_unselected(graph, host.planned())
        found.reports, found.reduced = (), True
        return graph

    def _drop_unselected(self, graph: TrainingGraph, planned: Collection[str]) -> None:
        cut = [p.name for p in graph.parameters if not self._trains(p.name, planned)]
        if cut:
            drop_gradients(graph.module, graph, [OutputDesc("gradient", InputDesc("parameter", name)) for name in cut])
            remove_dead_nodes(graph.module)

    def _key(self, region: Region, needless: tuple[int, ...], host: Host) -> str:
        """All that a rewritten region depends on but its graph, as text that is the same in every process."""
        from graphopt import __version__

        passes = [(p.name, repr(p)) for p in self.plan.passes]
        batch = (self.plan.not_separable, host.batch_size()) if self.plan.samples else ()
        plan = (self.plan.key, passes, host.values.numbers, batch)
        parts = (__version__, region.names, needless, sorted(host.planned()), plan)
        return "graphopt " + hashlib.sha256(repr(parts).encode()).hexdigest()


@dataclass(frozen=True)
class _Made:
    """A compiled region.

    Attributes:
        run: what computes it.
        sources: by output that reads no parameter that is trained, the inputs that it reads.
    """

    region: CompiledRegion
    run: Callable[..., Any]
    sources: Sequence[tuple[int, tuple[int, ...]]]


def _without(graph: TrainingGraph, needless: Sequence[int]) -> TrainingGraph:
    """A region without the gradients of some of its inputs."""
    if needless:
        drop_gradients(graph.module, graph, [OutputDesc("gradient", InputDesc("input", i)) for i in needless])
        remove_dead_nodes(graph.module)
    return graph


def _unsampled(plan: Plan, graph: TrainingGraph, region: Region, planned: Collection[str], trial: Mapping[str, Tensor]) -> str:
    """Why rows of a region's backward must not be left out; "" if they may.

    Args:
        trial: values of the placeholders, by position.
    """
    if len(for_loss_alone(graph).inputs) < len(graph.inputs):
        return "outputs beside the loss are differentiated"
    tensors = {name: trial[str(i)] for i, name in enumerate(region.names) if name is not None}
    inputs = [torch.empty(0) if name is not None else trial.get(str(i), torch.empty(0)) for i, name in enumerate(region.names)]
    with outside_tracing():
        return plan.inseparable(plan.before_sampling().rewrite_region(graph, planned)[0], tensors, inputs)


def _sources(made: CompiledRegion, trained: Collection[str]) -> list[tuple[int, tuple[int, ...]]]:
    """See `_Made.sources`."""
    graph = made.graph
    if graph is None:
        return []
    positions: dict[fx.Node, int] = {}
    kept: set[fx.Node] = set()
    for desc, node in zip(graph.inputs, graph.placeholders, strict=True):
        if desc.target in trained:
            kept.add(node)
        elif desc.kind == "input" and isinstance(desc.target, int):
            positions[node] = desc.target
        elif desc.target not in made.region.names:  # something of torch's own
            kept.add(node)
    found = []
    for made_by, result in zip(graph.outputs, graph.results, strict=True):
        if made_by.kind == "output" and isinstance(made_by.target, int) and isinstance(result, fx.Node):
            read = ancestors([result])
            if not read & kept:
                found.append((made_by.target, tuple(positions[node] for node in read if node in positions)))
    return found


class _Regions:
    """What Dynamo runs in the place of a graph.

    Dynamo runs one graph for all layers that look alike, each with its own parameters. But a plan may train one and cut the
    other: so what is compiled is found by the names of the parameters that come.
    """

    def __init__(
        self, backend: PlanBackend, module: fx.GraphModule, placeholders: Sequence[fx.Node], values: Sequence[Any], first: _Made
    ) -> None:
        self.backend = backend
        self.module = module
        self.placeholders = placeholders
        self._held = [i for i, value in enumerate(values) if isinstance(value, nn.Parameter)]
        self._numbers = [i for i, node in enumerate(placeholders) if isinstance(node.meta.get("example_value"), SymInt)]
        needless = first.region.needless
        self._known: dict[Hashable, _Made] = {(tuple(id(values[i]) for i in self._held), needless): first}
        self._by_names: dict[Hashable, _Made] = {(first.region.region.names, needless): first}

    def __call__(self, *args: Any) -> Any:
        needless = self.backend.needless(args)
        made = self._known.get((tuple([id(args[i]) for i in self._held]), needless))
        if made is None:
            made = self._other(args, needless)
        host = self.backend.host()
        host.ran(made.region)
        if self._numbers:
            made.region.sizes = tuple([args[i] for i in self._numbers])
        if host.modes:
            with observed_by(host.modes):
                outputs = made.run(*args)
        else:
            outputs = made.run(*args)
        if not made.sources:
            return outputs
        outputs = list(outputs)
        for i, read in made.sources:  # where nothing is trained up to here, what comes after need not pass a gradient on
            value = outputs[i]
            differentiable = isinstance(value, Tensor) and value.grad_fn is not None
            if differentiable and not any(
                isinstance(args[k], Tensor) and args[k].requires_grad and k not in needless for k in read
            ):
                outputs[i] = value.detach()
        return tuple(outputs)

    def _other(self, args: tuple[Any, ...], needless: tuple[int, ...]) -> _Made:
        """The region for other parameters than those that are known, or other needless gradients."""
        region = region_of(self.placeholders, args, self.backend.host().names())
        key: Hashable = (region.names, needless)
        made = self._by_names.get(key)
        if made is None:  # Dynamo's guards hold for it, but sizes may be symbols there and are numbers here
            key = (key, tuple(tuple(a.shape) if isinstance(a, Tensor) else a for a in args))
            made = self._by_names.get(key)
        if made is None:
            module = graph_module(self.module, copied(self.module.graph))
            made = self._by_names[key] = self.backend._made(module, args, region, args)
        if key == (region.names, needless):
            self._known[tuple([id(args[i]) for i in self._held]), needless] = made
        return made

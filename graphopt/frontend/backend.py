"""The backend of torch.compile that carries out a plan: each graph's joint graph is rewritten, and nothing else is different.

What cannot be rewritten is compiled as torch.compile would; tensors that are not selected still get no gradient there.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import SymInt, Tensor, fx, nn
from torch.autograd.function import BackwardCFunction

from graphopt.compat import WRITES, observed_by, versions_of, wrap_backward
from graphopt.compat.aot import compile_joint, compile_plainly, joint_graph, split_again
from graphopt.compat.distributed import collective_of, is_distributed, is_of_another_rank
from graphopt.compat.dynamo import differentiates, example_of, is_restart
from graphopt.compat.graph_modules import copied, graph_module
from graphopt.distributed.ranks import lost
from graphopt.errors import CaptureError, first_line
from graphopt.frontend.compiled_region import CompiledRegion, Host, Ran
from graphopt.frontend.outputs import (
    answer,
    are_only_returned,
    detach,
    give_backward,
    node_of,
    reads_what_it_changes,
    without_backward,
)
from graphopt.frontend.region import Region, needs_gradient, region_of
from graphopt.frontend.rewriting import hooks_for
from graphopt.lower import Backend
from graphopt.planner.plan import Plan
from graphopt.runtime.stages import stage


class Unsettled(Exception):
    """A graph was to be compiled in a step for which nothing was prepared; see `Host.settled`."""


@dataclass(eq=False)
class PlanBackend:
    """What Dynamo calls with each graph of a model under one plan.

    Attributes:
        host: a weak reference, since Dynamo keeps backends for ever.
    """

    plan: Plan
    host: Callable[[], Host]
    backend: Backend

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
        """Compile a region; `values` are the placeholders' in the call under way."""
        start = time.perf_counter()
        host, found = self.host(), CompiledRegion(region, needless=self.needless(values))
        with stage("compile"):
            run = self._compile(module, examples, found, host, values)
        found.compile_seconds = time.perf_counter() - start
        host.compiled(found)
        trained = [p.name for p in region.parameters if p.trainable and self.plan.trains(p.name, host.planned)]
        cuts = any(p.trainable for p in region.parameters if p.name not in trained)
        parameters = {p.name for p in region.parameters}
        written = {d.target.target for d in found.graph.outputs if d.kind in WRITES} if found.graph else set(region.names)
        unread = written - parameters - {None}
        read = [i for i, v in enumerate(values) if isinstance(v, Tensor) and region.names[i] not in unread]
        communicates = found.graph is not None and any(collective_of(node.target) for node in found.graph.graph.nodes)
        planned = cuts and found.graph is not None
        untrained = [i for i, name in enumerate(region.names) if name in parameters and name not in trained] if planned else []
        return _Made(found, run, found.sources(trained) if cuts else (), read, communicates, untrained)

    def needless(self, values: Sequence[Any]) -> tuple[int, ...]:
        """Positions of inputs that require a gradient, but only for what the plan does not train, or for nothing at all."""
        if self.plan.train is None:
            return ()
        tensors = [(i, v) for i, v in enumerate(values) if isinstance(v, Tensor) and v.requires_grad]
        entering = [(i, v) for i, v in tensors if not isinstance(v, nn.Parameter)]
        if not entering:
            return ()
        wanted = self._wanted()
        return tuple([i for i, v in entering if not needs_gradient(v, wanted)])

    def _wanted(self) -> Callable[[Tensor], bool]:
        """Whether the gradient of a leaf is asked for: it is trained, or no parameter, so that the caller may hold it."""
        host = self.host()
        names, planned = host.names(), host.planned

        def wanted(leaf: Tensor) -> bool:
            own = names.get(id(leaf), ()) if isinstance(leaf, nn.Parameter) else ()
            return not own or self.plan.trains(own[0], planned)

        return wanted

    @staticmethod
    def _is_whole(module: fx.GraphModule, host: Host, values: Sequence[Any]) -> bool:
        """Whether a graph of Dynamo's computes outputs without a backward all by itself, so that it can run again for them.

        It must be the first of its call, and what it differentiates be leaves and the call's arguments: all else may have been
        computed before it.
        """
        if host.begun or not are_only_returned(module):
            return False
        for node, value in zip(module.graph.find_nodes(op="placeholder"), values, strict=True):
            tensor = node.meta.get("example_value") if value is None else value
            differentiated = isinstance(tensor, Tensor) and tensor.requires_grad
            if differentiated and (value is None or not value.is_leaf) and not host.is_given(tensor):
                return False
        return True

    def _compile(
        self, module: fx.GraphModule, examples: Sequence[Any], found: CompiledRegion, host: Host, values: Sequence[Any]
    ) -> Callable[..., Any]:
        """The region under the plan; as torch.compile has it where that fails; in eager mode where that fails, too."""
        if not self._is_whole(module, host, values):
            give_backward(module)
        if not differentiates(module):
            return compile_plainly(module, examples, self.backend)
        found.unasked = without_backward(module)
        self._cut_distributed(module, found.needless, values)
        copy = graph_module(module, copied(module.graph))  # compiling changes it
        host.check(self.plan)
        hooks = hooks_for(self.plan, found, self.host, values)
        try:
            run = compile_joint(module, examples, self.backend, hooks)
            if found.graph is None:
                try:  # all of it came from torch's cache on disk: for reports it is traced once more
                    joint, num_forward = joint_graph(graph_module(copy, copied(copy.graph)), examples)
                except CaptureError:  # no output depends on what requires a gradient
                    found.unasked = ()
                    give_backward(copy)
                    return compile_plainly(copy, examples, self.backend)
                hooks.rewrite(joint, num_forward)
                found.again = functools.partial(split_again, copy, list(examples), hooks)
            if not found.unasked or found.graph is None or not reads_what_it_changes(found.graph):
                return run
        except Exception as error:
            if is_restart(error):
                raise
            why = first_line(error)
            host.note(f"a part of the model could not be compiled under the plan ({why}); it runs as torch.compile has it")
        else:
            give_backward(copy)
            found.again = None
            return self._compile(copy, examples, found, host, values)
        host.drop_unselected()
        found.graph, found.halves, found.reports, found.gated, found.reduced = None, None, (), False, True
        found.unasked = ()
        give_backward(copy)
        try:
            return compile_plainly(graph_module(copy, copied(copy.graph)), examples, self.backend)
        except Exception as error:
            if is_restart(error):
                raise
            host.note(f"a part of the model could not be compiled ({first_line(error)}); it runs uncompiled")
        return copy

    def _cut_distributed(self, module: fx.GraphModule, needless: Sequence[int], values: Sequence[Any]) -> None:
        """Have AOTAutograd trace no gradient of DTensors that none is needed of: it makes a DTensor of whatever comes for one."""
        wanted = self._wanted()
        for i, (node, value) in enumerate(zip(module.graph.find_nodes(op="placeholder"), values, strict=True)):
            divided = isinstance(value, Tensor) and is_distributed(value) and value.requires_grad
            if divided and (i in needless or (value.is_leaf and not wanted(value))):
                detach(module, node)


@dataclass(eq=False)
class _Made:
    """A compiled region.

    Attributes:
        run: what computes it.
        sources: see `CompiledRegion.sources`.
        read: positions of its inputs that are tensors, without buffers that it changes.
        communicates: its backward does, and errors of other ranks are still to become our own there.
        untrained: positions of the parameters that get no gradient from it.
    """

    region: CompiledRegion
    run: Callable[..., Any]
    sources: Sequence[tuple[int, tuple[int, ...]]]
    read: Sequence[int]
    communicates: bool
    untrained: Sequence[int]
    _answers: bool = False

    def node_of(self, outputs: Sequence[Any], args: Sequence[Any]) -> Any:
        """See `graphopt.frontend.outputs.node_of`; it answers gradients of outputs without a backward."""
        region = self.region
        if self._answers:
            return outputs[region.unasked[0]].grad_fn
        node = node_of(outputs, args, region.unasked)
        region.unasked = tuple(i for i in region.unasked if node is not None and outputs[i].grad_fn is node)
        if node is not None:
            assert region.graph is not None
            answer(node, outputs, region.unasked, sum(desc.kind == "tangent" for desc in region.graph.inputs))
            self._answers = True
        return node

    def tell_of_ranks(self, outputs: Sequence[Any], args: Sequence[Any]) -> None:
        """Have the backward of all runs raise `RankError` where torch.distributed has an error of another rank."""
        given = {id(arg) for arg in args}
        nodes = [out.grad_fn for out in outputs if isinstance(out, Tensor) and id(out) not in given]
        node = next((node for node in nodes if isinstance(node, BackwardCFunction)), None)
        if node is not None:
            wrap_backward(node, _telling_of_ranks)
            self.communicates = False


def _telling_of_ranks(node: Any, own: Callable[[Any, list[Any]], Any], gradients: list[Any]) -> Any:
    try:
        return own(node, gradients)
    except Exception as error:
        if is_of_another_rank(error):
            raise lost() from error
        raise


class _Regions:
    """What Dynamo runs in the place of a graph.

    Dynamo runs one graph for all layers that look alike, each with its own parameters. But a plan may train one and cut the
    other: so what is compiled is found by the names of the parameters that come. And a graph may come after others in one call,
    and by itself in another, which matters to outputs without a backward.
    """

    def __init__(
        self, backend: PlanBackend, module: fx.GraphModule, placeholders: Sequence[fx.Node], values: Sequence[Any], first: _Made
    ) -> None:
        self.backend = backend
        self.module = module
        self.placeholders = placeholders
        self._held = [i for i, value in enumerate(values) if isinstance(value, nn.Parameter)]
        self._numbers = [i for i, node in enumerate(placeholders) if isinstance(node.meta.get("example_value"), SymInt)]
        self._asks = bool(without_backward(module))
        self._cuts = backend.plan.train is not None
        kind = first.region.needless, self._asks and backend.host().begun
        self._known: dict[Hashable, tuple[_Made, Any]] = {}
        self._remember(values, kind, first)
        self._by_names: dict[Hashable, _Made] = {(first.region.region.names, kind): first}

    def __call__(self, *args: Any) -> Any:
        host = self.backend.host()
        kind = self.backend.needless(args) if self._cuts else (), self._asks and host.begun
        known = self._known.get((tuple([id(args[i]) for i in self._held]), kind))
        made = self._other(args, kind) if known is None else known[0]
        host.ran(made.region)
        if self._numbers:
            made.region.sizes = tuple([args[i] for i in self._numbers])
        if not made.region.unasked:
            outputs = self._run(made, args, host)
            return _cut(made, outputs, args) if made.sources else outputs
        tensors = [args[i] for i in made.read]
        versions = versions_of(tensors)
        as_it_is = not (made.untrained or made.communicates or host.modes)
        outputs = made.run(*args) if as_it_is else self._run(made, args, host)
        node = made.node_of(outputs, args)
        if made.sources:
            outputs = _cut(made, outputs, args)
        if node is not None:
            node.set_materialize_grads(False)
            host.returned(node, outputs, Ran(made.region, made.region.sizes, tensors, versions))
        return outputs

    @staticmethod
    def _run(made: _Made, args: tuple[Any, ...], host: Host) -> Any:
        given = _without_hooks(made.untrained, args) if made.untrained else args
        if not host.modes:
            outputs = made.run(*given)
        else:
            with observed_by(host.modes):
                outputs = made.run(*given)
        if made.communicates:
            made.tell_of_ranks(outputs, args)
        return outputs

    def _other(self, args: tuple[Any, ...], kind: tuple[tuple[int, ...], bool]) -> _Made:
        """The region for other parameters than those that are known, or of another kind."""
        region = region_of(self.placeholders, args, self.backend.host().names())
        key: Hashable = (region.names, kind)
        made = self._by_names.get(key)
        if made is None:  # Dynamo's guards hold for it, but sizes may be symbols there and are numbers here
            key = (key, tuple(tuple(a.shape) if isinstance(a, Tensor) else a for a in args))
            made = self._by_names.get(key)
        if made is None:
            module = graph_module(self.module, copied(self.module.graph))
            made = self._by_names[key] = self.backend._made(module, args, region, args)
        if key == (region.names, kind):
            self._remember(args, kind, made)
        return made

    def _remember(self, args: Sequence[Any], kind: Hashable, made: _Made) -> None:
        """Note the region for these parameters, until one of them is gone: another may then come to lie at its address."""
        held, known = [args[i] for i in self._held], self._known
        watched = [weakref.ref(parameter, lambda _: known.clear()) for parameter in held]
        known[tuple(map(id, held)), kind] = made, watched


def _without_hooks(untrained: Sequence[int], args: tuple[Any, ...]) -> Sequence[Any]:
    """The arguments, detached where a parameter gets no gradient and has hooks: autograd would call these with None."""
    hooked = [i for i in untrained if args[i]._backward_hooks or args[i]._post_accumulate_grad_hooks]
    if not hooked:
        return args
    given = list(args)
    for i in hooked:
        given[i] = args[i].detach()
    return given


def _cut(made: _Made, outputs: Any, args: tuple[Any, ...]) -> Any:
    """The outputs of a region; where nothing is trained up to one, what comes after it need not pass a gradient on."""
    outputs = list(outputs)
    for i, read in made.sources:
        value = outputs[i]
        differentiable = isinstance(value, Tensor) and value.grad_fn is not None
        needless = made.region.needless
        if differentiable and not any(isinstance(args[k], Tensor) and args[k].requires_grad and k not in needless for k in read):
            outputs[i] = value.detach()
    return tuple(outputs)

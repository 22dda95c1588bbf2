"""AOTAutograd between Dynamo and a compiler: each joint graph, before it is split into a forward and a backward.

AOTAutograd owns aliases, mutations, random states, subclasses and autograd. Its partition function gets the joint graph, which is
where passes run.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._C import DispatchKey
from torch._dynamo.eval_frame import innermost_fn
from torch._higher_order_ops.effects import with_effects
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._prims.rng_prims import graphsafe_run_with_rng_state, run_and_save_rng_state, run_with_rng_state
from torch._subclasses import FakeTensorMode
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.graph import _BoxedCodeGen
from torch.utils import flop_counter

from graphopt.compat.fakes import fake_mode_of, output_list, retrace
from graphopt.compat.graph_modules import lazy_graph_modules
from graphopt.compat.recurrent import open_recurrent_layers
from graphopt.errors import CaptureError

Rewrite = Callable[[fx.GraphModule, int], fx.GraphModule]
"""From a joint graph, and how many of its outputs are the forward's, to the joint graph to run in its place."""

GraphCompiler = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]
"""From a forward or backward graph and its (fake) inputs to what runs it."""


ABSENT = "graphopt_absent"
"""In the `meta` of a tangent of a joint graph: no gradient comes, the backward is called with None in its place."""


@dataclass(frozen=True)
class Hooks:
    """What is done with a joint graph on its way through AOTAutograd.

    Attributes:
        rewrite: see `Rewrite`.
        halves: shown the forward and the backward before they are compiled.
        failed: called with why a backward could not be compiled, which then runs operator by operator.
        key: text that says all that `rewrite` depends on, for torch's caches on disk.
        decomposed: `rewrite` is given operators that are decomposed already, as torch.compile has them.
        untold: `rewrite` depends on what no key can tell, as values and times: AOTAutograd's cache is not asked.
        functions: of our own that Dynamo's graph may call; torch's caches on disk may hold graphs with them.
    """

    rewrite: Rewrite
    halves: Callable[[fx.GraphModule, fx.GraphModule], None]
    failed: Callable[[Exception], None]
    key: str
    decomposed: bool = False
    untold: bool = False
    functions: Sequence[Callable[..., Any]] = ()


def compile_plainly(module: fx.GraphModule, examples: Sequence[Any], compiler: str | GraphCompiler) -> Callable[..., Any]:
    """Compile a graph of Dynamo's as torch.compile would."""
    from torch._inductor.compile_fx import compile_fx

    with _tracing(module):
        if compiler == "inductor":
            return _undecorated(compile_fx(module, list(examples)))
        return _without_inductor(module, examples, compiler, None)


def compile_joint(
    module: fx.GraphModule, examples: Sequence[Any], compiler: str | GraphCompiler, hooks: Hooks
) -> Callable[..., Any]:
    """Compile a graph of Dynamo's that has a backward, with `hooks` on its joint graph.

    Args:
        compiler: "inductor", "aot_eager" or a function that compiles one half.
    """
    from torch._inductor.compile_fx import compile_fx

    cached = {"enable_autograd_cache": False} if hooks.untold else {}
    known = {**config.unsafe_marked_cacheable_functions, **{f"{f.__module__}.{f.__name__}": hooks.key for f in hooks.functions}}
    patched = config.patch(custom_partitioner_fn=_Partitioner(hooks), unsafe_marked_cacheable_functions=known)
    with _tracing(module), patched, torch._functorch.config.patch(cached):
        if compiler != "inductor":
            return _without_inductor(module, examples, compiler, hooks)
        decomposed_later: dict[str, Any] = {} if hooks.decomposed else {"decompositions": {}}
        return _undecorated(compile_fx(module, list(examples), **decomposed_later))


def _undecorated(compiled: Any) -> Callable[..., Any]:
    """Without the wrapper that keeps Dynamo from tracing it: Dynamo puts one around everything that a backend returns."""
    return innermost_fn(compiled)


@contextlib.contextmanager
def _tracing(module: fx.GraphModule) -> Iterator[None]:
    """What AOTAutograd gets wrong is right inside: see `open_recurrent_layers`.

    And its pass that turns Python floats back into numbers takes a buffer of one float64 for such a float, and loses what forward
    writes to it. Where no float is lifted, that pass has nothing to do.
    """
    from torch._functorch._aot_autograd import graph_compile

    arguments = [node.meta.get("grapharg") for node in module.graph.find_nodes(op="placeholder")]
    lifted = any(getattr(a, "pass_arg_as_tensor", False) or getattr(a, "is_unspecialized", False) for a in arguments)
    skipped: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if not lifted and hasattr(graph_compile, "_apply_tensorify_python_scalars"):
        skipped = mock.patch.object(graph_compile, "_apply_tensorify_python_scalars", return_value=None)
    with open_recurrent_layers(), skipped, _tracing_context():
        yield


def _tracing_context() -> contextlib.AbstractContextManager[Any]:
    """One of torch's own, unless Dynamo has opened it: without one a backward keeps a second run of the forward's attention.

    AOTAutograd takes attention for a random draw there, which is not removed though nothing reads it.
    """
    if torch._guards.TracingContext.try_get() is not None:
        return contextlib.nullcontext()
    return torch._guards.tracing(torch._guards.TracingContext(FakeTensorMode()))


class _Traced(Exception):
    """Ends a compilation when the joint graph is there."""


def joint_graph(module: fx.GraphModule, examples: Sequence[Any]) -> tuple[fx.GraphModule, int]:
    """The joint graph of a graph of Dynamo's, and how many of its outputs are the forward's; `module` stays as it is."""
    found: list[tuple[fx.GraphModule, int]] = []

    def split(joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        found.append((joint, num_fwd_outputs))
        raise _Traced

    _trace(module, examples, partition_fn=split, keep_inference_input_mutations=True)
    if not found:
        raise CaptureError("it has no backward")
    return found[0]


def forward_graph(module: fx.GraphModule, examples: Sequence[Any]) -> tuple[fx.GraphModule, int]:
    """As `joint_graph`, of a graph of Dynamo's that has no backward."""
    found: list[fx.GraphModule] = []

    def compile_forward(forward: fx.GraphModule, inputs: Any) -> Any:
        found.append(forward)
        raise _Traced

    with torch.no_grad():
        _trace(module, examples, inference_compiler=compile_forward)
    if not found:
        raise CaptureError("AOTAutograd traces nothing of it")
    return found[0], len(output_list(found[0]))


def split_again(module: fx.GraphModule, examples: Sequence[Any], hooks: Hooks) -> None:
    """Trace a graph of Dynamo's and split it as for Inductor, so that `hooks` see what came from torch's cache."""

    def split(joint: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        _Partitioner(hooks)(joint, inputs, **options)
        raise _Traced

    _trace(module, examples, partition_fn=split, keep_inference_input_mutations=True)


def _trace(module: fx.GraphModule, examples: Sequence[Any], **options: Any) -> None:
    """Trace a graph of Dynamo's up to the function among `options` that raises `_Traced`."""
    from torch._dynamo.backends.common import aot_autograd

    with contextlib.suppress(_Traced), _tracing(module):
        aot_autograd(fw_compiler=_boxed, bw_compiler=_boxed, **options)(module, list(examples))


def _without_inductor(
    module: fx.GraphModule, examples: Sequence[Any], compiler: str | GraphCompiler, hooks: Hooks | None
) -> Callable[..., Any]:
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    def split(joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        from graphopt.compat.inductor import as_marked

        with lazy_graph_modules():
            if hooks is not None:
                joint = hooks.rewrite(joint, num_fwd_outputs)
            forward, backward = as_marked(joint, inputs, num_fwd_outputs=num_fwd_outputs, **options)
        if hooks is not None:
            hooks.halves(forward, backward)
        return forward, backward

    def half(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        return make_boxed_func(compiler(graph, inputs)) if callable(compiler) else _boxed(graph, inputs)

    def backward_half(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        try:
            return half(graph, inputs)
        except Exception as error:
            if hooks is None:
                raise
            hooks.failed(error)
            return _boxed(graph, inputs)

    backend = aot_autograd(fw_compiler=half, bw_compiler=backward_half, partition_fn=split, keep_inference_input_mutations=True)
    return _undecorated(backend(module, list(examples)))


class _Partitioner(CustomPartitionerFn):
    """Rewrites, decomposes and splits; `uuid` lets torch's caches tell plans apart."""

    def __init__(self, hooks: Hooks) -> None:
        self.hooks = hooks

    def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        joint, inputs, options = gm, joint_inputs, kwargs
        from torch._inductor import compile_fx
        from torch._inductor.virtualized import V

        from graphopt.compat.inductor import min_cut

        joint = self.hooks.rewrite(joint, options["num_fwd_outputs"])
        with lazy_graph_modules():
            if not self.hooks.decomposed:
                joint = decomposed(joint)
                values = [v for node in joint.graph.nodes if isinstance(v := node.meta.get("val"), torch.Tensor)]
                with V.set_fake_mode(fake_mode_of(values)):
                    device = values[0].device
                    joint = compile_fx._recursive_joint_graph_passes(joint, skip_invoke_subgraph=True, input_device=device)
            forward, backward = min_cut(joint, inputs, **options)
        for node in backward.graph.find_nodes(op="placeholder"):
            if node.meta.get(ABSENT):
                node.meta = {**node.meta, "val": None}
        self.hooks.halves(forward, backward)
        return forward, backward

    def uuid(self) -> Any:
        """For torch's caches on disk."""
        return self.hooks.key

    def __reduce__(self) -> Any:
        return str, (self.hooks.key,)


def decomposed(joint: fx.GraphModule) -> fx.GraphModule:
    """A joint graph in the operators that Inductor lowers; inputs and outputs keep their names and descriptions."""
    before = [node for node in joint.graph.nodes if node.op == "placeholder"]
    values = [node.meta.get("val") for node in before]
    fake_mode = fake_mode_of([v for v in values if isinstance(v, torch.Tensor)])
    module = retrace(joint, values, fake_mode, decompose=True)
    for old, new in zip(before, [node for node in module.graph.nodes if node.op == "placeholder"], strict=True):
        new.meta |= {k: v for k, v in old.meta.items() if k not in new.meta}
        if new.name != old.name:
            new.name = new.target = old.name
    module.graph.output_node().meta = dict(joint.graph.output_node().meta)
    return module


@functools.cache
def _count_repeated_draws() -> None:
    """Let `FlopCounterMode` look into the operators by which a recomputed dropout draws the same numbers, or with effects.

    torch's own ends such a graph with a TypeError.
    """
    counter = getattr(flop_counter, "_FlopCounterMode", None)
    draws = (run_and_save_rng_state, run_with_rng_state, graphsafe_run_with_rng_state)
    kernels = {**dict.fromkeys(draws, DispatchKey.BackendSelect), with_effects: DispatchKey.CompositeExplicitAutograd}
    for operator, kernel in kernels.items() if counter is not None else ():
        if counter not in operator.python_key_table:
            operator.py_impl(counter)(functools.partial(_counted, operator, kernel))


def _counted(operator: Any, kernel: DispatchKey, mode: Any, *args: Any, **kwargs: Any) -> Any:
    with mode:
        return operator.py_kernels[kernel](*args, **kwargs)


def _boxed(graph: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
    """A graph run operator by operator, each value freed after its last use.

    Its code is made at once: made in the first run, that would be a call of a module, which FLOP counters and the like hook into.
    """
    _count_repeated_draws()
    graph.graph.set_codegen(_BoxedCodeGen())
    graph.recompile()
    _LazyGraphModule.force_recompile(graph)
    forward = graph.forward

    def run(args: list[Any]) -> Any:
        return forward(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run

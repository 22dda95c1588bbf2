"""What the program that Inductor would generate for a graph allocates and releases, read without compiling its kernels.

Inductor decides while it generates code: what it fuses, in which order kernels run, which buffers are written over. So its
own pipeline runs up to the generated wrapper, and is stopped there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal
from unittest import mock

import sympy
import torch
from torch import fx
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor import config
from torch._inductor.utils import BoxedBool

from graphopt.compat import fake_mode_of, no_autocast, output_list, pytree, unsynced_tracing_context
from graphopt.compat.inductor import restride_saved
from graphopt.ops.by_tokens import by_tokens_workspace


@dataclass(frozen=True)
class Buffer:
    """A storage that the program makes.

    Attributes:
        name: unique in its program.
        shape, size: elements per dimension, and bytes, as expressions of the graph's symbols.
        dtype: of the elements.
        node: the graph's node that it holds the result of, if one is known.
    """

    name: str
    shape: tuple[sympy.Expr, ...]
    size: sympy.Expr
    dtype: torch.dtype
    node: fx.Node | None


@dataclass(frozen=True)
class Event:
    """One thing that the program does.

    "allocate" makes `buffer` and lets the variable `name` hold it; "hold" lets `name` hold what `source` holds, or only the
    one of its storages that is called `only`; "release" ends a variable; "run" runs the kernel `name`.
    """

    kind: Literal["allocate", "hold", "release", "run"]
    name: str
    buffer: Buffer | None = None
    source: str = ""
    only: str = ""


@dataclass(frozen=True)
class Program:
    """The order of events in the function that Inductor generates.

    Attributes:
        outputs: per result the variable that holds it; None for a constant.
        strides: per result, as expressions of the graph's symbols; None for what is not a tensor.
    """

    events: tuple[Event, ...]
    outputs: tuple[str | None, ...]
    strides: tuple[tuple[sympy.Expr, ...] | None, ...]


def inductor_programs(
    forward: fx.GraphModule, backward: fx.GraphModule, num_mutations: int, num_outputs: int, static_inputs: Sequence[int]
) -> tuple[Program, Program]:
    """The programs for the halves of a partitioned joint graph, which are used up.

    Args:
        num_mutations, num_outputs: the forward returns updated buffers, then the model's outputs, then saved tensors.
        static_inputs: positions of the forward's inputs that keep their address (parameters and buffers).
    """
    visible = range(num_mutations, num_mutations + num_outputs)
    results = output_list(forward)
    first = _program(forward, visible, static_inputs, is_backward=False)
    fake_mode = fake_mode_of([n.meta["val"] for n in backward.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)])
    with fake_mode or contextlib.nullcontext():
        restride_saved(results, backward, first.strides)
    num_saved = sum(1 for n in backward.graph.nodes if n.op == "placeholder" and "tangents" not in n.name)
    donated = _donated(forward, results, backward, num_mutations + num_outputs)
    second = _program(backward, range(len(output_list(backward))), range(num_saved), is_backward=True, donated=donated)
    return first, second


def _donated(forward: fx.GraphModule, results: Sequence[Any], backward: fx.GraphModule, num_forward: int) -> list[int]:
    """Positions of what the backward is given and nobody else holds, so that it may write over it."""
    from torch._functorch._aot_autograd.graph_compile import collect_fw_donated_buffer_idxs

    def values(nodes: Sequence[Any]) -> list[Any]:
        return [n.meta.get("val") if isinstance(n, fx.Node) else None for n in nodes]

    inputs = [n for n in forward.graph.nodes if n.op == "placeholder"]
    saved = [n for n in results[num_forward:] if isinstance(n, fx.Node) and isinstance(n.meta.get("val"), torch.Tensor)]
    found = collect_fw_donated_buffer_idxs(
        values(inputs), values(results[:num_forward]), values(output_list(backward)), values(saved)
    )
    names = {saved[i].name for i in found}
    return [i for i, n in enumerate(n for n in backward.graph.nodes if n.op == "placeholder") if n.name in names]


def _program(
    module: fx.GraphModule, visible: Sequence[int], static: Sequence[int], is_backward: bool, donated: Sequence[int] = ()
) -> Program:
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.cudagraph_utils import BoxedDeviceIndex
    from torch._inductor.graph import GraphLowering, SubgraphLowering
    from torch._inductor.virtualized import V

    def stop(self: Any) -> Any:
        if isinstance(self, SubgraphLowering):  # a branch of torch.cond, within the program
            return generate(self)
        generate(self)
        raise _Generated(_read(self))

    generate = GraphLowering.codegen
    results = tuple(n.name if isinstance(n, fx.Node) else None for n in output_list(module))
    module.graph.output_node().meta["user_visible_output_idxs"] = [i for i in visible if results[i] is not None]
    fake_mode = fake_mode_of([n.meta["val"] for n in module.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)])
    try:
        with (
            torch.no_grad(),
            no_autocast(),
            V.set_fake_mode(fake_mode),
            unsynced_tracing_context(fake_mode) as context,
            config.patch(fx_graph_cache=False, fx_graph_remote_cache=False, force_disable_caches=False),  # or a folder is left
            mock.patch.object(GraphLowering, "codegen", stop),
            _scalar_kernels(),
            _groups_unknown(),
        ):
            context.fw_metadata = SimpleNamespace(bw_donated_idxs=list(donated))
            compile_fx_inner(
                module,
                [n.meta["val"] for n in module.graph.nodes if n.op == "placeholder"],
                static_input_idxs=list(static),
                cudagraphs=BoxedBool(False),
                is_backward=is_backward,
                boxed_forward_device_index=BoxedDeviceIndex(None),
            )
    except _Generated as generated:
        return generated.program
    except BackendCompilerFailed as error:
        if isinstance(error.inner_exception, _Generated):
            return error.inner_exception.program
        raise
    return Program((), results, (None,) * len(results))  # nothing to compute: no program is generated


def _groups_unknown() -> contextlib.AbstractContextManager[Any]:
    """Inductor's log does not look up process groups: there may be none of the name that a collective has."""
    from torch._dynamo.repro import after_aot

    if not hasattr(after_aot, "_extract_distributed_info"):
        return contextlib.nullcontext()
    return mock.patch.object(after_aot, "_extract_distributed_info", return_value={})


@contextlib.contextmanager
def _scalar_kernels() -> Iterator[None]:
    """Leave out the vectorised forms of CPU kernels: the scalar form, which is generated first, decides which buffers are used.

    Where loops are fused by their outer levels, how they are tiled decides, too: those are generated in full.
    """
    from torch._inductor.codegen import cpp

    generate = cpp.CppScheduling.codegen_node

    class ScalarOnly(cpp.CppKernelProxy):
        def __init__(self, kernel_group: Any) -> None:
            super().__init__(kernel_group)
            self.picked_vec_isa: Any = None

    def scalar(self: Any, node: Any) -> Any:
        if isinstance(node, cpp.OuterLoopFusedSchedulerNode):
            return generate(self, node)
        with mock.patch.object(self, "kernel_proxy_cls", ScalarOnly):
            return generate(self, node)

    with mock.patch.object(cpp.CppScheduling, "codegen_node", scalar):
        yield


class _Generated(Exception):
    """Stops Inductor's pipeline once it has generated the program."""

    def __init__(self, program: Program) -> None:
        super().__init__("the program is generated")
        self.program = program


def _read(graph: Any) -> Program:
    from torch._inductor import ir

    outputs: list[str | None] = []
    strides: list[tuple[sympy.Expr, ...] | None] = []
    for node in graph.graph_outputs:
        tensor = isinstance(node, ir.IRNode) and node.has_tensor_output()
        outputs.append(node.get_name() if tensor else None)
        strides.append(tuple(node.get_stride()) if tensor else None)
    events = tuple(event for line in graph.wrapper_code.lines for event in _events(graph, line))
    return Program(events, tuple(outputs), tuple(strides))


def _events(graph: Any, line: Any) -> Iterator[Event]:
    """What one line of the generated function does; lines that neither allocate nor compute do nothing."""
    from torch._inductor.codegen import wrapper

    if isinstance(line, wrapper.AllocateLine):
        yield Event("allocate", line.node.get_name(), _buffer(graph, line.node))
    elif isinstance(line, wrapper.FreeIfNotReusedLine):
        if not line.is_reused:
            yield Event("release", line.node.get_name())
    elif isinstance(line, wrapper.FreeLine):
        yield Event("release", line.node.get_name())
    elif isinstance(line, wrapper.ReuseLine):
        yield Event("hold", line.reused_as.get_name(), source=line.node.get_name())
        if line.delete_old:
            yield Event("release", line.node.get_name())
    elif isinstance(line, wrapper.ReinterpretLine):
        yield Event("hold", line.reused_as.get_name(), source=line.node.get_name())
    elif isinstance(line, wrapper.MultiOutputLine):
        yield Event("hold", line.result_name, source=line.arg_name, only=line.result_name)
    elif isinstance(line, wrapper.ExternKernelAllocLine):
        yield from _allocated_by(graph, line.node)
        workspace = _workspace(line.node)
        if workspace is not None:
            yield Event("allocate", workspace.name, workspace)
        yield Event("run", line.node.get_kernel_name())
        if workspace is not None:
            yield Event("release", workspace.name)
    elif isinstance(line, (wrapper.ExternKernelOutLine, wrapper.ScatterFallbackLine, wrapper.IndexPutFallbackLine)):
        yield Event("run", line.node.get_kernel_name() or type(line.node).__name__)
    elif isinstance(line, wrapper.KernelCallLine):
        yield Event("run", line.kernel_name)


def _allocated_by(graph: Any, node: Any) -> Iterator[Event]:
    """Results of an operator that makes its own storages; those that nothing reads exist while it runs."""
    from torch._inductor import ir

    name = node.get_name()
    aliased = node.get_inputs_that_alias_output()
    if aliased:
        for source in aliased:
            yield Event("hold", name, source=source)
    elif isinstance(node.layout, ir.MultiOutputLayout):
        for output in pytree.tree_leaves(getattr(node, "outputs", ())):
            if isinstance(output, ir.MultiOutput):
                yield Event("allocate", name, _buffer(graph, output))
    elif not isinstance(node.layout, (ir.NoneLayout, ir.MutationLayoutSHOULDREMOVE)):
        yield Event("allocate", name, _buffer(graph, node))


def _workspace(node: Any) -> Buffer | None:
    """What an operator of graphopt's allocates while it runs."""
    if getattr(node, "op_overload", None) is not torch.ops.graphopt.by_tokens.default:
        return None
    program, chunk, _, workspace = node.constant_args
    size = by_tokens_workspace(program, chunk, workspace, sympy.sympify(node.inputs[0].get_size()[0]))
    return Buffer(f"{node.get_name()}_chunk", (size,), size, torch.uint8, None)


def _buffer(graph: Any, node: Any) -> Buffer:
    elements = sympy.sympify(graph.get_allocation_storage_size(node))
    shape = tuple(sympy.sympify(size) for size in node.get_size())
    dtype = node.get_dtype()
    return Buffer(node.get_name(), shape, elements * dtype.itemsize, dtype, _origin(node))


def _origin(node: Any) -> Any:
    """The node of the graph that a buffer is the result of; a kernel's workspace has none."""
    if not hasattr(node, "get_origin_node"):
        return None
    origin = node.get_origin_node()
    return origin or max(node.get_origins(), key=lambda n: n.name, default=None)

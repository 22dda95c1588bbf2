"""Capture: a model's calls as a Dynamo graph, and its forward and backward as one joint graph, in plain types."""

from __future__ import annotations

import builtins
import contextlib
import functools
import os
import threading
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import sympy
import torch
from torch import Tensor, fx, nn
from torch._dynamo import functional_export
from torch._dynamo.functional_export import dynamo_graph_capture_for_export
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.variables import ConstantVariable
from torch._dynamo.variables.misc import LoggingLoggerVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch.fx import traceback
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError

from graphopt.compat.descriptions import (
    InputDesc,
    OutputDesc,
    describe_input,
    describe_output,
    take_meshes_out,
)
from graphopt.compat.effects import take_tokens_out
from graphopt.compat.graph_modules import lazy_graph_modules
from graphopt.compat.handed_out import results_handed_out
from graphopt.compat.recurrent import REASON, open_recurrent_layers
from graphopt.compat.replaced import Replaced
from graphopt.errors import CaptureError


@dataclass(frozen=True)
class JointExport:
    """A joint forward and backward graph with plain descriptors; see `InputDesc` and `OutputDesc`."""

    module: fx.GraphModule
    inputs: tuple[InputDesc, ...]
    outputs: tuple[OutputDesc, ...]
    out_spec: Any
    guards: tuple[sympy.Basic, ...]
    ranges: dict[sympy.Symbol, Any]


class BatchSpecialised(Exception):
    """Internal: the model's code fixed the batch size while it was traced; the text says where."""


def mark_batch_symbolic(tensor: Tensor, dim: int) -> None:
    """Ask Dynamo to trace dimension `dim` of `tensor` as a symbol, and the others as the numbers they are."""
    for other in range(tensor.dim()):
        if other == dim:
            torch._dynamo.mark_dynamic(tensor, other)
        else:
            torch._dynamo.mark_static(tensor, other)


@contextlib.contextmanager
def no_new_globals(function: Any) -> Iterator[None]:
    """A trace of `function` leaves nothing among its globals, where Dynamo keeps graphs, and so their parameters, for ever."""
    names = function.__globals__
    before = set(names)
    try:
        yield
    finally:
        for name in set(names) - before:
            del names[name]


def dynamo_capture(module: nn.Module, args: Sequence[Tensor]) -> fx.GraphModule:
    """Trace `module(*args)` to one FX graph, without running it; its `meta["handed_out"]`: see `results_handed_out`.

    Raises:
        BatchSpecialised: a dimension marked by `mark_batch_symbolic` was fixed by the model's code.
        CaptureError: the model cannot be traced as one graph; names the user's source line.
    """
    with (
        warnings.catch_warnings(),
        intermediates_that_require_grad(whole=True),
        messages_given_once(),
        annotated_by_this_thread(),
        as_if_compiled(),
        results_handed_out() as handed_out,
        torch._dynamo.config.patch(allow_rnn=True, assume_static_by_default=True, automatic_dynamic_shapes=False),
    ):
        warnings.filterwarnings("ignore", message="While compiling, we found certain side effects")
        try:
            graph = dynamo_graph_capture_for_export(module)(*args)
        except ConstraintViolationError as error:
            raise BatchSpecialised(str(error)) from error
        except torch._dynamo.exc.TorchDynamoException as error:
            if "ConstraintViolation" in str(error) or "mark_dynamic" in str(error):
                raise BatchSpecialised(str(error)) from error
            raise CaptureError(_explain_graph_break(error)) from error
    for name in ("_dynamo_bytecode_flatten", "_dynamo_bytecode_unflatten"):
        part = getattr(graph, name, None)
        if part is not None:  # torch 2.11 forgets that Python's builtins are always in scope
            part.f_globals = {**vars(builtins), **part.f_globals}
    graph.meta["handed_out"] = handed_out
    return graph


def messages_given_once() -> contextlib.AbstractContextManager[Any]:
    """While this is entered, Dynamo has a message that a logger gives once given when it traces the call, in place of a break.

    Such as `logger.warning_once` of transformers: a method that is cached (`functools.lru_cache`) gives a message once, however
    often it is called. All others are Dynamo's.
    """
    known = LoggingLoggerVariable.call_method

    def call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        method: Any = getattr(self.value, name, None)
        if not isinstance(getattr(method, "__func__", None), functools._lru_cache_wrapper):
            return known(self, tx, name, args, kwargs)
        told, named = [a.realize() for a in args], {key: a.realize() for key, a in kwargs.items()}
        if not all(a.is_python_constant() for a in [*told, *named.values()]):
            return known(self, tx, name, args, kwargs)
        method(*(a.as_python_constant() for a in told), **{key: a.as_python_constant() for key, a in named.items()})
        return ConstantVariable.create(None)

    return Replaced(LoggingLoggerVariable, "call_method", call_method)


def annotated_by_this_thread() -> contextlib.AbstractContextManager[Any]:
    """While this is entered, calls of other threads leave no notes in what this one traces.

    torch keeps notes in one place for all threads. Compiled code that runs in another thread would take its own away twice, which
    ends its step with a KeyError.
    """
    known, tracing = traceback.annotate, threading.get_ident()

    @contextlib.contextmanager
    def annotate(notes: dict[str, Any]) -> Iterator[None]:
        with known(notes) if threading.get_ident() == tracing else contextlib.nullcontext():
            yield

    return mock.patch.object(traceback, "annotate", annotate)


def as_if_compiled() -> contextlib.AbstractContextManager[Any]:
    """`torch.compiler.is_exporting()` is false in a trace, as it is where a step is compiled.

    Models ask: those of transformers leave out masks that hide nothing, and what is planned on has to leave them out, too.
    """
    if not hasattr(functional_export, "_compiling_state_context"):
        return contextlib.nullcontext()
    compiling = functools.partial(mock.patch.object, torch.compiler, "_is_compiling_flag", True)  # torch's sets another flag, too
    return mock.patch.object(functional_export, "_compiling_state_context", compiling)


def intermediates_that_require_grad(whole: bool) -> contextlib.AbstractContextManager[Any]:
    """Let Dynamo trace `requires_grad_()` on a result, as checkpointing of models with frozen embeddings calls it.

    Dynamo breaks the graph there if the result, or what depends on it, is returned, because the result's own gradient is lost. A
    joint graph computes the gradients of parameters, and they do not depend on it. So here it does so only where the result
    itself is handed on to other Python of the model's, which may ask for its gradient, as adversarial training does.

    Args:
        whole: the model is one graph, so that nothing is handed on; torch 2.11, which always breaks the graph there, does not
            tell at the call whether it will be.
    """
    if hasattr(OutputGraph, "_check_requires_grad_intermediate_outputs"):
        check = OutputGraph._check_requires_grad_intermediate_outputs

        def checked(graph: Any, returned: list[Any], tx: Any) -> None:
            if not tx.one_graph and not _is_whole_model(graph):
                results = [v for v in graph.leaf_var_creation_order if isinstance(v, TensorVariable) and not v.source]
                made = {result.as_proxy().node for result in results}
                check(graph, [v for v in returned if isinstance(v, TensorVariable) and v.as_proxy().node in made], tx)

        return Replaced(OutputGraph, "_check_requires_grad_intermediate_outputs", checked)
    if not whole:
        return contextlib.nullcontext()
    traced = TensorVariable.method_requires_grad_

    def passed_over(self: Any, tx: Any, requires_grad: Any = True) -> Any:
        wanted = requires_grad is True or requires_grad.as_python_constant()
        return self if wanted and not self.source else traced(self, tx, requires_grad)

    return Replaced(TensorVariable, "method_requires_grad_", passed_over)


def _is_whole_model(graph: Any) -> bool:
    """Whether a graph of Dynamo's is the model to its end, so that what it returns goes to the caller of the model."""
    calls_the_model = graph.root_tx.f_code.co_filename.startswith(_FRONT_END)
    return calls_the_model and not graph.compile_subgraph_reason.graph_break


_FRONT_END = os.path.join(os.path.dirname(os.path.dirname(__file__)), "frontend") + os.sep
"""Where functions are that call a whole model and are compiled; no models are there."""

_NOT_THE_USERS = tuple(os.path.dirname(file) + os.sep for file in (torch.__file__, os.path.dirname(__file__)))
"""Folders of torch and of this package, wherever they are installed: not every path with such a name is theirs."""


def _explain_graph_break(error: Exception) -> str:
    """One readable message out of Dynamo's: the reason, the user's source line, and what to do."""
    reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    frames = [f for f in getattr(error, "real_stack", None) or () if not f.filename.startswith(_NOT_THE_USERS)]
    remedy = (
        "move that line out of forward(), replace it by tensor operations (torch.where, torch.cond), or pass its result in as an "
        "input"
    )
    if frames and "site-packages" in frames[-1].filename:
        remedy = (
            "that line is a library's. If it only prepares something, run the model once before; otherwise set the model up so "
            "that it is not reached (where it serves gradient checkpointing, turn that off: Budget(memory=...) does the same)"
        )
    if reason == REASON:
        remedy = "leave it so, or pass a budget or fullgraph=True to have it compiled step by step"
    if "bind arguments" in reason:
        remedy = "call it with the arguments that forward() takes"
    if "backwards hooks" in reason:
        remedy = "register the hook on the model itself, or a tensor hook on an output, or remove it before optimize()"
    where = f" at {frames[-1].filename}:{frames[-1].lineno}: `{frames[-1].line}`" if frames else ""
    return f"the model cannot be captured as one graph{where}. Reason: {reason.rstrip('.')}. Remedy: {remedy}."


def export_joint(stack: contextlib.ExitStack, module: nn.Module, args: Sequence[Tensor]) -> JointExport:
    """Trace forward and backward of `module(*args)` to one ATen graph.

    Args:
        stack: stays open as long as the returned graph is traced further.
        module: what `dynamo_capture` returned, or any module that AOTAutograd can trace.
        args: the flat tensor inputs.

    Raises:
        CaptureError: no output requires a gradient, or the model does something a joint graph cannot hold.
    """
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

    context = getattr(module, "meta", {}).get("tracing_context")
    if context is not None:  # remembers which dimensions are symbols
        stack.enter_context(torch._guards.tracing(context))
    with _unchanged_tensors(module), open_recurrent_layers(), lazy_graph_modules():
        joint = aot_export_joint_with_descriptors(stack, module, tuple(args))
    metadata = joint._aot_state.fw_metadata
    for info in metadata.input_info:
        if info.mutates_metadata or (info.mutates_data and info.requires_grad):
            raise CaptureError(
                "forward() resizes, re-strides or changes in place a tensor that requires a gradient. "
                "Remedy: compute a new tensor instead, or make the change under torch.no_grad() outside forward()."
            )
    take_meshes_out(joint.graph_module)
    take_tokens_out(joint.graph_module)
    graph = joint.graph_module.graph
    output = graph.output_node()
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    shape_env = joint.fake_mode.shape_env
    return JointExport(
        module=joint.graph_module,
        inputs=tuple(describe_input(node.meta["desc"]) for node in placeholders),
        outputs=tuple(OutputDesc("none", None) if desc is None else describe_output(desc) for desc in output.meta["desc"]),
        out_spec=joint.out_spec,
        guards=() if shape_env is None else tuple(shape_env.replace(guard.expr) for guard in shape_env.guards),
        ranges={} if shape_env is None else dict(shape_env.var_to_range),
    )


@contextlib.contextmanager
def _unchanged_tensors(module: nn.Module) -> Iterator[None]:
    """Put a module's own tensors back after a trace.

    AOTAutograd swaps them by name; where a submodule has two names, the second swap takes the traced tensor for the original.
    Tensors that are neither parameters nor buffers are constants of the trace, and written to where the model does that.
    """
    held = [(m, dict(m._parameters), dict(m._buffers)) for m in module.modules()]
    plain = [(t, t._version, t.detach().clone()) for m in module.modules() for t in vars(m).values() if isinstance(t, Tensor)]
    try:
        yield
    finally:
        for tensor, version, value in plain:
            if tensor._version != version:
                with torch.no_grad():
                    tensor.copy_(value)
        for submodule, parameters, buffers in held:
            submodule._parameters.update(parameters)
            submodule._buffers.update(buffers)

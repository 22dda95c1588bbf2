"""Every non-public torch API that graphopt uses, in one place, but for torch's test databases, which `bench` reads.

Supported: torch 2.11 to 2.13. The rest of the code sees only the plain types defined here (`JointExport`, `InputDesc`,
`OutputDesc`) and ordinary FX graphs, so a new torch release means mending this package alone.

Map: `joint`, from a model to Dynamo's graph and the joint graph; `descriptions`, what that takes and returns; `fakes`, shapes
without memory and tracing again; `graph_modules`, graphs whose Python code nobody reads; `recompute`, what the backward computes
again; `schemas`, what an operator writes to; `inductor`, partitioning and compiling; `inductor_program`, what Inductor's programs
allocate. The names of all but the last two are found here, too.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch._logging import trace_structured
from torch.nn.modules import module as _modules
from torch.utils import _pytree
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _len_torch_dispatch_stack,
    _pop_mode,
    _push_mode,
)
from torch.utils.module_tracker import ModuleTracker

from graphopt.compat.descriptions import (
    FORWARD as FORWARD,
    WRITES as WRITES,
    InputDesc as InputDesc,
    OutputDesc as OutputDesc,
    describe_joint as describe_joint,
)
from graphopt.compat.dynamo import is_compile_error as is_compile_error
from graphopt.compat.fakes import (
    call_knowing_values as call_knowing_values,
    expression as expression,
    failures_raised_alone as failures_raised_alone,
    fake_copy as fake_copy,
    fake_like as fake_like,
    fake_mode_of as fake_mode_of,
    fake_with_values as fake_with_values,
    known_integer_values as known_integer_values,
    new_fake_mode as new_fake_mode,
    no_autocast as no_autocast,
    output_list as output_list,
    retrace as retrace,
    run_on_metadata as run_on_metadata,
    unsynced_tracing_context as unsynced_tracing_context,
    without_storage as without_storage,
)
from graphopt.compat.graph_modules import graph_module as graph_module, lazy_graph_modules as lazy_graph_modules
from graphopt.compat.joint import (
    BatchSpecialised as BatchSpecialised,
    JointExport as JointExport,
    dynamo_capture as dynamo_capture,
    export_joint as export_joint,
    mark_batch_symbolic as mark_batch_symbolic,
    no_new_globals as no_new_globals,
)
from graphopt.compat.recompute import (
    IN_FORWARD as IN_FORWARD,
    KEEP as KEEP,
    RECOMPUTE as RECOMPUTE,
    SAVE as SAVE,
    in_region as in_region,
    is_kept as is_kept,
    is_recomputed as is_recomputed,
    recompute_mark as recompute_mark,
)
from graphopt.compat.schemas import (
    arguments_of as arguments_of,
    draws as draws,
    has_effect as has_effect,
    has_schema as has_schema,
    is_in_place as is_in_place,
    written_arguments as written_arguments,
)
from graphopt.errors import TorchVersionError

SUPPORTED = ((2, 11), (2, 13))

OpOverload = torch._ops.OpOverload
"""The type of an operator such as `torch.ops.aten.mm.default`."""

pytree = _pytree
"""Nested lists, tuples and dicts as flat lists."""

DispatchMode = TorchDispatchMode
"""Sees every operator that runs while it is entered."""

MODULE_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""The attributes of a module that hold what runs around its forward and backward."""


def require_supported_torch(version: str = torch.__version__) -> None:
    """Raise `TorchVersionError` unless `version` is a torch release that graphopt was tested with."""
    major, minor = (int(part) for part in version.split(".")[:2])
    low, high = SUPPORTED
    if not low <= (major, minor) <= high:
        raise TorchVersionError(
            f"graphopt needs torch {low[0]}.{low[1]} to {high[0]}.{high[1]}, found {version}. "
            f"Install a supported one, for instance: pip install 'torch=={high[0]}.{high[1]}.*'"
        )


_version_of = operator.attrgetter("_version")


def versions_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """How many times each was changed; -1 of those made in inference mode, which cannot be changed outside of it."""
    try:
        return list(map(_version_of, tensors))
    except RuntimeError:
        return [-1 if tensor.is_inference() else tensor._version for tensor in tensors]


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Say that a tensor's values are those that it had when it was changed `version` times."""
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


def wrap_backward(node: Any, run: Callable[[Any, Callable[..., Any], list[Any]], Any]) -> None:
    """Have all autograd nodes of a Python function run their backward by way of `run`.

    Args:
        node: one of them.
        run: (node, its own backward, gradients of its outputs) -> gradients of its inputs. It calls own(node, gradients), where
            absent gradients are None, or not at all.
    """
    function = node._forward_cls
    own = function.backward

    def unboxed(node: Any, *gradients: Any) -> Any:  # torch 2.11 and 2.12
        return run(node, lambda node, gradients: own(node, *gradients), list(gradients))

    def boxed(node: Any, gradients: list[Any]) -> Any:
        return run(node, own, gradients)

    function.backward = staticmethod(boxed if getattr(function, "boxed_grads_call", False) else unboxed)


def on_compiled_autograd(node: Any, begun: Callable[[Any], None], check: Callable[[Sequence[Any]], None]) -> None:
    """Where torch's compiled autograd runs the nodes of a compiled graph, which calls no backward of theirs.

    Args:
        node: one of them.
        begun: called with the node. Where `check` cannot be called (torch 2.11 and 2.12), its errors are all that there is.
        check: called with the gradients of the node's outputs.
    """
    function = node._forward_cls
    key, prologue = function._compiled_autograd_key, getattr(function, "_bw_prologue_fn", None)

    def begins(node: Any) -> Any:
        begun(node)
        if prologue is None:
            check([torch.empty(0)] * len(node._input_metadata))
        return key(node)

    function._compiled_autograd_key = staticmethod(begins)
    if prologue is not None:

        def checked(saved: Any, numbers: Any, objects: Any, gradients: Sequence[Any]) -> Any:
            check(gradients)
            return prologue(saved, numbers, objects, gradients)

        function._bw_prologue_fn = staticmethod(checked)


keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
"""In a backward: whether there may be another (`retain_graph=True`)."""


@contextlib.contextmanager
def unobserved() -> Iterator[list[Any]]:
    """Modes that watch or change operators, such as FLOP counters, and their module trackers do not see what runs meanwhile.

    Yields:
        Those modes; see `observed_by`.
    """
    with contextlib.ExitStack() as stack:
        modes = stack.enter_context(_disable_current_modes())
        for hooks in (_modules._global_forward_pre_hooks, _modules._global_forward_hooks):
            others = {k: hook for k, hook in hooks.items() if not isinstance(getattr(hook, "__self__", None), ModuleTracker)}
            if len(others) < len(hooks):  # Dynamo cannot trace these
                stack.enter_context(mock.patch.dict(hooks, others, clear=True))
        yield modes


def in_function_transform() -> bool:
    """Whether a transform of `torch.func` (grad, vmap, jacrev ...) is under way, in which torch.compile compiles nothing."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_observed() -> bool:
    """Whether some mode watches or changes operators now."""
    return _len_torch_dispatch_stack() > 0


@contextlib.contextmanager
def observed_by(modes: Sequence[Any]) -> Iterator[None]:
    """Within `unobserved`: what runs meanwhile is seen by the modes after all."""
    for mode in reversed(modes):
        _push_mode(mode)
    try:
        yield
    finally:
        for _ in modes:
            _pop_mode()


def trace_artifact(name: str, text: str) -> None:
    """Hand `text` to torch's structured trace, so that TORCH_TRACE and tlparse show it as artifact `name`."""
    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=lambda: text)


def backward_dtypes(scalar: torch.Tensor) -> set[torch.dtype]:
    """Types of the gradients that autograd computes on the way from `scalar`; within reentrant checkpoints none are seen."""
    return {metadata.dtype for node in functions_behind([scalar]) for metadata in getattr(node, "_input_metadata", ())}


def functions_behind(tensors: Iterable[torch.Tensor]) -> Iterator[Any]:
    """What autograd runs to compute gradients of what `tensors` were computed from, each function once."""
    seen: set[Any] = {tensor.grad_fn for tensor in tensors} - {None}
    ahead = list(seen)
    while ahead:
        node = ahead.pop()
        yield node
        after = {source for source, _ in node.next_functions} - seen - {None}
        seen |= after
        ahead += after

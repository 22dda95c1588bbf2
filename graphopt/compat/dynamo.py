"""torch.compile as the front end: our backend in Dynamo, which owns guards, caches, side effects and graph breaks."""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import sympy
import torch
from torch import fx, nn
from torch._dynamo import convert_frame, exc
from torch._dynamo.eval_frame import set_code_exec_strategy
from torch._dynamo.resume_execution import TORCH_DYNAMO_RESUME_IN_PREFIX
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.types import FrameAction, FrameExecStrategy
from torch._dynamo.utils import calculate_time_spent, counters
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _disable_current_modes

from graphopt.compat.distributed import active_ddp, whole_graphs
from graphopt.compat.joint import intermediates_that_require_grad, messages_given_once
from graphopt.compat.recurrent import left_to_eager_mode

COMPILATIONS = 64
"""Graphs that Dynamo compiles for one call before it leaves further ones to eager mode: plans count, too."""


def compiled_by(call: Callable[..., Any], backend: Any, fullgraph: bool) -> Callable[..., Any]:
    """`call` under torch.compile, with compiled code and a count of recompilations of its own.

    Args:
        backend: called by Dynamo with each graph and its example inputs.
    """
    if torch._dynamo.config.allow_rnn:
        _retry_skipped()
    compile_: Any = torch.compile
    options: dict[str, Any] = {"backend": backend, "fullgraph": fullgraph, "options": {"guard_filter_fn": _needed}}
    if _isolates():
        options |= {"isolate_recompiles": True, "recompile_limit": COMPILATIONS}
    return compile_(call, **options)


def _retry_skipped() -> None:
    """Have Dynamo try again whatever functions it has given up on so far.

    It skips a function for good where plain torch.compile meets a recurrent layer in it, whoever calls it later: the mark is the
    code's, and all models of a class share their code. What it has compiled of it stays.
    """
    with convert_frame.compile_lock:
        for seen in list(convert_frame.input_codes.seen):
            code = seen()
            if code is not None:
                set_code_exec_strategy(code, FrameExecStrategy(FrameAction.DEFAULT, FrameAction.DEFAULT))


def with_own_code(call: Callable[..., Any], name: str) -> Callable[..., Any]:
    """`call` with a code object of its own.

    Dynamo keeps what it compiles with the code object, which is to go when the model does, and what it has learned about sizes by
    the code's name.
    """
    function: Any = call
    code = function.__code__.replace(co_name=name)
    return types.FunctionType(code, function.__globals__, name, None, function.__closure__)


_NEVER_CHANGE = (
    "__import_graphopt_dot_frontend_",
    "__import_torch_dot_utils_dot__pytree",
    "__import__('torch').utils._pytree",
    "__import_torch_dot__dynamo_dot_polyfills",
    "graphopt_finish",
)
"""Functions of graphopt and torch that nobody replaces; Dynamo would look at each in every call."""


def _needed(guards: Sequence[Any]) -> list[bool]:
    """Which guards are to be kept. Those that are kept are made anew, and torch compares what they were made for with `==`, which
    is no bool for the tensors of numpy's arrays: they forget it."""
    for guard in guards:
        guard.orig_guard.obj_weakref = None
    return [not any(part in guard.name for part in _NEVER_CHANGE) for guard in guards]


class Settings:
    """Dynamo's settings while a model is compiled.

    Hooks that are added to a module later take effect, which Dynamo leaves unchecked by default. An integer attribute that
    changes becomes an input of the graph. Recurrent layers are part of it, unless `left_to_eager_mode`. Neither
    DistributedDataParallel nor a message that is given once divides graphs, which are rewritten as wholes.
    """

    def __init__(self, model: nn.Module, long_to_eager: bool, whole: bool) -> None:
        self.long, self.whole = long_to_eager, whole
        self.wanted: dict[str, Any] = {
            "skip_nnmodule_hook_guards": False,
            "allow_unspec_int_on_nn_module": True,
            "suppress_errors": False,  # errors tell what is to be compiled, and reach the caller as graphopt's own
        }
        if any(isinstance(module, nn.RNNBase) for module in model.modules()):
            self.wanted["allow_rnn"] = True
        if not _isolates():
            self.wanted["recompile_limit"] = COMPILATIONS
        self.has_parallel_part = any(isinstance(module, DistributedDataParallel) for module in model.modules())
        self.entered: list[tuple[list[contextlib.AbstractContextManager[Any]], dict[str, Any]]] = []

    @property
    def always(self) -> bool:
        """Whether they are needed where all is compiled: a recurrent layer would break the graph, an error not be raised."""
        return "allow_rnn" in self.wanted or torch._dynamo.config.suppress_errors

    def __enter__(self) -> None:
        config = torch._dynamo.config
        before: dict[str, Any] = {}
        replaced = [intermediates_that_require_grad(self.whole), messages_given_once()]
        if "allow_rnn" in self.wanted:
            replaced.append(left_to_eager_mode(self.long))
        if self.has_parallel_part or active_ddp() is not None:
            replaced.append(whole_graphs())
        self.entered.append((replaced, before))
        for each in replaced:
            each.__enter__()
        for name, value in self.wanted.items():
            known = getattr(config, name)
            if known != value:  # to set one takes longer than to read it
                before[name] = known
                setattr(config, name, value)

    def __exit__(self, *error: object) -> None:
        replaced, before = self.entered.pop()
        for each in reversed(replaced):
            each.__exit__(*error)
        for name, value in before.items():
            setattr(torch._dynamo.config, name, value)


def _isolates() -> bool:
    """Whether each call of torch.compile has a limit of its own; torch 2.11 and 2.12 have one for all."""
    return "isolate_recompiles" in inspect.signature(torch.compile).parameters


def is_part(module: fx.GraphModule) -> bool:
    """Whether a graph that Dynamo passes to its backend is one of several of the function that it comes from."""
    translator: Any = InstructionTranslator.current_tx()
    resumed = translator.output.root_tx.f_code.co_name.startswith(TORCH_DYNAMO_RESUME_IN_PREFIX)
    reason: Any = getattr(module, "compile_subgraph_reason", None)
    return resumed or (reason is not None and reason.graph_break)


def is_compile_error(error: BaseException) -> bool:
    """Whether an error is torch.compile's own, and not one that the user's code raised while it ran."""
    return isinstance(error, torch._dynamo.exc.TorchDynamoException)


def is_restart(error: BaseException) -> bool:
    """Whether an error out of compiling a graph tells Dynamo to trace in another way, and is not one at all."""
    return isinstance(error, (exc.RestartAnalysis, exc.SkipFrame, *exc.exceptions_allowed_to_be_fallback))


def is_traced_elsewhere(error: BaseException) -> bool:
    """Whether compiled code refused to run because a thread traces a graph meanwhile, for which torch has one flag for all."""
    return isinstance(error, RuntimeError) and "symbolically trace a dynamo-optimized function" in str(error)


class _Expected(threading.local):
    error: type[Exception] | None = None


_expected = _Expected()


def nothing_compiles(error: type[Exception] | None) -> None:
    """From now on, have this thread raise an error where Dynamo compiles something; None: it compiles what comes.

    It is raised before any of the code runs, even where that begins with a graph break, of which no backend is told.
    """
    _expected.error = error


def _refuse_if_nothing_compiles(code: types.CodeType, new_code: types.CodeType) -> None:
    if _expected.error is not None:
        raise _expected.error


convert_frame.register_bytecode_hook(_refuse_if_nothing_compiles)


def cause_of(error: BaseException) -> BaseException:
    """What a backend, or `nothing_compiles`, has raised, where Dynamo has wrapped it."""
    inner = error.__context__ if isinstance(error, exc.InternalTorchDynamoError) else getattr(error, "inner_exception", None)
    return cause_of(inner) if isinstance(inner, BaseException) else error


def example_of(node: fx.Node) -> Any:
    """The value that Dynamo traced a placeholder with, real or fake as the caller's; None where it is none of the caller's."""
    argument = node.meta.get("grapharg")
    if argument is None or getattr(argument, "is_unspecialized", False):
        return None
    try:
        return argument.example
    except AssertionError:  # its tensor is gone
        return None


def source_of(node: fx.Node) -> str:
    """Where in the user's program Dynamo found a placeholder's value; "" if unknown."""
    argument = node.meta.get("grapharg")
    if argument is None:
        return ""
    name = argument.source.name
    return name() if callable(name) else name


def graph_breaks() -> int:
    """How often Dynamo has broken a graph so far, in this process."""
    return sum(counters["graph_break"].values())


def graphs_compiled() -> int:
    """How many graphs Dynamo has had compiled so far, in this process."""
    return int(counters["stats"]["unique_graphs"])


def seconds_compiling() -> float:
    """Wall-clock that Dynamo has spent on tracing and compiling so far, backends and backwards included, in this process."""
    return calculate_time_spent().get("total_wall_time", 0.0)


def traced_size(value: torch.SymInt, symbol: sympy.Symbol) -> int | None:
    """What a symbol of a size was when the graph was traced; None where it depends on data."""
    environment = value.node.shape_env
    known = getattr(environment, "backed_var_to_val", None) or environment.var_to_val  # torch 2.11 has the second alone
    return int(known[symbol]) if symbol in known else None


def differentiates(module: fx.GraphModule) -> bool:
    """Whether a graph of Dynamo's will have a backward."""

    def trained(nodes: Any) -> bool:
        values = (node.meta.get("example_value") for node in nodes if isinstance(node, fx.Node))
        return any(isinstance(v, torch.Tensor) and v.requires_grad for v in values)

    outputs = torch.utils._pytree.tree_leaves(module.graph.output_node().args[0])
    return torch.is_grad_enabled() and trained(module.graph.find_nodes(op="placeholder")) and trained(outputs)


def statically() -> contextlib.AbstractContextManager[Any]:
    """Every size is a number while Dynamo traces. Where all calls of torch.compile share one limit, none ends a trace."""
    limits: dict[str, Any] = {} if _isolates() else dict.fromkeys(("recompile_limit", "accumulated_recompile_limit"), sys.maxsize)
    return torch._dynamo.config.patch(automatic_dynamic_shapes=False, assume_static_by_default=True, **limits)


_MARKS = ("_dynamo_weak_dynamic_indices", "_has_dynamo_dim_marking")


@contextlib.contextmanager
def symbolic_dims(tensors: Sequence[torch.Tensor], dims: Sequence[int | None]) -> Iterator[None]:
    """Dynamo traces these dimensions as symbols, unless the traced code fixes them; the tensors are afterwards as they were."""
    before = [{name: getattr(t, name) for name in _MARKS if hasattr(t, name)} for t in tensors]
    try:
        for tensor, dim in zip(tensors, dims, strict=True):
            if dim is not None:
                if _MARKS[0] in vars(tensor):
                    setattr(tensor, _MARKS[0], set(getattr(tensor, _MARKS[0])))
                torch._dynamo.maybe_mark_dynamic(tensor, dim)
        yield
    finally:
        for tensor, values in zip(tensors, before, strict=True):
            for name in _MARKS:
                if name in values:
                    setattr(tensor, name, values[name])
                elif hasattr(tensor, name):
                    delattr(tensor, name)


@contextlib.contextmanager
def outside_tracing() -> Iterator[None]:
    """Operators run on real tensors inside, although a graph is being compiled."""
    with _disable_current_modes(), torch._guards.tracing(None), torch.no_grad():
        yield

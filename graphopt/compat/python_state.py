"""What a trace took from a model's Python state, and whether it is still so.

Numbers, flags, submodules and hooks are constants of a trace. Dynamo knows which of them it has looked at; shapes, types and
`requires_grad` of tensors are for the caller to compare.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import logging
import re
import uuid
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from types import CodeType
from typing import Any
from unittest import mock

from torch import Tensor, fx, nn

from graphopt.errors import CaptureError

_ROOT = "L['self']"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PythonState:
    """What held when a model was traced.

    Attributes:
        rewritten: attributes that the traced call looked at and set to another constant.
        trace: of what was traced, but for tensors in attributes; see `same_trace`.
        lost: lists, dicts and sets of the model, and tensors in its attributes, that the traced call changes and `replay` does
            not.
    """

    rewritten: frozenset[str]
    lost: tuple[str, ...]
    trace: str
    _guards: Any = field(repr=False, compare=False)
    _scope: dict[str, Any] = field(repr=False, compare=False)
    _tensors: tuple[tuple[CodeType, weakref.ref[Tensor]], ...] = field(repr=False, compare=False)
    _stores: tuple[tuple[Any, str, Any], ...] = field(repr=False, compare=False)

    def __deepcopy__(self, memo: Any) -> PythonState:
        """That of a copied model, of which nothing is known yet."""
        return replace(self, _guards=None, _scope={}, _tensors=(), _stores=())

    def holds(self) -> bool:
        """Whether a trace made now would be the same, as far as the model's Python state goes."""
        if self._guards is None:
            return False
        same = all(_evaluated(path, self._scope) is tensor() for path, tensor in self._tensors)
        return same and bool(self._guards.check(self._scope["L"]))

    def same_trace(self, other: PythonState) -> bool:
        """Whether both are of equal traces, that read the very same tensors."""
        ours, theirs = ([(path.co_filename, tensor()) for path, tensor in state._tensors] for state in (self, other))
        same = len(ours) == len(theirs) and all(
            a[0] == b[0] and a[1] is b[1] is not None for a, b in zip(ours, theirs, strict=True)
        )
        return same and self.trace == other.trace

    def difference(self) -> str:
        """What is not as it was, for people: a condition that held, or ""."""
        if self._guards is None:
            return ""
        moved = next((p.co_filename for p, tensor in self._tensors if _evaluated(p, self._scope) is not tensor()), "")
        if moved:
            return f"{moved} is the same tensor"
        parts = self._guards.check_verbose(self._scope["L"]).verbose_code_parts
        return _readable(parts[0].split("  #")[0].strip()) if parts else ""

    def replay(self) -> None:
        """Set attributes to the constants that the traced call set them to."""
        for owner, name, value in self._stores:
            setattr(owner, name, copy.copy(value))


@dataclass
class Recorded:
    """What `recorded_state` found; None if nothing was traced."""

    state: PythonState | None = None


@dataclass(frozen=True)
class _Changes:
    """What a traced call changes: values by owner and attribute, and lists, dicts and sets by where they are."""

    attributes: dict[tuple[str, str], Any] = field(default_factory=dict)
    containers: dict[str, Any] = field(default_factory=dict)


@contextlib.contextmanager
def recorded_state(module: nn.Module, overridden: str) -> Iterator[Recorded]:
    """Record the state that `dynamo_graph_capture_for_export(module)` depends on, inside this context.

    Args:
        overridden: an attribute that has another value while models are traced, whatever it is otherwise.
    Raises:
        CaptureError: the call computes with a tensor in an attribute and puts another one there.
    """
    from torch._dynamo import config, functional_export
    from torch._dynamo.side_effects import SideEffects

    recorded = Recorded()
    changes = _Changes()
    capture, store_attr, mutation = functional_export.fullgraph_capture, SideEffects.store_attr, SideEffects.mutation

    def storing(self: Any, item: Any, name: str, value: Any, *rest: Any, **options: Any) -> None:
        store_attr(self, item, name, value, *rest, **options)
        owner = _name(getattr(item, "source", None))
        if _ROOT in owner:
            changes.attributes[owner, name] = value

    def mutating(self: Any, changed: Any) -> None:
        mutation(self, changed)
        path = _name(getattr(changed, "source", None))
        if _ROOT in path:
            changes.containers[path] = changed

    def capturing(function: Any, *arguments: Any, **options: Any) -> Any:
        output = capture(function, *arguments, **options)
        try:
            recorded.state = _state(module, output, changes, overridden)
        except CaptureError:
            raise
        except Exception as error:
            logger.warning("changes of the model's attributes will not be noticed: %s: %s", type(error).__name__, error)
        return output

    with (
        mock.patch.object(functional_export, "fullgraph_capture", capturing),
        mock.patch.object(SideEffects, "store_attr", storing),
        mock.patch.object(SideEffects, "mutation", mutating),
        config.patch(skip_nnmodule_hook_guards=False),
    ):
        yield recorded


def _state(module: nn.Module, output: Any, changes: _Changes, overridden: str) -> PythonState:
    """The state that a finished trace depends on."""
    graph = output.graph_capture_output.output_graph
    guards, looked_at = _guards(type(module).forward.__code__, graph, overridden)
    scope = {"L": {"self": module, "tensors": ()}, "G": getattr(graph, "global_scope", {})}
    held = {id(t) for t in (*module.parameters(), *module.buffers())}
    tensors = tuple(
        (compile(name, _readable(name), "eval"), weakref.ref(value))
        for name, value in looked_at.items()
        if isinstance(value, Tensor) and id(value) not in held
    )
    rewritten, lost, stores = set(), _replaced_in(changes.containers, scope, output), []
    for (owner, name), value in changes.attributes.items():
        path = f"{owner}.{name}"
        holder = _evaluated(compile(owner, owner, "eval"), scope)
        of_class = any(owner in known and "__dict__" in known and known.endswith(f"['{name}']") for known in looked_at)
        if value.is_python_constant():
            constant = value.as_python_constant()
            stores.append((holder, name, constant))
            if (path in looked_at or of_class) and not _equal(getattr(holder, name, None), constant):
                rewritten.add(_readable(path))
        elif isinstance(looked_at.get(path), Tensor):
            _require_kept(path, value, output)
        elif path in looked_at or of_class:
            lost.append(_readable(path))
    return PythonState(frozenset(rewritten), tuple(lost), _trace(output), guards, scope, tensors, tuple(stores))


def _guards(code: CodeType, graph: Any, overridden: str) -> tuple[Any, dict[str, Any]]:
    """What tells whether Python state has changed, and everything that was looked at."""
    from torch._dynamo.guards import CheckFunctionManager

    looked_at: dict[str, Any] = {}

    def of_python(entries: Any) -> list[bool]:
        looked_at.update({_name(entry.orig_guard): entry.value for entry in entries if entry.has_value})
        return [entry.guard_type != "TENSOR_MATCH" for entry in entries]

    def of_model(guard: Any) -> bool:
        name = _name(guard)
        return (_ROOT in name or "G[" in name) and "L['tensors']" not in name and not name.endswith(f".{overridden}")

    known = graph.guards.inner
    graph.guards.inner = type(known)(guard for guard in known if of_model(guard))  # not shapes, nor the state of the process
    try:
        return CheckFunctionManager(code, graph, None, None, of_python).guard_manager, looked_at
    finally:
        graph.guards.inner = known


def _replaced_in(containers: dict[str, Any], scope: dict[str, Any], output: Any) -> list[str]:
    """Lists, dicts and sets that are not the same after the call; buffers may hold other values.

    Raises:
        CaptureError: the call computes with a buffer and puts another tensor in its place.
    """
    lost = []
    for path, changed in containers.items():
        if not path.endswith(("._buffers", "['_buffers']")):
            constant = changed.as_python_constant() if changed.is_python_constant() else None
            if constant is None or constant != _evaluated(compile(path, path, "eval"), scope):
                lost.append(_readable(path))
            continue
        for key, value in changed.items.items():
            name = key.vt.as_python_constant()
            _require_kept(f"{path}['{name}']", value, output)
    return lost


def _require_kept(path: str, value: Any, output: Any) -> None:
    """Refuse another tensor in the place of one that the call computes with.

    Raises:
        CaptureError: it is another one.
    """
    graph = None if output.backend_input is None else output.backend_input.graph_module
    nodes = () if graph is None else graph.graph.find_nodes(op="placeholder")
    placeholder = re.sub(r"[^a-zA-Z0-9]+", "_", path.replace("__dict__", ""))
    before = next((node for node in nodes if str(node.target) == placeholder and node.users), None)
    if before is None or not hasattr(value, "as_proxy"):
        return
    after = getattr(value.as_proxy(), "node", None)
    if after is not None and after.meta.get("example_value") is before.meta.get("example_value"):
        return  # such as .to() a device where it is already, or a result that was written into it
    raise CaptureError(
        f"forward() computes with {_readable(path)} and puts another tensor there, which a compiled step would not. "
        "Remedy: keep it in a buffer (register_buffer) and change that in place, as by copy_()."
    )


def _trace(output: Any) -> str:
    """What was traced: operators and conditions on shapes. One with tensors of its own is equal to no other."""
    graphs = [] if output.backend_input is None else [output.backend_input.graph_module]
    parts = [f"{name} {m.code}" for graph in graphs for name, m in graph.named_modules() if isinstance(m, fx.GraphModule)]
    if any(True for graph in graphs for _ in (*graph.parameters(), *graph.buffers())):
        parts.append(uuid.uuid4().hex)
    parts += [str(guard.expr) for guard in output.graph_capture_output.output_graph.shape_env.guards]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _name(source: Any) -> str:
    """Where something is found, as an expression; torch 2.11 has functions for some names."""
    name = getattr(source, "name", "")
    try:
        return str(name() if callable(name) else name)
    except NotImplementedError:
        return ""


def _evaluated(path: CodeType, scope: dict[str, Any]) -> Any:
    """What is there now; None if there is nothing."""
    try:
        return eval(path, dict(scope))
    except (AttributeError, KeyError, IndexError, TypeError):
        return None


def _equal(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(one == other)


def _readable(expression: str) -> str:
    """`L['self']._modules['model'].__dict__['_modules']['drop'].p` is `model.drop.p`."""
    names = re.sub(r"(\.__dict__)?(\['_modules'\]|\._modules|\['_buffers'\]|\._buffers)\['([^']+)'\]", r".\3", expression)
    return names.replace(f"{_ROOT}.model", "model")

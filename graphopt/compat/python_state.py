"""What a trace took from a model's Python state, and whether it is still so.

Numbers, flags, submodules and hooks are constants of a trace. Dynamo knows which of them it has looked at; shapes, types and
`requires_grad` of tensors are for the caller to compare.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
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
        rewritten: attributes that the traced call looked at and set to another number or flag.
        trace: of what was traced, equal for equal traces in one process.
        lost: lists, dicts and sets of the model that the traced call changes, which `replay` does not.
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
        return same and bool(self._guards.check(self._scope))

    def difference(self) -> str:
        """What is not as it was, for people: a condition that held, or ""."""
        if self._guards is None:
            return ""
        moved = next((p.co_filename for p, tensor in self._tensors if _evaluated(p, self._scope) is not tensor()), "")
        if moved:
            return f"{moved} is the same tensor"
        parts = self._guards.check_verbose(self._scope).verbose_code_parts
        return _readable(parts[0].split("  #")[0].strip()) if parts else ""

    def replay(self) -> None:
        """Set attributes to the numbers and flags that the traced call set them to."""
        for owner, name, value in self._stores:
            setattr(owner, name, value)


@dataclass
class Recorded:
    """What `recorded_state` found; None if nothing was traced."""

    state: PythonState | None = None


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
    stores: dict[tuple[str, str], Any] = {}
    lost: dict[str, None] = {}
    capture, store_attr, mutation = functional_export.fullgraph_capture, SideEffects.store_attr, SideEffects.mutation

    def storing(self: Any, item: Any, name: str, value: Any, *rest: Any, **options: Any) -> None:
        store_attr(self, item, name, value, *rest, **options)
        owner = _name(getattr(item, "source", None))
        if owner.startswith(_ROOT):
            stores[owner, name] = value

    def mutating(self: Any, changed: Any) -> None:
        mutation(self, changed)
        path = _name(getattr(changed, "source", None))
        if path.startswith(_ROOT):
            lost[_readable(path)] = None

    def capturing(function: Any, *arguments: Any, **options: Any) -> Any:
        output = capture(function, *arguments, **options)
        try:
            recorded.state = _state(module, output, stores, tuple(lost), overridden)
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


def _state(
    module: nn.Module, output: Any, stores: dict[tuple[str, str], Any], lost: tuple[str, ...], overridden: str
) -> PythonState:
    """The state that a finished trace depends on."""
    from torch._dynamo.guards import CheckFunctionManager

    looked_at: dict[str, Any] = {}

    def of_python(entries: Any) -> list[bool]:
        looked_at.update({_name(entry.orig_guard): entry.value for entry in entries if entry.has_value})
        names = [_name(entry.orig_guard) for entry in entries]
        return [
            entry.guard_type != "TENSOR_MATCH"
            and name.startswith((_ROOT, "G["))
            and "L['tensors']" not in name
            and not name.endswith(f".{overridden}")
            for entry, name in zip(entries, names, strict=True)
        ]

    code = type(module).forward.__code__
    guards = CheckFunctionManager(code, output.graph_capture_output.output_graph, None, None, of_python).guard_manager
    scope = {"self": module, "tensors": ()}
    held = {id(t) for t in (*module.parameters(), *module.buffers())}
    tensors = tuple(
        (compile(name, _readable(name), "eval"), weakref.ref(value))
        for name, value in looked_at.items()
        if isinstance(value, Tensor) and id(value) not in held and name.startswith(_ROOT)
    )
    used = _tensors_used(output.backend_input.graph_module if output.backend_input is not None else None)
    rewritten, constants = set(), []
    for (owner, name), value in stores.items():
        path = f"{owner}.{name}"
        if isinstance(looked_at.get(path), Tensor) and _placeholder(path) in used:
            raise CaptureError(
                f"forward() computes with {_readable(path)} and puts another tensor there, which a compiled step would not. "
                "Remedy: keep it in a buffer (register_buffer) and change that in place, as by copy_()."
            )
        if not value.is_python_constant():
            continue
        constant = value.as_python_constant()
        if not isinstance(constant, (bool, int, float, str, type(None))):
            continue
        holder = _evaluated(compile(owner, owner, "eval"), scope)
        constants.append((holder, name, constant))
        of_class = any(f"type({owner})" in known and known.endswith(f"['{name}']") for known in looked_at)
        if (path in looked_at or of_class) and getattr(holder, name, None) != constant:
            rewritten.add(_readable(path))
    return PythonState(frozenset(rewritten), lost, _trace(output, tensors), guards, scope, tensors, tuple(constants))


def _trace(output: Any, tensors: Any) -> str:
    """What was traced: operators, conditions on shapes, and constant tensors."""
    graphs = [] if output.backend_input is None else [output.backend_input.graph_module]
    parts = [f"{name} {m.code}" for graph in graphs for name, m in graph.named_modules() if isinstance(m, fx.GraphModule)]
    parts += [f"{name} {id(t)}" for graph in graphs for name, t in (*graph.named_parameters(), *graph.named_buffers())]
    parts += [f"{path.co_filename} {id(tensor())}" for path, tensor in tensors]
    parts += [str(guard.expr) for guard in output.graph_capture_output.output_graph.shape_env.guards]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _tensors_used(graph: fx.GraphModule | None) -> set[str]:
    """Placeholders of the tensors that a Dynamo graph computes with."""
    nodes = () if graph is None else graph.graph.find_nodes(op="placeholder")
    return {str(node.target) for node in nodes if node.users}


def _placeholder(path: str) -> str:
    """What Dynamo calls the placeholder of the tensor at `path`."""
    return re.sub(r"[^a-zA-Z0-9]+", "_", path)


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
        return eval(path, {"L": scope})
    except (AttributeError, KeyError, IndexError, TypeError):
        return None


def _readable(expression: str) -> str:
    """`L['self']._modules['model'].__dict__['_modules']['drop'].p` is `model.drop.p`."""
    short = expression.replace(f"{_ROOT}._modules['model']", "model")
    return re.sub(r"(\.__dict__)?(\['_modules'\]|\._modules)\['([^']+)'\]", r".\3", short)

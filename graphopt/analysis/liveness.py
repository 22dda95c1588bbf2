"""Liveness of storages: which bytes exist while each step of a graph, or of the program compiled from it, runs.

The unit is the storage, not the tensor: views share one, an operator that writes into its argument makes none, and a storage
is freed when the last step that reads it, or any view of it, has run.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from graphopt.compat import OpOverload, expression, output_list, written_arguments
from graphopt.compat.distributed import WAIT
from graphopt.compat.inductor_program import Program
from graphopt.ops.by_tokens import by_tokens_workspace

aten = torch.ops.aten

_VIEWS = frozenset({aten._unsafe_view.default, aten.lift_fresh.default, WAIT})
"""Operators that return their argument's storage though their schema does not say so."""

Owner = tuple[str, int]
"""What identifies a storage in its graph: the node that makes it, or placeholder that is it, and which of its results."""

Formula = Callable[[Any], sympy.Expr]
"""From an int, a symbolic int of a graph or an expression of its symbols to an expression of `B`."""


@dataclass(frozen=True)
class Storage:
    """One storage that a graph makes.

    Attributes:
        owner: identifies it.
        name, module: the node whose result it holds, and the path of the module that the node comes from; "" if unknown.
        shape, dtype: of that result.
        size: bytes, an expression of `B`.
        born, last_read: positions among the graph's steps; `last_read` is `born` if nothing reads it.
    """

    owner: Owner
    name: str
    module: str
    shape: tuple[sympy.Expr, ...]
    dtype: torch.dtype
    size: sympy.Expr
    born: int
    last_read: int


@dataclass(frozen=True)
class GraphLiveness:
    """Storages of one graph.

    Attributes:
        steps: what runs, in order: nodes, or the kernels that they are compiled to.
        readers: per step, the name of the last step up to it that reads memory.
        storages: made by those steps.
        inputs: last position at which each placeholder, or a view of it, is read; -1 if never.
        outputs: per output of the graph, the storages that it lies in; none for a constant.
    """

    steps: tuple[str, ...]
    readers: tuple[str, ...]
    storages: tuple[Storage, ...]
    inputs: dict[str, int]
    outputs: tuple[tuple[Owner, ...], ...]


def graph_liveness(module: fx.GraphModule, formula: Formula) -> GraphLiveness:
    """Birth and last read of every storage of a functional graph that runs node by node."""
    calls = [n for n in module.graph.nodes if n.op == "call_function" and n.target is not operator.getitem]
    position = {node: i for i, node in enumerate(calls)}
    owners: dict[fx.Node, tuple[Owner, ...]] = {}
    made: list[Storage] = []
    last: dict[Owner, int] = {}
    for node in module.graph.nodes:
        if node.op == "placeholder":
            owners[node] = ((node.name, 0),)
            last[node.name, 0] = -1
        elif node.op == "get_attr":
            owners[node] = ()  # a constant of the model's code, held anyway
        elif node.op == "call_function":
            owners[node] = _owners(node, owners)
            if node.target is not operator.getitem:
                for owner in {o for source in node.all_input_nodes for o in owners[source]}:
                    last[owner] = position[node]
                for owner in owners[node]:
                    if owner[0] == node.name:
                        made.append(_storage(node, owner, formula, position[node]))
                        last[owner] = position[node]
    made += [_workspace(node, formula, position[node]) for node in calls if node.target is torch.ops.graphopt.by_tokens.default]
    storages = tuple(replace(s, last_read=last.get(s.owner, s.born)) for s in made if s.size != 0)
    readers, reader = [], ""
    for node in calls:
        reader = reader if is_view(node) else node.name
        readers.append(reader)
    inputs = {n.name: last[n.name, 0] for n in module.graph.nodes if n.op == "placeholder"}
    outputs = tuple(owners[n] if isinstance(n, fx.Node) else () for n in output_list(module))
    return GraphLiveness(tuple(n.name for n in calls), tuple(readers), storages, inputs, outputs)


def program_liveness(program: Program, placeholders: Sequence[str], formula: Formula) -> GraphLiveness:
    """Birth and last read of every storage of the program that Inductor generates for a graph with these placeholders."""
    held: dict[str, set[Owner]] = {name: {(name, 0)} for name in placeholders}
    holders = dict.fromkeys(((name, 0) for name in placeholders), 1)
    last: dict[Owner, int] = {}
    made: list[Storage] = []
    steps: list[str] = []
    for event in program.events:
        if event.kind == "run":
            steps.append(event.name)
            continue
        taken: set[Owner] = set()
        if event.kind == "allocate":
            buffer = event.buffer
            assert buffer is not None
            taken = {(buffer.name, 0)}
            name, module = (buffer.node.name, module_path(buffer.node)) if buffer.node is not None else (buffer.name, "")
            shape = tuple(formula(size) for size in buffer.shape)
            made.append(Storage((buffer.name, 0), name, module, shape, buffer.dtype, formula(buffer.size), len(steps), 0))
        elif event.kind == "hold":
            source = held.get(event.source, set())
            taken = {o for o in source if o[0] == event.only} if event.only else source
        elif event.kind == "release":
            for owner in held.pop(event.name, set()):
                holders[owner] -= 1
                if not holders[owner]:
                    last[owner] = len(steps) - 1
        for owner in taken - held.setdefault(event.name, set()):
            held[event.name].add(owner)
            holders[owner] = holders.get(owner, 0) + 1
    end = len(steps) - 1
    storages = tuple(replace(s, last_read=max(last.get(s.owner, end), s.born)) for s in made if s.size != 0)
    inputs = {name: last.get((name, 0), end) for name in placeholders}
    outputs = tuple(tuple(sorted(held.get(name, ()))) if name is not None else () for name in program.outputs)
    return GraphLiveness(tuple(steps), tuple(steps), storages, inputs, outputs)


def _storage(node: fx.Node, owner: Owner, formula: Formula, position: int) -> Storage:
    value = node.meta["val"]
    value = value[owner[1]] if isinstance(value, (tuple, list)) else value
    shape = tuple(formula(s) for s in value.shape)
    size = tensor_bytes(value, formula)
    return Storage(owner, node.name, module_path(node), shape, value.dtype, size, position, position)


def _workspace(node: fx.Node, formula: Formula, position: int) -> Storage:
    """What `by_tokens` allocates while it runs."""
    program, rows, _, chunk, _, workspace = node.args
    tokens = formula(rows[0].meta["val"].shape[0])  # type: ignore[index,union-attr]
    size = by_tokens_workspace(program, chunk, workspace, tokens)  # type: ignore[arg-type]
    return Storage((node.name, -1), f"{node.name}: a chunk", module_path(node), (size,), torch.uint8, size, position, position)


def _owners(node: fx.Node, owners: dict[fx.Node, tuple[Owner, ...]]) -> tuple[Owner, ...]:
    """The storages that hold a node's results: its own, or those of an argument."""
    if node.target is operator.getitem:
        source, index = node.args
        held = owners[source]  # type: ignore[index]
        own = source.name  # type: ignore[union-attr]
        return tuple(o for o in held if o == (own, index)) or tuple(o for o in held if o[0] != own)
    if is_view(node):
        return owners[node.args[0]]  # type: ignore[index]
    if (written := _written_argument(node)) is not None:
        return owners[written]
    value = node.meta.get("val")
    if isinstance(value, (tuple, list)):
        return tuple((node.name, i) for i, v in enumerate(value) if isinstance(v, Tensor))
    return ((node.name, 0),) if isinstance(value, Tensor) else ()


def is_view(node: fx.Node) -> bool:
    """Whether a node's result is a view of its first argument, for tensors that lie in memory as the recorded ones."""
    if not can_be_view(node):
        return False
    return node.target is not aten.reshape.default or not _is_contiguous(node) or _is_contiguous(node.args[0])


def can_be_view(node: fx.Node) -> bool:
    """Whether a node's result is a view of its first argument for some tensors: `reshape` copies where it has to."""
    target = node.target
    viewing = target in _VIEWS or (isinstance(target, OpOverload) and target.is_view)
    return viewing and bool(node.args) and isinstance(node.args[0], fx.Node)


def _is_contiguous(node: Any) -> bool:
    """Whether numbers lie in memory in their order. Where `reshape` copies, those of its result do, and of its argument not."""
    value, expected = node.meta.get("val"), sympy.Integer(1)
    if not isinstance(value, Tensor):
        return True
    for size, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if expression(size) != 1 and expression(stride) != expected:
            return False
        expected *= expression(size)
    return True


def _written_argument(node: fx.Node) -> fx.Node | None:
    """The argument that an in-place operator returns."""
    if isinstance(node.target, OpOverload):
        for is_written, value in zip(written_arguments(node.target), node.args, strict=False):
            if is_written and isinstance(value, fx.Node):
                return value
    return None


def tensor_bytes(value: Tensor, formula: Formula) -> sympy.Expr:
    """Bytes of a dense tensor's storage; a dimension of stride 0 is stored once."""
    sizes = [size for size, stride in zip(value.shape, value.stride(), strict=True) if stride != 0]
    return sympy.Mul(value.element_size(), *(formula(size) for size in sizes))


def module_path(node: fx.Node) -> str:
    """Path of the module that a node comes from, as in `named_modules`; "" if it is not known."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    path, _ = list(stack.values())[-1]
    path = str(path)
    if path.startswith("L['model']"):
        return path.removeprefix("L['model']").removeprefix(".")  # a child of the model may be called "model", too
    for prefix in ("L['self'].", "L__self___"):
        path = path.removeprefix(prefix).removeprefix(".")
    return "" if path == "model" else path.removeprefix("model.")

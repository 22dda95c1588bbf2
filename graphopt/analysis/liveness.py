"""Liveness of a graph's storages: which bytes exist while each node runs.

The unit is the storage, not the tensor: views share one, an operator that writes into its argument makes none, and a storage
is freed when the last node that reads it, or any view of it, has run. Under Inductor, results that fused kernels keep in
registers have no storage at all (see `fusion`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from graphopt.compat import OpOverload, output_list
from graphopt.graph import BATCH

aten = torch.ops.aten

_TYPICAL_BATCH = 64
"""Where a decision depends on which of two formulas is larger."""

_VIEWS = frozenset({aten._unsafe_view.default, aten.lift_fresh.default})
"""Operators that return their argument's storage though their schema does not say so."""


READS, READS_IF_SHARED = 8, 4
"""A fused result is stored after all if computing it reads more tensors than this, or than that where several nodes use it
(Inductor's `realize_acc_reads_threshold` and `realize_reads_threshold`)."""


@dataclass(frozen=True)
class Storage:
    """One storage that a graph makes.

    Attributes:
        node: the node that makes it; its name and metadata describe the storage.
        index: which of the node's results.
        size: bytes, an expression of the graph's own symbols.
        born, last_read: positions among the graph's call nodes; `last_read` is `born` if nothing reads it.
    """

    node: fx.Node
    index: int
    size: sympy.Expr
    born: int
    last_read: int

    @property
    def owner(self) -> Owner:
        """What identifies the storage within its graph."""
        return self.node, self.index


Owner = tuple[fx.Node, int]
"""A storage by the node that made it and the index among its results; placeholders own theirs."""


@dataclass(frozen=True)
class GraphLiveness:
    """Storages of one graph.

    Attributes:
        nodes: the call nodes in order; positions count them.
        storages: made by those nodes.
        inputs: last position at which each placeholder, or a view of it, is read; -1 if never.
        outputs: per output of the graph, the storages that it lies in; none for a constant.
    """

    nodes: tuple[fx.Node, ...]
    storages: tuple[Storage, ...]
    inputs: dict[str, int]
    outputs: tuple[tuple[Owner, ...], ...]


@dataclass(frozen=True)
class Kernels:
    """How a compiler runs a graph, where it is not node by node; see `fusion` and `layouts`.

    Attributes:
        fused: nodes that have no storage unless computing them reads too much; what reads them reads their inputs instead.
        copied: views that copy all the same, because of the layout of what they view.
        movable: nodes that run early if that releases more than it allocates.
        in_place: nodes that write over an input of the same size and dtype that nothing reads afterwards.
        spans: for each position, the first and last position that run as one kernel: it allocates first, and frees at its end.
    """

    fused: Collection[fx.Node] = ()
    copied: Collection[fx.Node] = ()
    movable: Collection[fx.Node] = ()
    in_place: Collection[fx.Node] = ()
    spans: Sequence[tuple[int, int]] | None = None


def liveness(module: fx.GraphModule, formula: Callable[[Any], sympy.Expr], kernels: Kernels | None = None) -> GraphLiveness:
    """Birth and last read of every storage of a functional graph that runs in node order.

    Args:
        formula: from an int or symbolic int of the graph to an expression.
        kernels: None where every node is a kernel of its own.
    """
    kernels = kernels or Kernels()
    calls = tuple(n for n in module.graph.nodes if n.op == "call_function" and n.target is not operator.getitem)
    owners, read, made = _ownership(module, kernels)
    sizes = {owner: _bytes(*owner, formula) for owner in made}
    position = {node: i for i, node in enumerate(calls)}
    _move_early(position, read, made, sizes, kernels.movable)
    born = {(node, index): position[node] for node, index in made}
    last = {**dict.fromkeys(((n, 0) for n in module.graph.nodes if n.op == "placeholder"), -1), **born}
    for node, held in read.items():
        for owner in held:
            last[owner] = max(last[owner], position[node])
    outputs = tuple(owners[n] if isinstance(n, fx.Node) else () for n in output_list(module))
    returned = {owner for held in outputs for owner in held}
    overwritten = _overwritten(made, read, position, last, sizes, returned, kernels.in_place)
    if kernels.spans is not None:
        born = {owner: kernels.spans[p][0] for owner, p in born.items()}
        last = {owner: kernels.spans[p][1] if p >= 0 else p for owner, p in last.items()}
    for owner, writer in overwritten.items():
        last[owner] = born[writer] - 1
    storages = tuple(
        Storage(*owner, sizes[owner], born[owner], last[owner])
        for owner in made
        if sizes[owner] != 0 and last[owner] >= born[owner]
    )
    inputs = {n.name: last[n, 0] for n in module.graph.nodes if n.op == "placeholder"}
    return GraphLiveness(calls, storages, inputs, outputs)


def _ownership(
    module: fx.GraphModule, kernels: Kernels
) -> tuple[dict[fx.Node, tuple[Owner, ...]], dict[fx.Node, tuple[Owner, ...]], list[Owner]]:
    """Per node the storages that its results lie in; per node that runs the storages that it reads; all that are made."""
    owners: dict[fx.Node, tuple[Owner, ...]] = {}
    read: dict[fx.Node, tuple[Owner, ...]] = {}
    made: list[Owner] = []
    for node in module.graph.nodes:
        if node.op == "placeholder":
            owners[node] = ((node, 0),)
        elif node.op == "get_attr":
            owners[node] = ()  # a constant of the model's code, held anyway
        elif node.op == "call_function":
            needed = _unique(owner for n in node.all_input_nodes for owner in owners[n])
            owners[node] = _owners(node, owners, needed, node in kernels.fused, node in kernels.copied)
            own = [owner for owner in owners[node] if owner[0] is node]
            made += own
            if node.target is not operator.getitem and (own or node not in kernels.fused):
                read[node] = needed
    return owners, read, made


def _move_early(
    position: dict[fx.Node, int],
    read: dict[fx.Node, tuple[Owner, ...]],
    made: list[Owner],
    sizes: dict[Owner, sympy.Expr],
    movable: Collection[fx.Node],
) -> None:
    """Move nodes to where their inputs would otherwise be released, if those are larger than their result."""
    readers: dict[Owner, list[fx.Node]] = {}
    for node, held in read.items():
        for owner in held:
            readers.setdefault(owner, []).append(node)
    for owner in made:
        node = owner[0]
        if node not in movable:
            continue
        available = max((position.get(n, -1) for n, _ in read[node]), default=-1)
        ends = {
            o: max((position[r] for r in readers[o] if r is not node), default=position.get(o[0], -1))
            for o in read[node]
            if o in sizes
        }
        released = {o: end for o, end in ends.items() if end < position[node]}
        target = max([available, *released.values()], default=available)
        if released and target < position[node]:
            gain = sympy.Add(*(sizes[o] for o in released)) - sizes[owner]
            if gain.subs(BATCH, _TYPICAL_BATCH) > 0:
                position[node] = max(target, 0)


def _overwritten(
    made: list[Owner],
    read: dict[fx.Node, tuple[Owner, ...]],
    position: dict[fx.Node, int],
    last: dict[Owner, int],
    sizes: dict[Owner, sympy.Expr],
    returned: set[Owner],
    in_place: Collection[fx.Node],
) -> dict[Owner, Owner]:
    """Storages that the last node to read them writes its own result over, with that result."""
    found: dict[Owner, Owner] = {}
    for owner in made:
        node = owner[0]
        if node not in in_place:
            continue
        for source in read[node]:
            unread = source in sizes and source not in returned and source not in found and last[source] == position[node]
            if unread and sizes[source] == sizes[owner] and _dtype(source) == _dtype(owner):
                found[source] = owner
                break
    return found


def _dtype(owner: Owner) -> torch.dtype:
    node, index = owner
    value = node.meta["val"]
    dtype: torch.dtype = (value[index] if isinstance(value, (tuple, list)) else value).dtype
    return dtype


def _unique(owners: Iterable[Owner]) -> tuple[Owner, ...]:
    return tuple(dict.fromkeys(owners))


def _owners(
    node: fx.Node, owners: dict[fx.Node, tuple[Owner, ...]], read: tuple[Owner, ...], fused: bool, copied: bool
) -> tuple[Owner, ...]:
    """The storages that hold a node's results: its own, those of an argument, or what a fused kernel will read."""
    if node.target is operator.getitem:
        source, index = node.args
        held = owners[source]  # type: ignore[index]
        return tuple(o for o in held if o == (source, index)) or tuple(o for o in held if o[0] is not source)
    if fused and len(read) <= (READS_IF_SHARED if len(node.users) > 1 else READS):
        return read
    if is_view(node) and not copied:
        return owners[node.args[0]]  # type: ignore[index]
    if (written := _written_argument(node)) is not None:
        return owners[written]
    value = node.meta.get("val")
    if isinstance(value, (tuple, list)):
        return tuple((node, i) for i, v in enumerate(value) if isinstance(v, Tensor))
    return ((node, 0),) if isinstance(value, Tensor) else ()


def is_view(node: fx.Node) -> bool:
    """Whether a node's result is a view of its first argument."""
    target = node.target
    viewing = target in _VIEWS or (isinstance(target, OpOverload) and target.is_view)
    return viewing and bool(node.args) and isinstance(node.args[0], fx.Node)


def _written_argument(node: fx.Node) -> fx.Node | None:
    """The argument that an in-place operator returns."""
    if isinstance(node.target, OpOverload):
        for argument, value in zip(node.target._schema.arguments, node.args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, fx.Node):
                return value
    return None


def _bytes(node: fx.Node, index: int, formula: Callable[[Any], sympy.Expr]) -> sympy.Expr:
    value = node.meta["val"]
    return tensor_bytes(value[index] if isinstance(value, (tuple, list)) else value, formula)


def tensor_bytes(value: Tensor, formula: Callable[[Any], sympy.Expr]) -> sympy.Expr:
    """Bytes of a dense tensor's storage; a dimension of stride 0 is stored once."""
    sizes = [size for size, stride in zip(value.shape, value.stride(), strict=True) if stride != 0]
    return sympy.Mul(value.element_size(), *(formula(size) for size in sizes))

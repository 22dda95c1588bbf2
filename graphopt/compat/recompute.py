"""The metadata by which a node of the forward is computed again in the backward, or kept for it."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.utils.checkpoint import CheckpointPolicy

from graphopt.compat.fakes import output_list

aten = torch.ops.aten


def _policy(name: str, region: int = 0) -> dict[str, Any]:
    return {"recompute": getattr(CheckpointPolicy, name), "ac_graph_id": region}


RECOMPUTE, SAVE = _policy("MUST_RECOMPUTE"), _policy("MUST_SAVE")
"""Metadata of a node that the backward computes again, or alone; and of one whose result the forward gives it."""

IN_FORWARD = _policy("MUST_SAVE", -1)
"""Metadata of a node that only the backward reads, and that the forward has to compute."""

KEEP = _policy("PREFER_SAVE", -2)
"""Metadata of a node that Inductor's partitioner must not leave to the backward; others keep it where the backward reads it."""


def carries(node: fx.Node, mark: Mapping[str, Any]) -> bool:
    """Whether a node is marked by `IN_FORWARD` or `KEEP`."""
    return node.op == "call_function" and node.meta.get("ac_graph_id") == mark["ac_graph_id"]


def recompute_mark(region: int) -> dict[str, Any]:
    """Metadata of a node that the backward computes again together with the others of its region."""
    return _policy("MUST_RECOMPUTE", region)


def is_marked(node: fx.Node) -> bool:
    """Whether a node is to be computed again, by itself; see `is_recomputed`."""
    policy = getattr(node.meta.get("recompute"), "name", "")
    return node.op == "call_function" and policy in ("MUST_RECOMPUTE", "PREFER_RECOMPUTE")


def is_recomputed(node: fx.Node) -> bool:
    """Whether the backward computes a node of the forward again instead of being given its result.

    A result that a later region reads, which is computed again, too, is kept: the partitioner has each region start from there.
    """
    return is_marked(node) and not _starts_a_region(node)


def is_kept(node: fx.Node) -> bool:
    """Whether a node is one whose result the forward gives the backward, by what is known before partitioning."""
    return getattr(node.meta.get("recompute"), "name", "") == "MUST_SAVE" or (is_marked(node) and _starts_a_region(node))


def in_region(node: fx.Node) -> bool:
    """Whether a node is part of a region that is computed again.

    The partitioner marks others to be saved, too, when a region reads them; those that the backward alone computes are not.
    """
    return node.meta.get("ac_graph_id") is not None


def keep_readers_of_written(joint: fx.GraphModule, written: Collection[int], marked_alone: bool) -> None:
    """Keep for the backward what reads an input that the forward writes to later: computed again, it would find other numbers.

    A view of such an input is not kept, since its numbers change as well, but what reads the view.

    Args:
        written: see `_written`.
        marked_alone: nodes without a mark are kept anyway where the backward reads them.
    """
    for source in _written(joint, written):
        for reader in _readers(source):
            value = reader.meta.get("val")
            # Where an operator has several results, the min-cut keeps them only if the operator itself cannot run again.
            for node in (reader, *(reader.users if isinstance(value, (tuple, list)) else ())):
                if "recompute" in node.meta or (not marked_alone and isinstance(value, (Tensor, tuple, list))):
                    node.meta.update(SAVE)


def copy_written(joint: fx.GraphModule, written: Collection[int], num_forward: int) -> None:
    """Have the forward copy what it writes to later and the backward itself reads; everything reads the copy.

    Operators of the forward that copy such an input are lost where Inductor takes them for ones that do nothing.

    Args:
        written: see `_written`.
        num_forward: how many outputs of `joint` are the forward's.
    """
    results, copies = output_list(joint), _copies(joint)
    later = {node for node in copies if node.meta.get("partitioner_tag") == "must_be_in_backward"}
    forward = {*results[:num_forward], *copies - later, *(node for node in joint.graph.nodes if carries(node, IN_FORWARD))}
    for node in reversed(joint.graph.nodes):
        if node in forward:
            forward.update(node.all_input_nodes)
    first = next(node for node in joint.graph.nodes if node.op != "placeholder")
    for source in _written(joint, written):
        in_backward = not _readers(source) <= forward or any(view in results[num_forward:] for view in _views(source))
        if not in_backward or any(node.args[0] is source for node in later):
            continue
        with joint.graph.inserting_before(first):
            copied = joint.graph.call_function(aten.clone.default, (source,))
        for user in [user for user in source.users if user is not copied and user not in copies]:
            user.replace_input_with(source, copied)
        copied.meta = IN_FORWARD
        for node in _views(copied):
            target: Any = node.target
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            with torch.no_grad():  # what Inductor knows of their storages is right again
                node.meta = {**node.meta, "val": target(*args, **kwargs)}


def _copies(joint: fx.GraphModule) -> set[fx.Node]:
    return set(joint.graph.find_nodes(op="call_function", target=aten.copy_.default))


def _written(joint: fx.GraphModule, positions: Collection[int]) -> list[fx.Node]:
    """The inputs that a graph writes to at its end, and those at `positions`, which are written from its results."""
    inputs, targets = joint.graph.find_nodes(op="placeholder"), {node.args[0] for node in _copies(joint)}
    return [node for i, node in enumerate(inputs) if i in positions or node in targets]


def _views(node: fx.Node) -> Iterator[fx.Node]:
    """A node and its views, each after what it is a view of."""
    yield node
    for user in node.users:
        views = isinstance(user.target, OpOverload) and (user.target.is_view or user.target is aten._unsafe_view.default)
        if views or user.target is operator.getitem:
            yield from _views(user)


def _readers(node: fx.Node) -> set[fx.Node]:
    """What reads the numbers of a node or of its views, and is no view."""
    views = set(_views(node))
    users = {user for view in views for user in view.users if user.op == "call_function"}
    return {user for user in users - views if user.target is not aten.copy_.default}


def _starts_a_region(node: fx.Node) -> bool:
    own = node.meta.get("ac_graph_id")
    regions = [user.meta.get("ac_graph_id") for user in node.users if is_marked(user)]
    return own is not None and any(region is not None and region > own for region in regions)

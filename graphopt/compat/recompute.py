"""The metadata by which a node of the forward is computed again in the backward, or kept for it."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

aten = torch.ops.aten


def _policy(name: str, region: int = 0) -> dict[str, Any]:
    from torch.utils.checkpoint import CheckpointPolicy

    return {"recompute": getattr(CheckpointPolicy, name), "ac_graph_id": region}


RECOMPUTE, SAVE = _policy("MUST_RECOMPUTE"), _policy("MUST_SAVE")
"""Metadata of a node that the backward computes again, or alone; and of one whose result the forward gives it."""

IN_FORWARD = _policy("MUST_SAVE", -1)
"""Metadata of a node that only the backward reads, and that the forward has to compute."""


KEEP = _policy("PREFER_SAVE", -2)
"""Metadata of a node that Inductor's partitioner must not leave to the backward; others keep it where the backward reads it."""


def is_in_forward(node: fx.Node) -> bool:
    """Whether a node is marked by `IN_FORWARD`."""
    return node.op == "call_function" and node.meta.get("ac_graph_id") == IN_FORWARD["ac_graph_id"]


def must_keep(node: fx.Node) -> bool:
    """Whether a node is marked by `KEEP`."""
    return node.op == "call_function" and node.meta.get("ac_graph_id") == KEEP["ac_graph_id"]


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


def keep_readers_of_written(joint: fx.GraphModule, marked_alone: bool) -> None:
    """Keep for the backward what reads an input that the forward writes to later: computed again, it would find other numbers.

    A view of such an input is not kept, since its numbers change as well, but what reads the view.

    Args:
        marked_alone: nodes without a mark are kept anyway where the backward reads them.
    """
    for write in joint.graph.find_nodes(op="call_function", target=aten.copy_.default):
        written = write.args[0]
        if isinstance(written, fx.Node) and written.op == "placeholder":
            for reader in set(_readers(written)):
                if "recompute" in reader.meta or (not marked_alone and isinstance(reader.meta.get("val"), Tensor)):
                    reader.meta.update(SAVE)


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """What reads the numbers of a node or of its views."""
    for user in node.users:
        views = isinstance(user.target, OpOverload) and (user.target.is_view or user.target is aten._unsafe_view.default)
        if views or user.target is operator.getitem:
            yield from _readers(user)
        elif user.op == "call_function" and user.target is not aten.copy_.default:
            yield user


def _starts_a_region(node: fx.Node) -> bool:
    return any(is_marked(user) and _is_later(user, node) for user in node.users)


def _is_later(node: fx.Node, other: fx.Node) -> bool:
    region, before = node.meta.get("ac_graph_id"), other.meta.get("ac_graph_id")
    return region is not None and before is not None and region > before

"""The metadata by which a node of the forward is computed again in the backward, or kept for it."""

from __future__ import annotations

from typing import Any

from torch import fx


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


def _starts_a_region(node: fx.Node) -> bool:
    return any(is_marked(user) and _is_later(user, node) for user in node.users)


def _is_later(node: fx.Node, other: fx.Node) -> bool:
    region, before = node.meta.get("ac_graph_id"), other.meta.get("ac_graph_id")
    return region is not None and before is not None and region > before

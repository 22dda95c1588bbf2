"""The metadata by which a node of the forward is computed again in the backward, or kept for it."""

from __future__ import annotations

from typing import Any

from torch import fx


def _policy(name: str, region: int = 0) -> dict[str, Any]:
    from torch.utils.checkpoint import CheckpointPolicy

    return {"recompute": getattr(CheckpointPolicy, name), "ac_graph_id": region}


RECOMPUTE, SAVE = _policy("MUST_RECOMPUTE"), _policy("MUST_SAVE")
"""Metadata of a node that the backward computes again, or alone; and of one whose result the forward gives it."""


def recompute_mark(region: int) -> dict[str, Any]:
    """Metadata of a node that the backward computes again together with the others of its region."""
    return _policy("MUST_RECOMPUTE", region)


def is_recomputed(node: fx.Node) -> bool:
    """Whether the backward computes a node of the forward again instead of being given its result."""
    policy = getattr(node.meta.get("recompute"), "name", "")
    return node.op == "call_function" and policy in ("MUST_RECOMPUTE", "PREFER_RECOMPUTE")

"""The metadata by which a node of the forward is computed again in the backward, or kept for it."""

from __future__ import annotations

from typing import Any

from torch import fx


def _policy(name: str) -> dict[str, Any]:
    from torch.utils.checkpoint import CheckpointPolicy

    return {"recompute": getattr(CheckpointPolicy, name), "ac_graph_id": 0}


RECOMPUTE, SAVE = _policy("MUST_RECOMPUTE"), _policy("MUST_SAVE")
"""Metadata of a node that the backward computes again, or alone; and of one whose result the forward gives it."""


def is_recomputed(node: fx.Node) -> bool:
    """Whether the backward computes a node of the forward again instead of being given its result."""
    policy = getattr(node.meta.get("recompute"), "name", "")
    return node.op == "call_function" and policy in ("MUST_RECOMPUTE", "PREFER_RECOMPUTE")

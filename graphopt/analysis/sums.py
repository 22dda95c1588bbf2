"""Where a result is added: following it through what does not change it, up to a sum, or down to what it is a view of."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx

from graphopt.analysis.products import same_shape, same_tensor, scalar_factor, widened

aten = torch.ops.aten


class NotASum(Exception):
    """A result goes into no addition; says why, if that is of interest."""


def summed_with(node: fx.Node, region: Collection[fx.Node] | None = None) -> tuple[fx.Node, fx.Node, float]:
    """The addition that a result goes into, the other summand, and the number it is multiplied by on the way.

    Args:
        region: users elsewhere are overlooked; by default none are.
    Raises:
        NotASum: it goes somewhere else too, or something else happens to it first.
    """
    factor = 1.0
    while True:
        users = [u for u in tensor_users(node) if region is None or u in region or u.op == "output"]
        if len(users) != 1 or users[0].op == "output":
            raise NotASum("")
        (user,) = users
        if user.target is aten.add.Tensor and not user.kwargs and len(user.all_input_nodes) == 2:
            other = next(n for n in user.all_input_nodes if n is not node)
            if not same_shape(other, node):
                raise NotASum("")
            return user, other, factor
        if same_tensor(user):
            pass
        elif (back := next((u for u in user.users if widened(u) is node), None)) is not None and len(tensor_users(user)) == 1:
            user = back
        elif (number := scalar_factor(user)) is not None:
            factor *= number
        elif user.target is aten.mul.Tensor:
            raise NotASum("the adapter is scaled by a tensor, as DoRA does: merging would change the result")
        else:
            raise NotASum("")
        node = user


def tensor_users(node: fx.Node) -> list[fx.Node]:
    """Users that read a node's values, and not only its size; the graph's output is one."""
    return [u for u in node.users if u.op == "output" or not isinstance(u.meta.get("val"), torch.SymInt)]


def below_views(node: fx.Node) -> fx.Node:
    """The node below views and factors."""
    while node.op == "call_function" and (same_tensor(node) or scalar_factor(node) is not None):
        node = node.args[0]  # type: ignore[assignment]
    return node

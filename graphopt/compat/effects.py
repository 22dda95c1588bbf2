"""Effect tokens: what AOTAutograd threads through operators with effects, such as the check of a Cholesky factorisation."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._functorch._aot_autograd import descriptors as d

from graphopt.compat.descriptions import drop_outputs
from graphopt.errors import CaptureError


def take_tokens_out(module: fx.GraphModule) -> None:
    """Have a joint graph neither take nor return tokens, nor call what only has an effect: it is planned on and not trained with.

    Raises:
        CaptureError: a token goes elsewhere than through plain operators.
    """
    graph = module.graph
    tokens = [node for node in graph.find_nodes(op="placeholder") if _is_token(node.meta["desc"])]
    if not tokens:
        return
    drop_outputs(module, _is_token)
    for call in reversed(graph.find_nodes(op="call_function", target=torch.ops.higher_order.with_effects)):
        _call_plainly(graph, call)
    for token in tokens:
        if token.users:
            raise _unsupported(next(iter(token.users)).target)
        graph.erase_node(token)
    module.recompile()


def _call_plainly(graph: fx.Graph, call: fx.Node) -> None:
    """Replace `with_effects(token, function, *arguments)`, which returns a token before the results of the function."""
    function: Any = call.args[1]
    for user in list(call.users):
        if user.args[1] == 0:
            graph.erase_node(user)
    if call.users:
        if not isinstance(function, torch._ops.OpOverload):
            raise _unsupported(function)
        with graph.inserting_before(call):
            plain = graph.call_function(function, call.args[2:], dict(call.kwargs))
        several = len(function._schema.returns) > 1
        results = call.meta["val"][1:]
        plain.meta = {**call.meta, "val": tuple(results) if several else results[0]}
        for user in list(call.users):
            if several:
                user.args = (plain, user.args[1] - 1)  # type: ignore[operator]
            else:
                user.replace_all_uses_with(plain)
                graph.erase_node(user)
    graph.erase_node(call)


def _unsupported(function: Any) -> CaptureError:
    return CaptureError(
        f"forward() has {function} done in an order (by effect tokens) that graphopt keeps for plain operators alone. "
        "Remedy: call it outside forward()."
    )


def _is_token(desc: object) -> bool:
    return isinstance(desc, (d.ForwardTokenAOTInput, d.BackwardTokenAOTInput, d.ForwardTokenAOTOutput, d.BackwardTokenAOTOutput))

"""Outputs that training does not differentiate.

A model returns its loss and its logits; training differentiates the loss alone. AOTAutograd would make a tensor of zeros for the
gradient of the logits, and give zeros to parameters that only the logits depend on, where eager mode leaves None. So what is
compiled has a backward for the first output alone, if that is a scalar. The others are outputs of the same autograd node, whose
gradients are absent. Where one of them comes after all, the step runs again for it, once; later steps are compiled for what was
asked for. A step that reads what it changes would not compute the same again: all its outputs have a backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.function import BackwardCFunction

from graphopt.compat import WRITES, keeps_graph, on_compiled_autograd, pytree, wrap_backward
from graphopt.compat.fakes import is_traced
from graphopt.compat.schemas import arguments_of, has_schema
from graphopt.errors import RerunError
from graphopt.graph import TrainingGraph

_AGAIN = (
    "an output of a step was differentiated after the backward through its loss, which has freed what is needed for that: "
    "differentiate both in one backward, or the first with retain_graph=True."
)


_COMPILED = (
    "an output of the model beside the loss was differentiated under torch's compiled autograd, where the step cannot run again "
    "for it. Repeat the step; later ones are prepared for it."
)


class _Unasked(torch.autograd.Function):
    """The identity, whose backward passes nothing on."""

    @staticmethod
    def forward(ctx: Any, output: Tensor) -> Tensor:
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        return None


_flatten, _unflatten = pytree.tree_flatten, pytree.tree_unflatten  # by these names Dynamo guards less than by the module's


@torch.compiler.allow_in_graph
def unasked(output: Tensor) -> Tensor:
    """An output that requires a gradient, but has no backward; one node of Dynamo's graph, by which a backend finds it.

    Where Dynamo traces nothing and all of it runs in eager mode, it is the output itself.
    """
    return _Unasked.apply(output) if is_traced(output) else output


def finishing(expected: frozenset[int] | None) -> Callable[[Any], tuple[Any, tuple[int, ...]]]:
    """`with_backward` for these leaves, as a function that Dynamo traces; None: all of them have a backward."""

    def finish(output: Any) -> tuple[Any, tuple[int, ...]]:
        return (output, ()) if expected is None else with_backward(output, expected)

    return finish


def with_backward(output: Any, expected: frozenset[int]) -> tuple[Any, tuple[int, ...]]:
    """Within what Dynamo traces: the output, without a backward for the leaves that are not `expected`, and their positions.

    An output that does not begin with a scalar is left as it is: no output can be taken for the loss. A parameter among the
    leaves is returned as itself.
    """
    leaves, spec = _flatten(output)
    if len(leaves) < 2 or not isinstance(leaves[0], Tensor) or leaves[0].dim() > 0 or not leaves[0].requires_grad:
        return output, ()
    others = [i for i, leaf in enumerate(leaves) if i not in expected and isinstance(leaf, Tensor) and leaf.requires_grad]
    positions = tuple(i for i in others if not isinstance(leaves[i], nn.Parameter))
    for i in positions:
        leaves[i] = unasked(leaves[i])
    return _unflatten(leaves, spec), positions


def without_backward(module: fx.GraphModule) -> tuple[int, ...]:
    """Positions of the outputs of a graph of Dynamo's that have no backward."""
    results: Sequence[Any] = module.graph.output_node().args[0]  # type: ignore[assignment]
    return tuple(i for i, result in enumerate(results) if isinstance(result, fx.Node) and result.target is unasked)


def are_only_returned(module: fx.GraphModule) -> bool:
    """Whether no operator of a graph of Dynamo's reads an output that has no backward, and there is one."""
    found = module.graph.find_nodes(op="call_function", target=unasked)
    return bool(found) and all(user.op == "output" for node in found for user in node.users)


def give_backward(module: fx.GraphModule) -> None:
    """Have every output of a graph of Dynamo's be differentiable, as torch.compile has it."""
    for node in module.graph.find_nodes(op="call_function", target=unasked):
        node.replace_all_uses_with(node.args[0])
        module.graph.erase_node(node)
    module.recompile()


_STATISTICS = ("running_mean", "running_var")
"""Arguments of a batch norm, which in training does not read but update them."""

_IN_TRAINING = ("training", "train", "update")


def reads_what_it_changes(graph: TrainingGraph) -> bool:
    """Whether an output or a gradient depends on an input that the step changes, so that it gives others when it runs again.

    It may read the input's value before the change or after it.
    """
    written = {d.target: r for d, r in zip(graph.outputs, graph.results, strict=True) if d.kind in WRITES}
    inputs = zip(graph.inputs, graph.placeholders, strict=True)
    dependent = {*written.values(), *(node for desc, node in inputs if desc in written)}
    for node in graph.graph.nodes if dependent else ():
        if node.op == "call_function" and not dependent.isdisjoint(_read(node)):
            dependent.add(node)
    return any(r in dependent for desc, r in zip(graph.outputs, graph.results, strict=True) if desc.kind not in WRITES)


def _read(node: fx.Node) -> Sequence[fx.Node]:
    """What the results of an operator depend on, but for what it returns to be written back."""
    given = arguments_of(node) if has_schema(node.target) else {}
    if not given.keys() & set(_STATISTICS) or not next((given[name] for name in _IN_TRAINING if name in given), True):
        return node.all_input_nodes
    statistics = [given.get(name) for name in _STATISTICS]
    return [read for read in node.all_input_nodes if read not in statistics]


def detach(module: fx.GraphModule, placeholder: fx.Node) -> None:
    """Have a graph of Dynamo's read an input without differentiating it."""
    first = next(node for node in module.graph.nodes if node.op != "placeholder")
    with module.graph.inserting_before(first):
        detached = module.graph.call_method("detach", (placeholder,))
    placeholder.replace_all_uses_with(detached, delete_user_cb=lambda user: user is not detached and user.op != "output")
    module.recompile()


def node_of(outputs: Sequence[Any], inputs: Sequence[Any], unasked: Sequence[int]) -> Any:
    """The autograd node of a compiled graph that has just run, by its outputs without a backward; None if they are not its own.

    Where such an output shares its memory with an input or another output, autograd itself knows its gradient: AOTAutograd
    returns it as a view.
    """
    for i in unasked:
        if isinstance(outputs[i].grad_fn, BackwardCFunction) and all(outputs[i] is not given for given in inputs):
            return outputs[i].grad_fn
    return None


def answer(node: Any, outputs: Sequence[Any], unasked: Sequence[int], tangents: int) -> None:
    """Have the autograd nodes of a compiled graph answer gradients of outputs without a backward: by `ask`, an attribute of each.

    Nodes are not to be given zeros for absent gradients (`set_materialize_grads(False)`).

    Args:
        node: one of them.
        outputs: of the graph in the run that made it; those at the positions `unasked` have no backward.
        tangents: how many gradients the compiled backward takes beside theirs.
    """
    absent = tuple(outputs[i].output_nr for i in unasked if outputs[i].grad_fn is node)
    others = [out for i, out in enumerate(outputs) if i not in unasked and isinstance(out, Tensor) and out.grad_fn is node]
    expected = sorted({out.output_nr for out in others})
    if len(expected) < tangents:  # some are of none of these outputs, such as of an input that is changed
        expected = [i for i in range(len(node._input_metadata)) if i not in absent]

    def run(node: Any, own: Callable[..., Any], gradients: list[Tensor | None]) -> Any:
        for i in absent:
            if gradients[i] is not None:
                return asked(node, own, gradients)
        for i in expected:
            if gradients[i] is None:  # zeros, as torch.compile has it
                like = node._input_metadata[i]
                gradients[i] = torch.zeros(like.shape, dtype=like.dtype, device=like.device)
        found = own(node, gradients)
        if not keeps_graph():
            node.ask = None
        return found

    def asked(node: Any, own: Callable[..., Any], gradients: list[Tensor | None]) -> Any:
        """With the gradients of outputs without a backward."""
        ask = node.ask
        if ask is None:
            raise RerunError(_AGAIN)
        wanted = {i: g for i in absent if (g := gradients[i]) is not None}
        for i in absent:
            gradients[i] = None
        found: list[Tensor | None] = [None] * len(node.needs_input_grad)
        loss_too = any(gradients[i] is not None for i in expected)
        if loss_too:
            found = list(run(node, own, gradients))
        elif not keeps_graph():
            node.ask = None
        more = ask(node, wanted, loss_too)  # last: it changes what is computed later; for `own` a checkpoint may repeat the step
        for i, other in zip([i for i, is_needed in enumerate(node.needs_input_grad) if is_needed], more, strict=True):
            mine = found[i]
            if other is not None:
                found[i] = other if mine is None else mine + other
        return tuple(found)

    def begun(node: Any) -> None:
        if node.ask is not None:
            node.ask.running.differentiate_all()

    def check(gradients: Sequence[Any]) -> None:
        for i in absent:
            if gradients[i] is not None:
                raise RerunError(_COMPILED)

    wrap_backward(node, run)
    on_compiled_autograd(node, begun, check)

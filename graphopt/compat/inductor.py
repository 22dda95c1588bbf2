"""Inductor: partitioning a joint graph, and settings."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Collection, Sequence
from typing import Any

import sympy
from torch import Tensor, fx
from torch._inductor import config
from torch._inductor.utils import fresh_inductor_cache

from graphopt.compat import fake_mode_of, lazy_graph_modules, output_list, unsynced_tracing_context
from graphopt.compat.recompute import IN_FORWARD, KEEP, SAVE, carries, copy_written, is_marked, keep_readers_of_written


def partition(
    joint: fx.GraphModule, num_forward_outputs: int, static_inputs: Sequence[int], inductor: bool, written: Collection[int]
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split a joint graph into forward and backward graphs; `inductor` also runs its joint passes and min-cut.

    The forward returns the `num_forward_outputs` outputs and then what it saves; the backward takes what was saved and
    the tangents. Without Inductor only what is marked is computed again: an unfused graph gains nothing from more.

    Args:
        static_inputs: positions of the forward's inputs that keep their address (parameters and buffers).
        written: positions of those whose new values the forward returns.
    """
    from torch._inductor import compile_fx
    from torch._inductor.virtualized import V

    with lazy_graph_modules():
        values = [n.meta["val"] for n in joint.graph.nodes if isinstance(n.meta.get("val"), Tensor)]
        fake_mode = fake_mode_of(values)
        if inductor:
            with V.set_fake_mode(fake_mode):
                joint = compile_fx._recursive_joint_graph_passes(joint, skip_invoke_subgraph=True, input_device=values[0].device)
        options: dict[str, Any] = {"num_fwd_outputs": num_forward_outputs, "static_lifetime_input_indices": list(static_inputs)}
        with unsynced_tracing_context(fake_mode):  # where partitioners look for it, if they have random states to pass on
            if inductor:
                return min_cut(joint, (), written=written, compiler="inductor", **options)
            return as_marked(joint, (), written, **options)


def as_marked(
    joint: fx.GraphModule, inputs: Any, written: Collection[int] = (), **options: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """torch's default partitioner, which computes again what is marked so, and nothing else.

    What a marked node reads has to be marked, too, or kept: results of a region that selective checkpointing keeps, and those of
    an operator with several of which one is written to a buffer.
    """
    from torch._functorch.partitioners import default_partition

    keep_readers_of_written(joint, written, marked_alone=True)
    for node in joint.graph.find_nodes(op="call_function", target=operator.getitem):
        if is_marked(node) and not is_marked(node.args[0]):
            node.meta.pop("recompute")
    for node in joint.graph.nodes:
        source = node.args[0] if node.target is operator.getitem else node
        if node.op == "call_function" and not carries(node, KEEP) and not is_marked(source) and any(map(is_marked, node.users)):
            node.meta.update(SAVE)
    return default_partition(joint, inputs, **options)


def min_cut(
    joint: fx.GraphModule, inputs: Any, num_fwd_outputs: int, written: Collection[int] = (), **options: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """torch's min-cut partitioner, which leaves nodes that only the backward reads where less is saved, but for `IN_FORWARD`.

    Those are outputs of the forward while the graph is split. What is marked by `KEEP` is not computed again.
    """
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    copy_written(joint, written, num_fwd_outputs)
    keep_readers_of_written(joint, written, marked_alone=False)
    for node in joint.graph.nodes:
        if carries(node, KEEP):
            node.meta.update(SAVE)
    forced = [node for node in joint.graph.nodes if carries(node, IN_FORWARD)]
    _replace_outputs(joint, num_fwd_outputs, 0, forced)
    forward, backward = min_cut_rematerialization_partition(
        joint, inputs, num_fwd_outputs=num_fwd_outputs + len(forced), **options
    )
    _replace_outputs(forward, num_fwd_outputs, len(forced), ())
    return forward, backward


def _replace_outputs(module: fx.GraphModule, position: int, count: int, nodes: Sequence[fx.Node]) -> None:
    """Have a graph return `nodes` in the place of `count` outputs from `position` on."""
    output = module.graph.output_node()
    if count or nodes:
        results, behind = output_list(module), position + count
        output.args = ((*results[:position], *nodes, *results[behind:]),)
        if descriptions := list(output.meta.get("desc", ())):
            output.meta["desc"] = [*descriptions[:position], *[descriptions[0]] * len(nodes), *descriptions[behind:]]
        module.recompile()


def restride_saved(results: Sequence[Any], backward: fx.GraphModule, strides: Sequence[Any]) -> None:
    """Tell the backward which memory layout the compiled forward gives to the tensors that it saves.

    Args:
        results: the forward's.
        strides: per result of the forward, as numbers or expressions of the graph's symbols; None if unknown.
    """
    produced = {
        node.name: stride
        for node, stride in zip(results, strides, strict=False)
        if isinstance(node, fx.Node) and stride is not None
    }
    for node in backward.graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder" and node.name in produced and isinstance(value, Tensor):
            stride = tuple(_size(s, value) for s in produced[node.name])
            if tuple(value.stride()) != stride:
                node.meta["val"] = value.as_strided(value.size(), stride)


def _size(value: Any, tensor: Tensor) -> Any:
    expression = sympy.sympify(value)
    if expression.is_number:
        return int(expression)
    return fake_mode_of([tensor]).shape_env.create_symintnode(expression, hint=None)  # type: ignore[union-attr]


def eager_draws() -> contextlib.AbstractContextManager[None]:
    """What Inductor compiles inside draws random numbers with eager mode's kernels: the same seed gives the same dropout."""
    return config.patch(fallback_random=True)


fresh_compiler_cache = fresh_inductor_cache
"""Compile from scratch inside: for measurements of compile time."""

"""Recording: the joint graph of every region of a model that is not one graph, from one run, and all of them as one graph.

The model runs once, forward alone, on a copy; `joining` makes one graph of what it showed, so that analyses and planner see one
training step.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from graphopt.analysis.flop_formulas import node_flops
from graphopt.calls import BatchDim, copy_tensors, flatten_call
from graphopt.capture import no_generation_cache, twin, unchanged_draws
from graphopt.compat import pytree
from graphopt.compat.aot import forward_graph, joint_graph
from graphopt.compat.dynamo import Settings, compiled_by, differentiates, is_restart, statically, with_own_code
from graphopt.compat.graph_modules import copied, graph_module
from graphopt.errors import CaptureError, NothingToPlan, first_line
from graphopt.frontend.batch import batch_of
from graphopt.frontend.before import Before
from graphopt.frontend.joining import RecordedRegion, joined_graph, place_of
from graphopt.frontend.outside import unchanged_outside
from graphopt.frontend.region import region_of, tensor_names, training_graph
from graphopt.graph import TrainingGraph

logger = logging.getLogger(__name__)


def record(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    batch_dim: BatchDim,
    reason: str,
    long_to_eager: bool = False,
) -> tuple[TrainingGraph, tuple[str, ...]]:
    """Run `model` once and join the joint graphs of its regions; the caller holds `TRACING`.

    Args:
        reason: why it is not one graph.
        long_to_eager: see `graphopt.compat.recurrent.left_to_eager_mode`.
    Returns:
        All regions as one graph, and what could not be traced, for the report.
    Raises:
        NothingToPlan: no part of it has a joint graph.
    """
    inputs, _, samples = batch_of(args, kwargs, batch_dim)
    regions: list[RecordedRegion] = []
    twin: list[nn.Module] = []
    unplanned: list[str] = []

    def backend(module: fx.GraphModule, examples: list[Any]) -> Any:
        placeholders = module.graph.find_nodes(op="placeholder")
        traced: tuple[fx.GraphModule, int] | None = None
        try:
            traced = _traced(module, examples) if differentiates(module) else _forward_alone(module, examples)
        except Exception as error:
            if is_restart(error):
                raise
            unplanned.append(f"a part of the model cannot be planned ({first_line(error)})")

        def run(*values: Any) -> Any:
            outputs = module(*values)
            if traced is not None:
                # Dynamo runs one graph for all layers that look alike, and sharded weights, once gathered, are other tensors.
                region = region_of(placeholders, values, tensor_names(twin[0]))
                graph = training_graph(region, graph_module(traced[0], copied(traced[0].graph)), traced[1])
                returned = pytree.tree_leaves(outputs)
                regions.append(RecordedRegion(region, graph, values, returned, list(map(place_of, returned))))
            return outputs

        return run

    args, kwargs = copy_tensors((args, kwargs))
    with (
        _without_side_effects(model) as running,
        unchanged_draws(inputs),
        no_generation_cache(running),
        Settings(running, long_to_eager, whole=False),
        statically(),
        torch.enable_grad(),
    ):
        twin.append(running)
        try:
            output = compiled_by(with_own_code(lambda *a, **k: twin[0](*a, **k), "recorded"), backend, False)(*args, **kwargs)
            planned = list(regions)
        finally:  # Dynamo keeps the backend for ever
            regions.clear()
            twin.clear()
    returned = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
    if not any(desc.kind == "gradient" for region in planned for desc in region.graph.outputs):
        why = unplanned[0] if unplanned else "torch.compile traces no part of it that has a backward"
        raise NothingToPlan(f"nothing of the model can be planned: {why}; {reason}")
    parts = "1 graph, planned alone" if len(planned) == 1 else f"{len(planned)} graphs, planned together"
    joined = joined_graph(planned, returned, samples, f"it is {parts}: {reason}")
    order = {name: i for i, (name, _) in enumerate(model.named_parameters())}
    joined = replace(joined, parameters=tuple(sorted(joined.parameters, key=lambda p: order.get(p.name, len(order)))))
    if not joined.trainable:
        raise NothingToPlan(f"nothing of the model can be planned: what torch.compile traces has no parameters; {reason}")
    return joined, tuple(dict.fromkeys(unplanned))


def _traced(module: fx.GraphModule, examples: Sequence[Any]) -> tuple[fx.GraphModule, int]:
    """See `joint_graph`; where all outputs are views of inputs, which AOTAutograd does not trace, copies of them are returned."""
    try:
        return joint_graph(module, examples)
    except CaptureError:
        copies = graph_module(module, copied(module.graph))
        output = copies.graph.output_node()
        for node in output.all_input_nodes:
            if isinstance(node.meta.get("example_value"), Tensor):
                with copies.graph.inserting_before(output):
                    copy_of_node = copies.graph.call_method("clone", (node,))
                copy_of_node.meta = dict(node.meta)
                output.replace_input_with(node, copy_of_node)
        copies.recompile()
        return joint_graph(copies, examples)


def _forward_alone(module: fx.GraphModule, examples: Sequence[Any]) -> tuple[fx.GraphModule, int] | None:
    """A graph without a backward, where it takes FLOPs: a frozen part's, or one under `torch.no_grad`."""
    forward, results = forward_graph(module, examples)
    return (forward, results) if any(node_flops(node) for node in forward.graph.nodes if node.op == "call_function") else None


def trains(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a model returns on these inputs, in eager mode, something that can be differentiated.

    Raises:
        CaptureError: it does not run on them.
    """
    inputs = flatten_call(args, kwargs).tensors
    args, kwargs = copy_tensors((args, kwargs))
    try:
        with unchanged_draws(inputs), _without_side_effects(model) as running, torch.enable_grad():
            output = running(*args, **kwargs)
    except Exception as error:
        raise CaptureError(
            f"the model itself fails on the example inputs, in eager mode, too: {first_line(error)}. Remedy: pass a batch that "
            "it takes, or mend forward()."
        ) from error
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves(output))


@contextlib.contextmanager
def _without_side_effects(model: nn.Module) -> Iterator[nn.Module]:
    """A copy of a model to run; where it has none the model itself, whose buffers and attributes are put back."""
    own = None
    try:
        own = twin(model)
    except Exception as error:
        logger.info("a model that cannot be copied is run once (%s)", first_line(error))
    with unchanged_outside(model), Before(False).restored(model) if own is None else contextlib.nullcontext():
        yield model if own is None else own

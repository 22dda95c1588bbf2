"""A picture of the training graph at the level of the model's blocks, drawn before and after the passes."""

from __future__ import annotations

import io
from collections import defaultdict
from dataclasses import dataclass

from torch import fx

from graphopt.analysis.flop_formulas import node_flops
from graphopt.graph import TrainingGraph, ancestors
from graphopt.report.provenance import block_name
from graphopt.report.units import FLOP_UNITS, unit_of


@dataclass
class Block:
    """One box: parameters that share a module path, down to the first list index.

    Attributes:
        trained, parameters: tensors trained after the passes, and in all.
        forward, backward_before, backward_after: FLOPs at the captured batch.
    """

    name: str
    parameters: int = 0
    trained: int = 0
    forward: int = 0
    backward_before: int = 0
    backward_after: int = 0


def blocks(before: TrainingGraph, after: TrainingGraph) -> list[Block]:
    """The model's blocks in the order in which the forward meets them."""
    found: dict[str, Block] = {}
    kept = {p.name for p in after.trainable}
    for name in _execution_order(before):
        block = found.setdefault(block_name(name), Block(block_name(name)))
        block.parameters += 1
        block.trained += name in kept
    for graph, attribute in ((before, "backward_before"), (after, "backward_after")):
        for name, (forward, backward) in _flops_by_block(graph).items():
            if name in found:
                setattr(found[name], attribute, backward)
                found[name].forward = forward
    return list(found.values())


def _execution_order(graph: TrainingGraph) -> list[str]:
    position = {node: i for i, node in enumerate(graph.graph.nodes)}
    nodes = graph.parameter_nodes()  # tied weights are there under each of their names
    first = {node: min((position[user] for user in node.users), default=len(position)) for node in nodes}
    return list(dict.fromkeys(nodes[node] for node in sorted(nodes, key=lambda node: first[node])))


def _flops_by_block(graph: TrainingGraph) -> dict[str, tuple[int, int]]:
    """FLOPs per block: a node's product with or for a parameter belongs to that parameter's block, others to the block of
    the node before."""
    forward = ancestors(graph.forward_results())
    owner: dict[fx.Node, str] = {n: block_name(p) for n, p in graph.parameter_nodes().items()}
    totals: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for node in graph.graph.nodes:
        if node.op != "call_function":
            continue
        blocks_read = [owner[n] for n in node.all_input_nodes if n in owner]
        if blocks_read:
            owner[node] = blocks_read[-1]
        flops = graph.at(node_flops(node), graph.batch_size)
        if flops and node in owner:
            totals[owner[node]][node not in forward] += flops
    return {name: (f, b) for name, (f, b) in totals.items()}


def block_picture(before: TrainingGraph, after: TrainingGraph) -> str:
    """An SVG: one row per block from input to output, with its backward FLOPs before and after the passes."""
    from matplotlib.figure import Figure

    rows = blocks(before, after)
    figure = Figure(figsize=(9, 0.34 * len(rows) + 1.8))
    axes = figure.add_subplot()
    heights = range(len(rows))
    unit, scale = unit_of(max((b.forward + b.backward_before for b in rows), default=0), FLOP_UNITS, "FLOPs")
    axes.barh(heights, [b.forward / scale for b in rows], color="#9ab", label="forward")
    left = [b.forward / scale for b in rows]
    before_passes = [b.backward_before / scale for b in rows]
    axes.barh(heights, before_passes, left=left, color="#eee", edgecolor="#bbb", label="backward, cut")
    axes.barh(heights, [b.backward_after / scale for b in rows], left=left, color="#d96", label="backward, kept")
    axes.set_yticks(
        list(heights), [f"{b.name}  ({b.trained}/{b.parameters} trained)" for b in rows], fontsize=8, parse_math=False
    )
    axes.invert_yaxis()
    axes.set_xlabel(f"{unit} at batch {before.batch_size} (input at the top, output at the bottom)")
    axes.set_title("FLOPs of the model's blocks, and what the passes leave out", fontsize=10, loc="left")
    figure.legend(fontsize=8, ncols=3, loc="lower center", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout(rect=(0, 0.3 / figure.get_figheight(), 1, 1))
    stream = io.StringIO()
    figure.savefig(stream, format="svg", metadata={"Date": None})
    return stream.getvalue()

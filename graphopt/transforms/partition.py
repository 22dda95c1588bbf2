"""The forward and the backward graph that a joint graph is split into."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from graphopt.compat import FORWARD, OutputDesc
from graphopt.compat.inductor import partition
from graphopt.graph import TrainingGraph, remove_dead_nodes
from graphopt.transforms.symbolic_zeros import tangent_results


@dataclass(frozen=True)
class Halves:
    """A partitioned joint graph.

    Attributes:
        forward: returns updated buffers, the model's outputs and their bases, then what it saves.
        backward: takes what was saved and the tangents that it reads; returns gradients.
        num_mutations, num_forward: how many results of the forward are updated buffers, and how many are not saved tensors.
        static_inputs: positions of the forward's inputs that keep their address (parameters and buffers).
        tangents: by placeholder of the backward, the position among the model's results that it is the gradient of; in order.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    num_mutations: int
    num_forward: int
    static_inputs: tuple[int, ...]
    tangents: dict[str, int]


def split(graph: TrainingGraph, inductor: bool) -> Halves:
    """Partition a joint graph that `specialise` made, or `symbolic`; its module is used up.

    Args:
        inductor: run Inductor's passes on the joint graph and let the min-cut decide what is recomputed.
    """
    _forward_first(graph)
    kinds = [desc.kind for desc in graph.outputs]
    tangents = tangent_results(graph)
    static = tuple(i for i, desc in enumerate(graph.inputs) if desc.kind in ("parameter", "buffer"))
    num_forward = sum(kind in FORWARD for kind in kinds)
    targets = [desc.target for desc in graph.outputs if desc.kind == "mutation"]
    written = {i for i, desc in enumerate(graph.inputs) if desc in targets}
    forward, backward = partition(graph.module, num_forward, static, inductor, written)
    for half in (forward, backward):
        remove_dead_nodes(half)
    read = {node.name: tangents[node.name] for node in backward.graph.find_nodes(op="placeholder") if node.name in tangents}
    return Halves(forward, backward, kinds.count("mutation"), num_forward, static, read)


def _forward_first(graph: TrainingGraph) -> None:
    """Have a graph return updated buffers first, then outputs; graphs that train return buffers last."""

    def place(returned: tuple[OutputDesc, fx.Node | None]) -> int:
        kind = returned[0].kind
        return 2 if kind not in FORWARD else int(kind != "mutation")

    descs, results = zip(*sorted(zip(graph.outputs, graph.results, strict=True), key=place), strict=True)
    graph.outputs = descs
    graph.graph.output_node().args = (results,)

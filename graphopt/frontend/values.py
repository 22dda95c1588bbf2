"""Values that passes have a graph take and return beside the model's own: added inputs, compressed gradients, slots.

AOTAutograd fixes what a joint graph takes and returns before passes see it. So an added input becomes a node that asks for its
value where it is first read, and an added result becomes a node that passes its value to the host: see
`graphopt.ops.host_callback`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import SymInt, Tensor, fx

from graphopt.compat import SAVE, InputDesc, OutputDesc, fake_like, is_recomputed
from graphopt.errors import PassError
from graphopt.graph import TrainingGraph, descendants
from graphopt.ops.host_callback import new_receiver

if TYPE_CHECKING:
    from graphopt.runtime.supply import Supply

OWN = ("parameter", "buffer", "input", "tangent")
"""Kinds of inputs that a graph has before passes see it."""


class Values:
    """What the graphs of one model exchange with Python while they run.

    Attributes:
        supply: supplies values and takes them; None where passes have added nothing.
        numbers: by which graphs reach it.
    """

    def __init__(self, supply: Supply | None = None) -> None:
        self.supply = supply
        self.numbers = new_receiver(self._fetch), new_receiver(self._deliver)
        self._known: dict[str, InputDesc | OutputDesc] = {}

    def __deepcopy__(self, memo: Any) -> Values:
        return Values()

    def _fetch(self, what: str, like: Tensor, size: Sequence[int]) -> Tensor:
        desc = self._known[what]
        assert self.supply is not None
        assert isinstance(desc, InputDesc)
        return self.supply.supply(desc, size, like)

    def _deliver(self, what: str, value: Tensor) -> None:
        assert self.supply is not None
        self.supply.take(self._known[what], value)

    def connect(self, graph: TrainingGraph, num_outputs: int) -> None:
        """Have a graph take and return, in place, what it did before passes added inputs and results; see the module.

        Args:
            num_outputs: of the joint graph, as AOTAutograd has it.
        Raises:
            PassError: an added input has no fixed size.
        """
        nodes = dict(zip(graph.inputs, graph.placeholders, strict=True))
        added = {desc: node for desc, node in nodes.items() if desc.kind not in OWN}
        tangents = [node for desc, node in nodes.items() if desc.kind == "tangent"]
        later = descendants(tangents)
        for desc, node in added.items():
            if node.users:
                node.replace_all_uses_with(self._fetched(graph, desc, node, tangents, later))
            graph.graph.erase_node(node)
        graph.inputs = tuple(desc for desc in graph.inputs if desc not in added)
        self.connect_results(graph, num_outputs)

    def connect_results(self, graph: TrainingGraph, num_outputs: int) -> None:
        """`connect` for what a graph returns: what it takes stay inputs."""
        outputs: list[OutputDesc] = []
        results: list[fx.Node | None] = []
        for position, (made, result) in enumerate(zip(graph.outputs, graph.results, strict=True)):
            if made.kind == "slot" and position >= num_outputs:
                if result is not None:
                    self._insert_deliver(graph, made, result)
                continue
            if made.kind == "gradient" and made.target.kind not in OWN:
                if result is not None:
                    self._insert_deliver(graph, made.target, result)
                made, result = OutputDesc("gradient", InputDesc("parameter", made.target.target)), None
            outputs.append(made)
            results.append(result)
        graph.outputs = tuple(outputs)
        graph.graph.output_node().args = (tuple(results),)
        graph.module.recompile()

    def _fetched(
        self, graph: TrainingGraph, desc: InputDesc, node: fx.Node, tangents: Sequence[fx.Node], later: set[fx.Node]
    ) -> fx.Node:
        """A node that asks for the value of an added input, in that half of the graph that reads it first."""
        value = node.meta["val"]
        if any(isinstance(size, SymInt) for size in value.shape):
            raise PassError(f"the added input {desc.target} has no fixed size: give it one.")
        order = {n: i for i, n in enumerate(graph.graph.nodes)}
        first = min(node.users, key=lambda user: order[user])
        forward = any(user not in later and not is_recomputed(user) for user in node.users)
        device = [n for n in graph.placeholders if isinstance(t := n.meta.get("val"), Tensor) and t.device == value.device]
        if not device:
            raise PassError(f"the added input {desc.target} is on {value.device}, where the model has no tensor.")
        gradients = [n for n in tangents if n in device]
        like = min(gradients, key=lambda n: n.meta["val"].dim()) if gradients and not forward else device[0]
        what = self._named(desc)
        with graph.graph.inserting_before(first):
            args = (like, self.numbers[0], what, list(value.shape), value.dtype)
            fetched = graph.graph.call_function(torch.ops.graphopt.fetch.default, args)
        fetched.meta = {"val": value, **(SAVE if forward else {})}
        return fetched

    def _insert_deliver(self, graph: TrainingGraph, desc: InputDesc | OutputDesc, value: fx.Node) -> None:
        with graph.graph.inserting_after(value):
            node = graph.graph.call_function(torch.ops.graphopt.deliver.default, (value, self.numbers[1], self._named(desc)))
        node.meta = {"val": fake_like(value.meta["val"], (), torch.float32)}

    def _named(self, desc: InputDesc | OutputDesc) -> str:
        name = f"{desc.kind}: {desc.target}" + (f" of {desc.owner}" if desc.owner else "")
        self._known[name] = desc
        return name

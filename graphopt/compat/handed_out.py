"""What forward() hands out beside its result: hooks that collect activations, attributes that keep them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from torch import Tensor, fx
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.variables.base import AttributeMutationExisting, ValueMutationExisting, VariableTracker
from torch._dynamo.variables.tensor import TensorVariable


@contextlib.contextmanager
def results_handed_out() -> Iterator[set[str]]:
    """Inside, a trace of Dynamo's collects the names of nodes that depend on what is trained, and whose values it hands out.

    A trace for export leaves such side effects out of the graph; a step that is compiled has them among its outputs.
    """
    found: set[str] = set()
    suffix = OutputGraph.codegen_suffix

    def looking(self: Any, *args: Any, **kwargs: Any) -> Any:
        found.update(node.name for node in _changed(self.side_effects) if _is_differentiated(node))
        return suffix(self, *args, **kwargs)

    with mock.patch.object(OutputGraph, "codegen_suffix", looking):
        yield found


def _changed(effects: Any) -> Iterator[fx.Node]:
    """Nodes of the tensors in what a trace has changed outside its graph."""
    tensors: list[Any] = []

    def look(variable: Any) -> None:
        if isinstance(variable, TensorVariable):
            tensors.append(variable)

    for variable in effects.id_to_variable.values():
        existed = isinstance(variable.mutation_type, (AttributeMutationExisting, ValueMutationExisting))
        if existed and effects.is_modified(variable):
            if not isinstance(variable, TensorVariable) and variable not in effects.store_attr_mutations:
                VariableTracker.visit(look, variable)
            VariableTracker.visit(look, list(effects.store_attr_mutations.get(variable, {}).values()))
    yield from (variable.as_proxy().node for variable in tensors)


def _is_differentiated(node: fx.Node) -> bool:
    """Whether a node was computed, and from something that requires a gradient."""
    if node.op in ("placeholder", "get_attr"):
        return False
    read = {node}
    for other in reversed(node.graph.nodes):
        if other in read:
            value = other.meta.get("example_value")
            if isinstance(value, Tensor) and value.requires_grad:
                return True
            read.update(other.all_input_nodes)
    return False

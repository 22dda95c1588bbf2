"""FLOP analysis of a joint graph: what each parameter's gradient costs, as formulas of the batch size.

GreenTrainer (section 3.1) splits a tensor's backward into t_dw, the FLOPs of its own gradient, and t_dy, the FLOPs of
passing the gradient on below it. On the graph this needs no rules per layer type: a backward node belongs to every
parameter whose gradient is computed from it, and runs if and only if one of them is wanted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import sympy
import torch
from torch import fx

from graphopt.analysis.flop_formulas import node_flops
from graphopt.compat import in_region, is_kept, is_recomputed
from graphopt.errors import InputError
from graphopt.graph import BATCH, TrainingGraph, ancestors, reached


@dataclass(frozen=True)
class TensorFlops:
    """One parameter's share of the backward.

    Attributes:
        name, shape: of the parameter.
        trainable: whether its gradient is computed.
        weight_grad_flops: t_dw, FLOPs that only its own gradient needs.
        input_grad_flops: t_dy, FLOPs of passing the gradient through its layer to those below.
    """

    name: str
    shape: tuple[int, ...]
    trainable: bool
    weight_grad_flops: int | sympy.Expr
    input_grad_flops: int | sympy.Expr


@dataclass(frozen=True)
class FlopProfile:
    """FLOPs of one training step, 2 per multiply-add, at one batch size.

    Attributes:
        batch_size: samples; the integers below are for this many.
        formulas: `forward`, `backward` and `step` as sympy expressions of `B`.
        order: trainable parameters from the output to the input: by what must run before their gradient is known.
        class_formulas: (bit mask over `order`, formula): backward nodes that the same set of gradients needs.
        rows: `tensors` as formulas.
    """

    batch_size: int
    forward_formula: sympy.Expr
    order: tuple[str, ...]
    class_formulas: tuple[tuple[int, sympy.Expr], ...]
    rows: tuple[TensorFlops, ...]
    symbolic: bool = True

    def at(self, batch: int) -> FlopProfile:
        """The same formulas evaluated for another batch size.

        Raises:
            InputError: the graph is static and `batch` is not the captured one.
        """
        if not self.symbolic and batch != self.batch_size:
            raise InputError(
                f"these FLOPs are of {self.batch_size} samples alone: graphopt.analyze(...).flops has formulas, unless the "
                "model fixes the batch size; then analyse it with the batch that you ask for."
            )
        if batch < 1:
            raise InputError(f"batch must be at least 1, not {batch}.")
        return replace(self, batch_size=batch)

    @cached_property
    def formulas(self) -> dict[str, sympy.Expr]:
        """`forward`, `backward`, `step` as expressions of `B`."""
        backward = sympy.Add(*(formula for _, formula in self.class_formulas))
        return {"forward": self.forward_formula, "backward": backward, "step": self.forward_formula + backward}

    @cached_property
    def forward(self) -> int:
        """FLOPs of the forward."""
        return self._evaluate(self.forward_formula)

    @cached_property
    def backward(self) -> int:
        """FLOPs of the backward for all trainable parameters."""
        return sum(flops for _, flops in self.classes)

    @property
    def step(self) -> int:
        """FLOPs of forward and backward; what `FlopCounterMode` counts of the traced operators by `ADDED_FORMULAS`."""
        return self.forward + self.backward

    @cached_property
    def classes(self) -> tuple[tuple[int, int], ...]:
        """(bit mask over `order`, FLOPs): a class runs if and only if one of its parameters is selected."""
        return tuple((mask, self._evaluate(formula)) for mask, formula in self.class_formulas)

    @cached_property
    def tensors(self) -> tuple[TensorFlops, ...]:
        """One row per parameter, in registration order."""
        at = self._evaluate
        return tuple(
            TensorFlops(r.name, r.shape, r.trainable, at(r.weight_grad_flops), at(r.input_grad_flops)) for r in self.rows
        )

    def cost(self, selection: Iterable[str]) -> int:
        """Exact backward FLOPs when only the gradients of `selection` are outputs.

        Args:
            selection: parameter names; tied weights under their first name.
        Raises:
            InputError: a name that is no trainable parameter.
        """
        wanted = 0
        for name in selection:
            if name not in self._bit:
                raise InputError(f"{name!r} is not a trainable parameter of the analysed model.")
            wanted |= self._bit[name]
        return sum(flops for mask, flops in self.classes if mask & wanted)

    @cached_property
    def _bit(self) -> dict[str, int]:
        return {name: 1 << i for i, name in enumerate(self.order)}

    def _evaluate(self, formula: sympy.Expr) -> int:
        return int(formula.subs(BATCH, self.batch_size))


def flop_profile(graph: TrainingGraph) -> FlopProfile:
    """Count the FLOPs of every node of `graph` and whom they serve."""
    flops = {node: graph.formula(count) for node in graph.graph.nodes if (count := node_flops(node)) != 0}
    forward = ancestors(graph.forward_results())
    gradients = graph.gradients()
    serves = _served_parameters(graph, forward, list(gradients.values()))
    shared, private = _split_private(graph, forward, flops, serves)

    names = list(gradients)
    positions = {node: i for i, node in enumerate(graph.graph.nodes)}
    alone = [sympy.Add(*(flops[n] for n in shared if serves[n] >> i & 1)) for i in range(len(names))]
    depth = {name: int(formula.subs(BATCH, graph.batch_size)) for name, formula in zip(names, alone, strict=True)}
    order = tuple(sorted(names, key=lambda name: (depth[name], positions[gradients[name]])))

    rank = {names.index(name): i for i, name in enumerate(order)}
    classes: dict[int, list[sympy.Expr]] = defaultdict(list)
    recomputed = [node for node in flops if node in forward and serves.get(node, 0)]
    for node in (*shared, *recomputed, *(n for nodes in private.values() for n in nodes)):
        mask = sum(1 << rank[i] for i in range(len(names)) if serves[node] >> i & 1)
        classes[mask].append(flops[node])
    own = {names[i]: sympy.Add(*(flops[n] for n in nodes)) for i, nodes in private.items()}
    passed = _attribute_chain(graph, forward, shared, flops)
    zero = sympy.Integer(0)
    return FlopProfile(
        batch_size=graph.batch_size,
        forward_formula=sympy.Add(*(f for n, f in flops.items() if n in forward)),
        order=order,
        class_formulas=tuple((mask, sympy.Add(*parts)) for mask, parts in classes.items()),
        rows=tuple(
            TensorFlops(p.name, p.shape, p.name in gradients, own.get(p.name, zero), passed.get(p.name, zero))
            for p in graph.parameters
        ),
        symbolic=graph.symbolic,
    )


def _served_parameters(graph: TrainingGraph, forward: set[fx.Node], gradients: list[fx.Node]) -> dict[fx.Node, int]:
    """For every node that the backward runs, a bit mask of the gradients computed from it.

    What an input's gradient is computed from runs whatever is selected: its mask is that of every parameter.
    """
    serves: dict[fx.Node, int] = defaultdict(int)
    for i, node in enumerate(gradients):
        serves[node] |= 1 << i
    for desc, result in zip(graph.outputs, graph.results, strict=True):
        if desc.kind == "gradient" and desc.target.kind == "input" and result is not None:
            serves[result] |= (1 << len(gradients)) - 1
    for node in reversed(list(graph.graph.nodes)):
        if (node in forward and not is_recomputed(node)) or node.op == "output":
            continue
        for user in node.users:
            kept = node in forward and is_kept(user) and (user in forward or in_region(user))
            if user.op != "output" and not kept:
                serves[node] |= serves[user]
    return serves


def _split_private(
    graph: TrainingGraph, forward: set[fx.Node], flops: dict[fx.Node, sympy.Expr], serves: dict[fx.Node, int]
) -> tuple[list[fx.Node], dict[int, list[fx.Node]]]:
    """Backward nodes with FLOPs, as (chain, {gradient: its own dW products}).

    A dW product is the last one before a gradient, serves it alone, and multiplies two activations: a product with a
    parameter passes the gradient on (dY = dZ W^T), even when only the deepest tensor is left to receive it.
    """
    weights = weight_of(graph)
    private: dict[int, list[fx.Node]] = defaultdict(list)
    for i, gradient in enumerate(graph.gradients().values()):
        for node in reached([gradient], lambda node: () if node in flops or node in forward else node.all_input_nodes):
            if node in flops and node not in forward and serves[node] == 1 << i and _weight_read(node, weights) is None:
                private[i].append(node)
    taken = {node for nodes in private.values() for node in nodes}
    return [n for n in flops if n not in forward and n not in taken and serves[n]], private


_LAYOUT = ("view", "_unsafe_view", "reshape", "t", "transpose", "permute", "expand", "unsqueeze", "squeeze", "slice", "select",
           "_to_copy", "clone", "alias", "detach", "split", "getitem", "unbind")  # fmt: skip


def weight_of(graph: TrainingGraph) -> dict[fx.Node, str]:
    """Parameter name of every node that is a parameter, seen through changes of layout and dtype."""
    weights = dict(graph.parameter_nodes())
    for node in graph.graph.nodes:
        name = getattr(node.target, "overloadpacket", node.target)
        if node.op == "call_function" and getattr(name, "__name__", "") in _LAYOUT:
            source = node.args[0]
            if isinstance(source, fx.Node) and source in weights:
                weights[node] = weights[source]
    return weights


def _weight_read(node: fx.Node, weights: dict[fx.Node, str]) -> str | None:
    """The parameter that a backward product passes the gradient through; None where it multiplies two activations."""
    if node.target is torch.ops.aten.convolution_backward.default and not node.args[-1][0]:  # type: ignore[index]
        return None  # its weight argument only tells the kernel size
    return next((weights[n] for n in node.all_input_nodes if n in weights), None)


def _attribute_chain(
    graph: TrainingGraph, forward: set[fx.Node], chain: list[fx.Node], flops: dict[fx.Node, sympy.Expr]
) -> dict[str, sympy.Expr]:
    """t_dy per parameter: products with a parameter are its own; the others (attention) belong to the parameter that the
    gradient passed last."""
    weights = weight_of(graph)
    members = set(chain)
    last: dict[fx.Node, str] = {}
    total: dict[str, list[sympy.Expr]] = defaultdict(list)
    for node in graph.graph.nodes:
        if node in forward or node.op in ("placeholder", "output"):
            continue
        name = _weight_read(node, weights) if node in members else None
        if name is None:
            name = next((last[n] for n in reversed(node.all_input_nodes) if n in last), None)
        if name is None:
            continue
        last[node] = name
        if node in members:
            total[name].append(flops[node])
    return {name: sympy.Add(*parts) for name, parts in total.items()}

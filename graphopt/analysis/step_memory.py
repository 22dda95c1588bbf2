"""The memory of a compiled training step: forward, backward and optimizer, from the partitioned graphs that will run."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from graphopt.analysis.fusion import fused_nodes, is_pointwise, kernel_spans
from graphopt.analysis.layouts import channels_last_nodes, copied_operands, copied_views
from graphopt.analysis.liveness import GraphLiveness, Kernels, Owner, Storage, is_view, liveness, tensor_bytes
from graphopt.analysis.memory import Block, Category, MemoryProfile, Row
from graphopt.analysis.optimizers import OptimizerFactory, Trained, optimizer_memory
from graphopt.compat import expression, output_list
from graphopt.errors import InputError
from graphopt.graph import BATCH, TrainingGraph
from graphopt.partition import Halves, split
from graphopt.specialise import symbolic


def step_memory(
    graph: TrainingGraph,
    backend: str = "inductor",
    optimizer: str | OptimizerFactory | torch.optim.Optimizer | None = "adamw",
    *,
    accumulation: int = 1,
    master_weights: bool = False,
    keep_outputs: bool = False,
) -> MemoryProfile:
    """Timeline of the second and every later training step of a joint graph.

    Args:
        graph: as captured or rewritten; it is not changed.
        backend: "inductor" (recomputes what its min-cut says and fuses) or "aot_eager" (neither).
        optimizer, master_weights: see `optimizer_memory`.
        accumulation: backward passes per optimizer step; above 1, gradients exist from the start.
        keep_outputs: the model's outputs other than the loss are held until the step ends, as a variable that is not
            deleted does; otherwise they are released after the forward.
    Raises:
        InputError: an unknown backend or optimizer, or `accumulation` below 1.
    """
    if backend not in ("inductor", "aot_eager"):
        raise InputError(f"backend={backend!r}: the memory of 'inductor' or 'aot_eager' can be foretold.")
    if accumulation < 1:
        raise InputError(f"accumulation={accumulation} must be at least 1 backward per optimizer step.")
    inductor = backend == "inductor"
    halves = split(symbolic(graph, decompose=inductor), inductor)
    return _Builder(graph, halves, inductor).profile(optimizer, accumulation, master_weights, keep_outputs)


class _Builder:
    """Puts the storages of both halves and of the optimizer on one timeline."""

    def __init__(self, graph: TrainingGraph, halves: Halves, inductor: bool) -> None:
        self.graph = graph
        self.inductor = inductor
        self.formulas: dict[Any, sympy.Expr] = {}
        self.halves = halves
        self.backward_module = halves.backward_for(halves.expected)
        self.channels_last: set[fx.Node] = set()
        self.device: torch.device = graph.placeholders[0].meta["val"].device
        self.operands = copied_operands(halves.forward) if inductor else {}
        self.forward = self._liveness(halves.forward, self.operands)
        saved = output_list(halves.forward)[halves.num_forward :]
        self.backward = self._liveness(self.backward_module, [n.name for n in saved if n in self.channels_last])
        self.starts = len(self.forward.nodes)
        self.ends = self.starts + len(self.backward.nodes)  # the row in which gradients are handed to the parameters
        self.blocks: list[Block] = []

    def profile(self, optimizer: Any, accumulation: int, master_weights: bool, keep_outputs: bool) -> MemoryProfile:
        trained = [Trained(p.name, p.shape, p.dtype) for p in self.graph.trainable]
        optimizing = optimizer_memory(optimizer, trained, self.device, master_weights)
        rows = [
            *(Row(n.name, "forward") for n in self.forward.nodes),
            *(Row(n.name, "backward") for n in self.backward.nodes),
            Row("accumulate_grad", "backward"),
            *(Row(f"{optimizing.name}: {name}", "optimizer") for name in optimizing.operators or ("step",)),
        ]
        end = len(rows) - 1
        self._add_inputs(end)
        for name, state, size in optimizing.states:
            self._add_static(name, f"{name}: {state}", "optimizer state", sympy.Integer(size), end, "optimizer state")
        self._add_forward(keep_outputs, end)
        self._add_backward(end, accumulation > 1)
        first = self.ends + 1
        for t in optimizing.temporaries:
            size = sympy.Integer(t.size)
            why = "temporary of the optimizer"
            self.blocks.append(Block(t.name, "", t.shape, t.dtype, "temporary", size, first + t.born, first + t.last, why))
        return MemoryProfile(
            tuple(rows),
            tuple(self.blocks),
            self.graph.batch_size,
            self.graph.symbolic,
            self._assumptions(optimizing.name, accumulation, keep_outputs),
        )

    def _liveness(self, module: fx.GraphModule, channels_last: Iterable[str]) -> GraphLiveness:
        if not self.inductor:
            return liveness(module, self._formula)
        self.channels_last = channels_last_nodes(module, channels_last)
        fused = fused_nodes(module)
        loops = {n for n in module.graph.nodes if n.op == "call_function" and is_pointwise(n) and n not in fused}
        kernels = Kernels(
            fused,
            copied_views(module, self.channels_last),
            loops,
            loops - self.channels_last,
            kernel_spans(module) if self.device.type == "cpu" else None,
        )
        return liveness(module, self._formula, kernels)

    def _formula(self, value: Any) -> sympy.Expr:
        if isinstance(value, int):
            return sympy.Integer(value)
        key = expression(value)
        if key not in self.formulas:
            self.formulas[key] = key.subs(dict.fromkeys(self.graph.symbols, BATCH))
        return self.formulas[key]

    def _add_inputs(self, end: int) -> None:
        categories: dict[str, Category] = {"parameter": "parameter", "buffer": "buffer", "input": "input"}
        seen = set()
        for desc, node in zip(self.graph.inputs, self.graph.placeholders, strict=True):
            if desc.kind in categories and desc not in seen:
                seen.add(desc)
                size = tensor_bytes(node.meta["val"], self._formula)
                name = f"input {desc.target}" if desc.kind == "input" else str(desc.target)
                self._add_static(name, name, categories[desc.kind], size, end, desc.kind, node)

    def _add_static(
        self, owner: str, name: str, category: Category, size: sympy.Expr, end: int, why: str, node: fx.Node | None = None
    ) -> None:
        value = node.meta["val"] if node is not None else None
        shape = () if value is None else tuple(self._dim(s) for s in value.shape)
        dtype = "" if value is None else str(value.dtype)
        module = owner.rpartition(".")[0]
        self.blocks.append(Block(name, module, shape, dtype, category, size, 0, end, f"{why}, for the whole step"))

    def _add_forward(self, keep_outputs: bool, end: int) -> None:
        """Saved tensors live until the backward last reads them; other outputs as the caller holds them."""
        results = self.forward.outputs
        kept = self._first_positions(results[: self.halves.num_forward])
        loss = {owner for i in self.halves.expected for owner in results[self.halves.num_mutations + i]}
        names = [n.name if isinstance(n, fx.Node) else "" for n in output_list(self.halves.forward)]
        saved: dict[Owner, int] = {}
        for name, owners in zip(names[self.halves.num_forward :], results[self.halves.num_forward :], strict=True):
            for owner in owners:
                saved[owner] = max(saved.get(owner, -1), self.backward.inputs.get(name, -1))
        self._add_copied_operands(saved)
        for storage in self.forward.storages:
            category: Category = "temporary"
            last, why = storage.last_read, _read_by(self.forward, storage.last_read)
            if storage.owner in kept:
                last, why = self.starts - 1, "output of the model"
                if keep_outputs or storage.owner in loss:
                    last, why = (end if keep_outputs else self.ends - 1), "output of the model, held by the caller"
            if storage.owner in saved:
                read = saved[storage.owner]
                if self.starts + read > last:
                    last, why = self.starts + max(read, 0), f"saved for the backward: {_read_by(self.backward, read)}"
                category = "saved activation"
            self._add(storage, 0, max(last, storage.last_read), category, why)

    def _add_copied_operands(self, saved: dict[Owner, int]) -> None:
        """Channels-last copies of what convolutions read; the backward gets the copy."""
        for node in self.halves.forward.graph.nodes:
            if node.op == "placeholder" and node.name in self.operands:
                first, last = self.operands[node.name]
                read = saved.get((node, 0), -1)
                value = node.meta["val"]
                size = tensor_bytes(value, self._formula)
                category: Category = "saved activation" if read >= 0 else "temporary"
                until = self.starts + read if read >= 0 else last
                shape = tuple(self._dim(s) for s in value.shape)
                name, why = f"channels-last copy of {node.name}", "convolutions read it, and their backward"
                self.blocks.append(Block(name, "", shape, str(value.dtype), category, size, first, until, why))

    def _add_backward(self, end: int, accumulating: bool) -> None:
        """Gradients live until the step ends. One in another layout than its parameter's is copied when it is handed over."""
        positions = [d.target for d in self.graph.outputs if d.kind in ("gradient", "none")]
        nodes = output_list(self.backward_module)
        gradients: dict[Owner, Any] = {}
        placeholders = dict(zip(self.graph.inputs, self.graph.placeholders, strict=True))
        for desc, node, owners in zip(positions, nodes, self.backward.outputs, strict=True):
            if desc is None or desc.kind != "parameter" or not isinstance(node, fx.Node):
                continue
            value, parameter = node.meta["val"], placeholders[desc].meta["val"]
            copied = value.stride() != parameter.stride()
            if accumulating or copied:
                born = 0 if accumulating else self.ends
                size = tensor_bytes(parameter, self._formula)
                name, module = f"gradient of {desc.target}", str(desc.target).rpartition(".")[0]
                shape = tuple(int(s) for s in parameter.shape)
                why = "gradient, until zero_grad"
                self.blocks.append(Block(name, module, shape, str(parameter.dtype), "gradient", size, born, end, why))
            for owner in owners:
                gradients[owner] = None if accumulating or copied else desc
        for storage in self.backward.storages:
            if storage.owner not in gradients:
                self._add(
                    storage, self.starts, self.starts + storage.last_read, "temporary", _read_by(self.backward, storage.last_read)
                )
            elif gradients[storage.owner] is None:
                self._add(storage, self.starts, self.ends, "gradient", "gradient, until it is added to .grad")
            else:
                self._add(storage, self.starts, end, "gradient", "gradient, until zero_grad", gradients[storage.owner].target)

    def _add(self, storage: Storage, offset: int, last: int, category: Category, why: str, parameter: str = "") -> None:
        value = storage.node.meta["val"]
        value = value[storage.index] if isinstance(value, (tuple, list)) else value
        name = f"gradient of {parameter}" if parameter else storage.node.name
        module = parameter.rpartition(".")[0] if parameter else module_path(storage.node)
        shape = tuple(self._dim(s) for s in value.shape)
        self.blocks.append(Block(name, module, shape, str(value.dtype), category, storage.size, offset + storage.born, last, why))

    def _dim(self, size: Any) -> int | sympy.Expr:
        return size if isinstance(size, int) else self._formula(size)

    def _first_positions(self, outputs: Sequence[Iterable[Owner]]) -> set[Owner]:
        return {owner for owners in outputs for owner in owners}

    def _assumptions(self, optimizer: str, accumulation: int, keep_outputs: bool) -> tuple[str, ...]:
        attention = sorted({k for n in self.forward.nodes if (k := _attention_kernel(n))})
        return (
            f"kernels as on {self.device.type}; attention: {', '.join(attention) or 'matrix products and softmax'}",
            "compiled by Inductor, fusion as modelled" if self.inductor else "no fusion",
            f"optimizer {optimizer}, {accumulation} backward per step, gradients released by zero_grad(set_to_none=True)",
            "outputs are held until the step ends" if keep_outputs else "of the outputs only the loss is held",
            "workspaces inside kernels and libraries are not counted",
        )


def module_path(node: fx.Node) -> str:
    """Path of the module that a node comes from, as in `named_modules`; "" if it is not known."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    path, _ = list(stack.values())[-1]
    path = str(path)
    for prefix in ("L['self'].", "L__self___"):
        path = path.removeprefix(prefix)
    return path.removeprefix("model.") if path.startswith("model.") else path


def _read_by(graph: GraphLiveness, position: int) -> str:
    """What reads last, in words: the last node up to `position` that is more than a view."""
    readers = [node.name for node in graph.nodes[: position + 1] if not is_view(node)][-1:]
    return f"read by {readers[0]}" if position >= 0 and readers else "read by nothing"


def _attention_kernel(node: fx.Node) -> str:
    name = str(getattr(node.target, "overloadpacket", node.target))
    return name.removeprefix("aten.") if "scaled_dot_product" in name and node.target is not operator.getitem else ""

"""The memory of a compiled training step: forward, backward and optimizer, from the partitioned graphs that will run."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import fx

from graphopt.analysis.liveness import GraphLiveness, Owner, Storage, graph_liveness, program_liveness, tensor_bytes
from graphopt.analysis.memory import Block, Category, MemoryProfile, Row, held_block
from graphopt.analysis.optimizers import OptimizerFactory, optimizer_memory
from graphopt.compat import FORWARD, expression, output_list
from graphopt.compat.inductor_program import inductor_programs
from graphopt.errors import InputError
from graphopt.graph import TrainingGraph
from graphopt.specialise import symbolic
from graphopt.transforms.partition import split
from graphopt.transforms.symbolic_zeros import for_loss_alone


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
        InputError: an unknown backend or optimizer.
    """
    return StepTimeline(graph, backend).profile(optimizer, accumulation, master_weights, keep_outputs)


class StepTimeline:
    """Puts the storages of both halves and of an optimizer on one timeline; with each of several, the halves are the same."""

    def __init__(self, graph: TrainingGraph, backend: str) -> None:
        if backend not in ("inductor", "aot_eager"):
            raise InputError(f"backend={backend!r}: the memory of 'inductor' or 'aot_eager' can be predicted.")
        self.graph = graph
        self.inductor = backend == "inductor"
        self.formulas: dict[sympy.Expr, sympy.Expr] = {}
        self.halves = halves = split(symbolic(for_loss_alone(graph), decompose=self.inductor), self.inductor)
        self.device: torch.device = graph.example.device
        self.attention = sorted({k for n in halves.forward.graph.nodes if (k := _attention_kernel(n))})
        self.saved = [n.name if isinstance(n, fx.Node) else "" for n in output_list(halves.forward)[halves.num_forward :]]
        backward = halves.backward
        self.tangents = [
            (n.name, n.meta["val"]) for n in backward.graph.nodes if n.op == "placeholder" and n.name in halves.tangents
        ]
        self.gradients = [n.meta["val"] if isinstance(n, fx.Node) else None for n in output_list(backward)]
        self.forward, self.backward = self._liveness(halves.forward, backward)
        self.starts = len(self.forward.steps)
        self.ends = self.starts + len(self.backward.steps)  # the row in which gradients are given to the parameters

    def profile(
        self, optimizer: Any, accumulation: int = 1, master_weights: bool = False, keep_outputs: bool = False
    ) -> MemoryProfile:
        """See `step_memory`."""
        self.blocks: list[Block] = []
        trained = [p for p in self.graph.trainable if p.name not in self.graph.compressed]
        optimizing = optimizer_memory(optimizer, trained, self.device, master_weights)
        rows = [
            *(Row(name, "forward") for name in self.forward.steps),
            *(Row(name, "backward") for name in self.backward.steps),
            Row("accumulate_grad", "backward"),
            *(Row(f"{optimizing.name}: {name}", "optimizer") for name in optimizing.operators or ("step",)),
        ]
        end = len(rows) - 1
        self._add_inputs(end)
        for name, state, size in optimizing.states:
            self.blocks.append(held_block(f"{name}: {state}", "optimizer state", sympy.Integer(size), end))
        self._add_forward(keep_outputs, end)
        self._add_backward(end, accumulation > 1)
        first = self.ends + 1
        self.blocks += [replace(t, born=first + t.born, last=first + t.last) for t in optimizing.temporaries]
        return MemoryProfile(
            tuple(rows),
            tuple(self.blocks),
            self.graph.batch_size,
            self.graph.symbolic,
            self._assumptions(optimizing.name, accumulation, keep_outputs),
        )

    def _liveness(self, forward: fx.GraphModule, backward: fx.GraphModule) -> tuple[GraphLiveness, GraphLiveness]:
        if not self.inductor:
            return graph_liveness(forward, self._formula), graph_liveness(backward, self._formula)
        placeholders = [[n.name for n in half.graph.nodes if n.op == "placeholder"] for half in (forward, backward)]
        halves = self.halves
        num_outputs = halves.num_forward - halves.num_mutations
        programs = inductor_programs(forward, backward, halves.num_mutations, num_outputs, halves.static_inputs)
        first, second = (program_liveness(p, names, self._formula) for p, names in zip(programs, placeholders, strict=True))
        return first, second

    def _formula(self, value: Any) -> sympy.Expr:
        if isinstance(value, int):
            return sympy.Integer(value)
        key = value if isinstance(value, sympy.Expr) else expression(value)
        if key not in self.formulas:
            self.formulas[key] = self.graph.formula(key)
        return self.formulas[key]

    def _add_inputs(self, end: int) -> None:
        categories: dict[str, Category] = {
            "parameter": "parameter", "buffer": "buffer", "input": "input", "random": "input", "given": "buffer",
        }  # fmt: skip
        seen = set()
        for desc, node in zip(self.graph.inputs, self.graph.placeholders, strict=True):
            if desc.kind in categories and desc not in seen:
                seen.add(desc)
                value = node.meta["val"]
                size, shape = tensor_bytes(value, self._formula), [self._dim(s) for s in value.shape]
                name = f"input {desc.target}" if desc.kind == "input" else str(desc.target)
                self.blocks.append(held_block(name, categories[desc.kind], size, end, shape, str(value.dtype), desc.kind))

    def _add_forward(self, keep_outputs: bool, end: int) -> None:
        """Saved tensors live until the backward last reads them; other outputs as the caller holds them."""
        results = self.forward.outputs
        kept = {owner for owners in results[: self.halves.num_forward] for owner in owners}
        loss = {owner for i in set(self.halves.tangents.values()) for owner in results[self.halves.num_mutations + i]}
        saved: dict[Owner, int] = {}
        for name, owners in zip(self.saved, results[self.halves.num_forward :], strict=True):
            for owner in owners:
                saved[owner] = max(saved.get(owner, -1), self.backward.inputs.get(name, -1))
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

    def _add_backward(self, end: int, accumulating: bool) -> None:
        """Gradients live until the step ends. One in another layout than its parameter's is copied when the parameter gets it."""
        positions = [d.target if d.kind == "gradient" else None for d in self.graph.outputs if d.kind not in FORWARD]
        for name, value in self.tangents:
            size, shape = tensor_bytes(value, self._formula), tuple(self._dim(s) for s in value.shape)
            why = "gradient of an output, held by autograd while the backward runs"
            self.blocks.append(Block(name, "", shape, str(value.dtype), "temporary", size, self.starts, self.ends, why))
        gradients: dict[Owner, Any] = {}
        placeholders = dict(zip(self.graph.inputs, self.graph.placeholders, strict=True))
        for desc, value, owners in zip(positions, self.gradients, self.backward.outputs, strict=True):
            if desc is None or desc.kind not in ("parameter", "compressed", "input") or value is None:
                continue
            # A variable of a compressed gradient has no memory, so that any layout does; an input's layout is the caller's.
            if desc.kind == "input" or (desc.kind == "compressed" and not accumulating):
                gradients |= dict.fromkeys(owners, desc)
                continue
            parameter = placeholders[desc].meta["val"]
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
                desc = gradients[storage.owner]
                of = f"input {desc.target}" if desc.kind == "input" else desc.target
                self._add(storage, self.starts, end, "gradient", "gradient, until zero_grad", of)

    def _add(self, storage: Storage, offset: int, last: int, category: Category, why: str, parameter: str = "") -> None:
        name = f"gradient of {parameter}" if parameter else storage.name
        module = parameter.rpartition(".")[0] if parameter else storage.module
        shape = tuple(int(s) if s.is_number else s for s in storage.shape)
        born = offset + storage.born
        self.blocks.append(Block(name, module, shape, str(storage.dtype), category, storage.size, born, last, why))

    def _dim(self, size: Any) -> int | sympy.Expr:
        return size if isinstance(size, int) else self._formula(size)

    def _assumptions(self, optimizer: str, accumulation: int, keep_outputs: bool) -> tuple[str, ...]:
        return (
            f"kernels as on {self.device.type}; attention: {', '.join(self.attention) or 'matrix products and softmax'}",
            f"the program that Inductor generates here for a batch of {self.graph.batch_size}" if self.inductor else "no fusion",
            *(["optimizer states of compressed gradients are on the host"] if self.graph.compressed else []),
            f"optimizer {optimizer}, {accumulation} backward per step, gradients released by zero_grad(set_to_none=True)",
            "outputs are held until the step ends" if keep_outputs else "of the outputs only the loss is held",
            "workspaces inside kernels and libraries are not counted",
        )


def _read_by(graph: GraphLiveness, position: int) -> str:
    """What reads last, in words."""
    reader = graph.readers[position] if position >= 0 else ""
    return f"read by {reader}" if reader else "read by nothing"


def _attention_kernel(node: fx.Node) -> str:
    name = str(getattr(node.target, "overloadpacket", node.target))
    return name.removeprefix("aten.") if "scaled_dot_product" in name and node.target is not operator.getitem else ""

"""A joint graph as Python: one operator a line, shapes in terms of the batch size `B`, and names that a model's user knows.

The text can be run: `step` takes the graph's inputs in order and returns its outputs.
"""

from __future__ import annotations

import itertools
import keyword
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import SymBool, SymFloat, SymInt, Tensor, fx

from graphopt import compat
from graphopt.compat import pytree
from graphopt.graph import BATCH, TrainingGraph, descendants
from graphopt.report.provenance import source_line

WIDTH = 130
"""Columns after which a call is broken, one argument a line."""


def readable(graph: TrainingGraph, sources: bool = False, decisions: Mapping[str, str] | None = None) -> str:
    """The joint graph as Python.

    Args:
        sources: with the line of the model's code that the operators after it come from.
        decisions: by parameter, what the plan decided on it; stands beside the parameter and beside its gradient.
    """
    names = node_names(graph)
    backward = descendants(n for d, n in zip(graph.inputs, graph.placeholders, strict=True) if d.kind == "tangent")
    batch = "" if graph.symbolic else f" (fixed: {graph.batch_size})"
    lines = [f"# joint graph; B is the batch size{batch}", *_imports(graph), "", "def step("]
    told = {name: f"; {decision}" for name, decision in (decisions or {}).items()}
    for desc, node in zip(graph.inputs, graph.placeholders, strict=True):
        decided = told.get(desc.target, "") if desc.kind == "parameter" else ""
        lines.append(f'    {names[node]}: "{_shape(graph, node.meta.get("val"))}",  # {input_name(desc)}{decided}')
    lines.append("):")
    lines.extend(_size_of_batch(graph, names))
    section, source = "", None
    for node in graph.graph.nodes:
        if node.op in ("placeholder", "output") or _size(graph, node.meta.get("val")):
            continue  # sizes are printed where they are used
        here = "backward" if node in backward else "forward"
        if here != section:
            section = here
            lines.append(f"    # {here}")
        line = source_line(node) if sources else None
        if line is not None and line != source:
            source = line
            lines.append(f"    # File: {line}")
        lines.extend(broken(f"    {_line(graph, node, names)}"))
    lines.append("    return (")
    for returned, result in zip(graph.outputs, graph.results, strict=True):
        what = output_name(returned) + (told.get(returned.target.target, "") if returned.kind == "gradient" else "")
        lines.append(f"        {names[result] if isinstance(result, fx.Node) else result},{f'  # {what}' if what else ''}")
    lines.append("    )")
    return "\n".join(lines) + "\n"


def node_names(graph: TrainingGraph) -> dict[fx.Node, str]:
    """A Python name for every node: inputs by what they are, the others as the graph has them."""
    taken = {"B", "torch", "operator", "step", "getitem", *keyword.kwlist}  # that the text itself uses
    taken |= {node.name for node in graph.graph.nodes if node.op != "placeholder"}
    taken |= {n.target.namespace for n in graph.graph.nodes if isinstance(n.target, compat.OpOverload)}
    names: dict[fx.Node, str] = {}
    for desc, node in zip(graph.inputs, graph.placeholders, strict=True):
        what = f"grad_{desc.target.kind}_{desc.target.target}" if desc.kind == "tangent" else str(desc.target)
        wanted = re.sub(r"\W", "_", what if desc.kind in ("parameter", "buffer", "tangent") else f"{desc.kind}_{desc.target}")
        wanted = wanted if wanted[:1].isalpha() else f"_{wanted}"
        name = next(n for k in itertools.count() if (n := f"{wanted}_{k}" if k else wanted) not in taken)
        taken.add(name)
        names[node] = name
    return names | {node: node.name for node in graph.graph.nodes if node.op != "placeholder"}


def broken(line: str) -> list[str]:
    """A line of code; one that is too long with an argument a line, indented."""
    if len(line) <= WIDTH or line.lstrip().startswith("#"):
        return [line]
    indent = " " * (len(line) - len(line.lstrip()))
    parts: list[str] = []
    opened, depth, start, quote = -1, 0, 0, ""
    for position, c in enumerate(line):
        if quote:
            quote = "" if c == quote else quote
        elif c in "\"'":
            quote = c
        elif c in "([{":
            depth += 1
            if depth == 1 and opened < 0:
                opened, start = position, position + 1
        elif c in ")]}":
            depth -= 1
            if depth == 0:
                parts.append(line[start:position].strip())
                return [line[: opened + 1], *(f"{indent}    {part}," for part in parts if part), indent + line[position:]]
        elif c == "," and depth == 1:
            parts.append(line[start:position].strip())
            start = position + 1
    return [line]


def output_name(desc: compat.OutputDesc) -> str:
    """What an output of a joint graph is, in words; "" if it is nothing."""
    if desc.kind == "gradient":
        return f"gradient of {input_name(desc.target)}"
    if desc.kind in compat.WRITES:
        return f"new value of {input_name(desc.target)}"
    return "" if desc.kind == "none" else f"{desc.kind} {desc.target}"


def input_name(desc: compat.InputDesc) -> str:
    """What an input of a joint graph is, in words."""
    return f"gradient of {output_name(desc.target)}" if desc.kind == "tangent" else f"{desc.kind} {desc.target}"


def _imports(graph: TrainingGraph) -> Iterator[str]:
    targets = [n.target for n in graph.graph.nodes if n.op == "call_function"]
    yield "import torch"
    if any(getattr(target, "__module__", "") == "_operator" for target in targets):
        yield "import operator"
    for namespace in sorted({target.namespace for target in targets if hasattr(target, "overloadpacket")}):
        yield f"{namespace} = torch.ops.{namespace}"


def _size_of_batch(graph: TrainingGraph, names: Mapping[fx.Node, str]) -> list[str]:
    inputs = [n for d, n in zip(graph.inputs, graph.placeholders, strict=True) if d.kind == "input"]
    shapes = ((n, n.meta["val"].shape) for n in inputs if isinstance(n.meta.get("val"), Tensor))
    sizes = ((n, dim, size) for n, shape in shapes for dim, size in enumerate(shape))
    return [f"    B = {names[n]}.size({dim})" for n, dim, size in sizes if _size(graph, size) == "B"][:1]


def _line(graph: TrainingGraph, node: fx.Node, names: Mapping[fx.Node, str]) -> str:
    args = [_argument(graph, a, names) for a in node.args]
    args += [f"{k}={_argument(graph, v, names)}" for k, v in node.kwargs.items()]
    if node.op == "get_attr":
        return f"{node.name} = step.{node.target}"
    target = node.target if isinstance(node.target, str) else _target_name(node.target)
    return f'{node.name}: "{_shape(graph, node.meta.get("val"))}" = {target}({", ".join(args)})'


def _size(graph: TrainingGraph, value: Any) -> str:
    """A size in terms of B; "" of other values, such as a number that is read off a tensor."""
    formula = graph.formula(value) if isinstance(value, SymInt) else None
    return "" if formula is None or formula.free_symbols - {BATCH} else str(formula)


def _target_name(target: Any) -> str:
    name = str(getattr(target, "__name__", target))
    if getattr(target, "__module__", "") == "_operator":
        return f"operator.{name}"  # a node may be called as the function is
    if hasattr(target, "overloadpacket"):
        return str(target)
    return f"torch.{name}" if getattr(torch, name, None) is target else name


def _argument(graph: TrainingGraph, value: Any, names: Mapping[fx.Node, str]) -> str:
    if isinstance(value, fx.Node):
        return _size(graph, value.meta.get("val")) or names[value]
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_argument(graph, v, names) for v in value) + "]"
    if isinstance(value, torch.device):
        return f'torch.device("{value}")'
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    return repr(value)


def _shape(graph: TrainingGraph, value: Any) -> str:
    if isinstance(value, Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        return f"{kind}[{', '.join(str(graph.formula(s)) for s in value.shape)}]"
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(_shape(graph, v) for v in pytree.tree_leaves(value)) + ")"
    numbers = {SymInt: "int", SymFloat: "float", SymBool: "bool"}  # of which one that is read off a tensor has no value yet
    return numbers.get(type(value), type(value).__name__) if value is not None else "None"

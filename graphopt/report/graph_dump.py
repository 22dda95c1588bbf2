"""Readable artifacts of an optimised model: the graph of every stage, a diff per pass, a picture, the report.

The same texts go to torch's structured trace, so that TORCH_TRACE and tlparse show them.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import SymInt, Tensor, fx

from graphopt import compat
from graphopt.compat import pytree
from graphopt.graph import TrainingGraph, descendants
from graphopt.planner.plan import Plan
from graphopt.report.picture import block_picture
from graphopt.report.summary import Report

if TYPE_CHECKING:
    from graphopt.frontend.step import RegionStep


def dump(directory: str | Path, graph: TrainingGraph, plan: Plan, report: Report, step: RegionStep | None) -> list[Path]:
    """Write every artifact to `directory`, which is made if need be.

    Args:
        graph: as captured.
        plan: its passes are run again to show the graph after each.
        step: the compiled step, whose forward and backward graphs are added; None before the first call.
    Returns:
        The files written.
    """
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, text in artifacts(graph, plan, report, step):
        path = folder / name
        path.write_text(text, encoding="utf-8")
        compat.trace_artifact(f"graphopt_{name}", text)
        written.append(path)
    return written


def artifacts(graph: TrainingGraph, plan: Plan, report: Report, step: RegionStep | None) -> Iterator[tuple[str, str]]:
    """(file name, text) of every artifact."""
    stage = 0
    before = readable(graph)
    yield f"{stage}_captured.py", before
    current = graph
    for rewrite in plan.passes:
        stage += 1
        current, _ = replace(plan, passes=(rewrite,)).rewrite(current)
        after = readable(current)
        yield f"{stage}_{rewrite.name}.py", after
        yield f"{stage}_{rewrite.name}.diff", unified_diff(before, after, rewrite.name)
        before = after
    size = graph.batch_size if step is None else step.graph.batch_size
    for number, halves in enumerate(() if step is None else step.halves):
        part = f"_{number}" if number else ""  # after a graph break
        for name, half in zip(("forward", "backward"), halves, strict=True):
            yield f"{stage + 1}_{name}{part}.py", _readable_module(half, f"batch {size}")
    yield "blocks.svg", block_picture(graph, current)
    yield "report.json", json.dumps(report.to_dict(), indent=2) + "\n"


def unified_diff(before: str, after: str, name: str) -> str:
    """A unified diff of two readable graphs."""
    lines = difflib.unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), f"before {name}", f"after {name}", n=1
    )
    return "".join(lines)


def readable(graph: TrainingGraph) -> str:
    """The joint graph as Python-like text: one operator a line, with its shape in terms of the batch size `B`."""
    backward = descendants(n for d, n in zip(graph.inputs, graph.placeholders, strict=True) if d.kind == "tangent")
    names = [_input_name(desc) for desc in graph.inputs]
    lines = [f"# joint graph; B is the batch size{'' if graph.symbolic else f' (fixed: {graph.batch_size})'}"]
    lines.append("def step(")
    for node, name in zip(graph.placeholders, names, strict=True):
        lines.append(f"    {node.name}: {_shape(graph, node.meta.get('val'))},  # {name}")
    lines.append("):")
    section = ""
    for node in graph.graph.nodes:
        if node.op in ("placeholder", "output") or isinstance(node.meta.get("val"), SymInt):
            continue  # sizes are printed where they are used
        here = "backward" if node in backward else "forward"
        if here != section:
            section = here
            lines.append(f"    # {here}")
        lines.append(f"    {_line(graph, node)}")
    lines.append("    return (")
    for desc, result in zip(graph.outputs, graph.results, strict=True):
        what = _output_name(desc)
        lines.append(f"        {result.name if isinstance(result, fx.Node) else result},{f'  # {what}' if what else ''}")
    lines.append("    )")
    return "\n".join(lines) + "\n"


def _line(graph: TrainingGraph, node: fx.Node) -> str:
    args = [_argument(graph, a) for a in node.args] + [f"{k}={_argument(graph, v)}" for k, v in node.kwargs.items()]
    target = node.target if isinstance(node.target, str) else _target_name(node.target)
    if node.op == "get_attr":
        return f"{node.name} = self.{target}"
    return f"{node.name}: {_shape(graph, node.meta.get('val'))} = {target}({', '.join(args)})"


def _target_name(target: Any) -> str:
    return str(target) if hasattr(target, "overloadpacket") else getattr(target, "__name__", str(target))


def _argument(graph: TrainingGraph, value: Any) -> str:
    if isinstance(value, fx.Node):
        inner = value.meta.get("val")
        return value.name if isinstance(inner, (Tensor, tuple, list)) or inner is None else str(graph.formula(inner))
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_argument(graph, v) for v in value) + "]"
    return str(value)


def _shape(graph: TrainingGraph, value: Any) -> str:
    if isinstance(value, Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        return f"{kind}[{', '.join(str(graph.formula(s)) for s in value.shape)}]"
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(_shape(graph, v) for v in pytree.tree_leaves(value)) + ")"
    return "int" if value is not None else "None"


def _input_name(desc: compat.InputDesc) -> str:
    if desc.kind == "tangent":
        return f"gradient of {_output_name(desc.target)}"
    return f"{desc.kind} {desc.target}"


def _output_name(desc: compat.OutputDesc) -> str:
    if desc.kind == "gradient":
        return f"gradient of {_input_name(desc.target)}"
    if desc.kind == "mutation":
        return f"new value of {_input_name(desc.target)}"
    return "" if desc.kind == "none" else f"{desc.kind} {desc.target}"


def _readable_module(module: fx.GraphModule, title: str) -> str:
    text = module.print_readable(print_output=False, include_stride=True)
    return f"# as compiled, {title}\n{text}\n"

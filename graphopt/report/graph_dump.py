"""What `opt.dump` writes: the graph of every stage as Python, a diff per pass, provenance, a picture, the report, and an index.

The same texts go to torch's structured trace, so that TORCH_TRACE and tlparse show them.
"""

from __future__ import annotations

import html
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

from torch import fx

from graphopt import compat
from graphopt.compat.aot import ABSENT
from graphopt.graph import TrainingGraph
from graphopt.report.files import json_text, make_folder_of
from graphopt.report.picture import block_picture
from graphopt.report.provenance import SourceLine, lines_of_code
from graphopt.report.python_text import broken, node_names, readable

if TYPE_CHECKING:
    from graphopt.frontend.step import RegionStep
    from graphopt.report.summary import Report

ABOUT = {
    "report.html": "the report: memory over the step, what every budget trains, tensors, techniques",
    "report.json": "the same for machines",
    "report.txt": "the same as print(opt.report)",
    "0_captured.py": "the joint graph of forward and backward as it was captured",
    "provenance.txt": "from every line of the model to its operators, and to what the plan decided on its tensors",
    "blocks.svg": "FLOPs of the model's blocks, before and after the passes",
}


def dump(directory: str | Path, report: Report, step: RegionStep | None) -> list[Path]:
    """Write every artifact to `directory`, which is made if need be.

    Args:
        report: of what was captured, whose passes are run again to show the graph after each.
        step: the compiled step, whose forward and backward graphs are added; None before the first call.
    Returns:
        The files written.
    Raises:
        InputError: nothing can be written there.
    """
    folder = Path(directory)
    make_folder_of(folder / "index.html")
    written = []
    for name, text in artifacts(report, step):
        path = folder / name
        path.write_text(text, encoding="utf-8")
        compat.trace_artifact(f"graphopt_{name}", text)
        written.append(path)
    index = folder / "index.html"
    index.write_text(_index(report.verdict, [path.name for path in written]), encoding="utf-8")
    return [*written, index]


def artifacts(report: Report, step: RegionStep | None) -> Iterator[tuple[str, str]]:
    """(file name, text) of every artifact."""
    assert report.source is not None
    graph, stages = report.source.graph, report.source.stages
    decisions = {row.name: f"{'trained' if row.trained else 'not trained'}: {row.why}" for row in report.tensors}
    yield "0_captured.py", readable(graph, True, decisions)
    for number, stage in enumerate(stages, 1):
        name = re.sub(r"[^\w.-]", "_", stage.report.name)  # of a user's pass, which may hold anything
        yield f"{number}_{name}.py", readable(stage.graph, True, decisions)
        yield f"{number}_{name}.diff", stage.diff
    size = graph.batch_size if step is None else step.graph.batch_size
    known = {} if step is None else {node.name: name for node, name in node_names(step.graph).items() if node.op == "placeholder"}
    for number, halves in enumerate(() if step is None else step.halves):
        part = f"_{number}" if number else ""  # after a graph break
        for name, half in zip(("forward", "backward"), halves, strict=True):
            absent = [node.name for node in half.graph.find_nodes(op="placeholder") if node.meta.get(ABSENT)]  # from the calls
            names = {name: f"absent_gradient_{k}" for k, name in enumerate(absent)} | ({} if number else known)
            yield f"{len(stages) + 1}_{name}{part}.py", _compiled(half, f"batch {size}", names)
    yield "provenance.txt", provenance(graph, report.source.rewritten, decisions)
    yield "blocks.svg", block_picture(graph, report.source.rewritten)
    yield "report.txt", f"{report}\n"
    yield "report.json", json_text(report.to_dict()) + "\n"
    yield "report.html", report.to_html()


def provenance(before: TrainingGraph, after: TrainingGraph, decisions: Mapping[str, str]) -> str:
    """By block and line of the model's code: its operators, forward and backward, and the decisions on the tensors it reads.

    Args:
        before, after: as captured, and as the passes leave it; operators that are gone there are marked with "-".
    """
    kept = {node.name for node in after.graph.nodes}
    parameters = before.parameter_nodes()
    found: dict[tuple[str, SourceLine], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for where, line, node, is_forward in lines_of_code(before):
        entry = found[where, line]
        entry["forward" if is_forward else "backward"].append(node.name if node.name in kept else f"-{node.name}")
        for name in (parameters[n] for n in node.all_input_nodes if n in parameters):
            if name not in entry["tensors"]:
                entry["tensors"].append(name)
    lines, block = ["Operators that the passes have removed are marked with a minus."], ""
    for (where, line), entry in found.items():
        if where != block:
            block = where
            lines += ["", block or "(no module)"]
        lines.append(f"  {line.short_file}:{line.number} in {line.function}: {line.code}")
        for half in ("forward", "backward"):
            if entry[half]:
                lines.append(f"    {half:9} {' '.join(entry[half])}")
        lines.extend(f"    {name}: {decisions.get(name, 'no parameter of the plan')}" for name in entry["tensors"])
    return "\n".join(lines) + "\n"


def _compiled(module: fx.GraphModule, title: str, names: Mapping[str, str]) -> str:
    """A graph that was handed to the backend, as Python; inputs have the names of the joint graph's text."""
    text = module.print_readable(print_output=False, include_stride=True)
    text = re.sub(r"^( *)class <lambda>", r"\1class GraphModule", text, flags=re.MULTILINE)
    text = re.sub(r"\b[a-z]+_\d+\b", lambda found: names.get(found[0], found[0]), text)
    lines = [part for line in text.splitlines() for part in broken(line.rstrip())]
    head = [f"# as compiled, {title}", "import torch", "from torch import device", ""]
    return "\n".join([*head, *lines]).rstrip() + "\n"


def _index(verdict: str, files: list[str]) -> str:
    """The page that links all of them, what people look at first."""
    order = {name: k for k, name in enumerate(ABOUT)}
    rows = "\n".join(
        f'<li><a href="{html.escape(name)}">{html.escape(name)}</a> <span>{html.escape(_about(name))}</span></li>'
        for name in sorted(files, key=lambda name: order.get(name, len(order)))
    )
    folder = resources.files("graphopt.report.html")
    template, style = (folder.joinpath(name).read_text(encoding="utf-8") for name in ("index.html", "page.css"))
    return Template(template).substitute(verdict=html.escape(verdict), style=style, files=rows)


def _about(name: str) -> str:
    stage = name.partition("_")[2].rpartition(".")[0]
    if name.endswith(".diff"):
        return f"what {stage} changed"
    if stage.partition("_")[0] in ("forward", "backward"):
        return f"the {stage.partition('_')[0]} as it was compiled"
    return ABOUT.get(name, f"the joint graph after {stage}")

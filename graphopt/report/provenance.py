"""Where a node comes from: the line of the model's code, by the traces that torch.compile and autograd leave in the graph."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from graphopt.analysis.liveness import module_path
from graphopt.graph import TrainingGraph, ancestors

FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)\n *(.*)')


@dataclass(frozen=True)
class SourceLine:
    """One line of code.

    Attributes:
        file, number: where it is.
        function: that it is in.
        code: the line itself, or the first of several.
    """

    file: str
    number: int
    function: str
    code: str

    def __str__(self) -> str:
        return f"{self.short_file}:{self.number} in {self.function}, code: {self.code}"

    @property
    def short_file(self) -> str:
        """The file below the folder of installed packages; any other as it is."""
        return self.file.rpartition("site-packages/")[2]


def source_line(node: fx.Node) -> SourceLine | None:
    """The innermost line of the model that a node of the forward computes, or of whose backward a node is a part."""
    trace = node.meta.get("stack_trace")
    return _innermost(trace) if isinstance(trace, str) else None


@functools.lru_cache(maxsize=10_000)
def _innermost(trace: str) -> SourceLine | None:
    frames = FRAME.findall(trace)
    if not frames:
        return None
    file, number, function, code = frames[-1]
    return SourceLine(file, int(number), function, code.strip())


def block_name(parameter: str) -> str:
    """`encoder.layer.3.output.dense.weight` belongs to `encoder.layer.3`; without an index, to its module."""
    match = re.match(r"(.*?\.\d+)(\.|$)", parameter)
    return match.group(1) if match else parameter.rpartition(".")[0] or parameter


def lines_of_code(graph: TrainingGraph) -> Iterator[tuple[str, SourceLine, fx.Node, bool]]:
    """(block, line, operator, whether it is one of the forward) of every operator that comes from a line of the model's code."""
    forward = ancestors(graph.forward_results())
    for node in graph.graph.nodes:
        if node.op == "call_function" and (line := source_line(node)) is not None:
            yield block_name(module_path(node) + ".weight"), line, node, node in forward

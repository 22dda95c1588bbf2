"""Where a node comes from: the line of the model's code, by the traces that torch.compile and autograd leave in the graph."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from torch import fx

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

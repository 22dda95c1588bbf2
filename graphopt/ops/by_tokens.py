"""An operator that runs a program on a few tokens after the other, and what such programs call."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import sympy
import torch
from torch import Tensor

from graphopt.ops.library import define

BLOCK_BYTES = 2**22
"""Of the rows that a softmax is computed of at a time, on the CPU: they stay in its cache."""


@dataclass(frozen=True)
class Result:
    """What a program returns for a chunk.

    Attributes:
        kind: "rows" (a row for each token), "sum" (to be added up over chunks) or "product" (two factors, whose product is).
        shape: of a row, or of the sum.
        dtype: such as "float32".
    """

    kind: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Program:
    """What is computed of a chunk of tokens; a graph holds it as text.

    Attributes:
        source: of `forward(self, count, *rows, *whole)`, as `torch.fx` writes it.
        results: what it returns, factors of a product one after the other.
        labels: which of the tensors with a row for each token are the labels.
        ignored: the label of tokens that are left out, whose rows are then zero; None: none is.
    """

    source: str
    results: tuple[Result, ...]
    labels: int
    ignored: int | None

    @property
    def text(self) -> str:
        """For `of`."""
        return json.dumps(asdict(self))

    @staticmethod
    @functools.lru_cache(maxsize=64)
    def of(text: str) -> Program:
        """The program of a text."""
        values = json.loads(text)
        results = tuple(Result(r["kind"], tuple(r["shape"]), r["dtype"]) for r in values["results"])
        return Program(values["source"], results, values["labels"], values["ignored"])


@functools.lru_cache(maxsize=64)
def _compiled(source: str) -> Callable[..., Sequence[Tensor]]:
    names: dict[str, Any] = {
        "torch": torch, "device": torch.device, "inf": math.inf, "nan": math.nan, "NoneType": type(None),
        **{name_in_source(function): function for function in CALLED},
    }  # fmt: skip
    exec(source, names)
    return functools.partial(names["forward"], None)


def name_in_source(function: Callable[..., Any]) -> str:
    """How `torch.fx` writes a function."""
    return f"{function.__module__}.{function.__qualname__}".replace(".", "_")


def by_tokens(program: str, rows: list[Tensor], whole: list[Tensor], chunk: int, flops: int, workspace: int) -> list[Tensor]:
    """Run a program on `chunk` tokens after the other.

    Args:
        program: text of a `Program`.
        rows: tensors with a row for each token.
        whole: tensors that every chunk reads as they are.
        flops: that the program takes per token.
        workspace: bytes that exist while it runs on a chunk, beside arguments and results.
    Returns:
        Its results for all tokens; sums in single precision at least.
    """
    code = Program.of(program)
    run, count, active = _compiled(code.source), rows[0].shape[0], None
    if code.ignored is not None:
        active = (rows[code.labels] != code.ignored).nonzero().flatten()
        count, active = active.shape[0], None if active.shape[0] == count else active
    results = _empty(code, rows[0], rows_too=active is not None)
    for start in range(0, count, chunk):
        size = min(chunk, count - start)
        index: Any = slice(start, start + size) if active is None else active[start : start + size]
        _add(code.results, results, run(size, *_rows_of(rows, index, code.ignored is not None), *whole), index)
    return results


def _rows_of(rows: Sequence[Tensor], index: Any, copied: bool) -> list[Tensor]:
    """The rows of a chunk; the caller holds no name for them, so that one chunk's are gone when the next one's are taken.

    Args:
        copied: a program that may leave tokens out writes in the place of rows, whether this batch has such tokens or not.
    """
    if isinstance(index, slice):
        return [t[index].clone() if copied else t[index] for t in rows]
    return [t.index_select(0, index) for t in rows]


def by_tokens_flops(program: Any, rows: Any, whole: Any, chunk: Any, flops: Any, workspace: Any, **kwargs: Any) -> Any:
    """At most, where every token counts; from the shapes."""
    return flops * rows[0][0]


def by_tokens_workspace(program: str, chunk: int, workspace: int, tokens: sympy.Expr) -> sympy.Expr:
    """Bytes that exist while it runs on so many tokens, beside arguments and results, at most."""
    places = 0 if Program.of(program).ignored is None else torch.int64.itemsize * tokens
    return sympy.Min(chunk, tokens) * workspace / chunk + places


def _add(kinds: Sequence[Result], results: Sequence[Tensor], found: Sequence[Tensor], index: Any) -> None:
    parts = iter(found)
    for kind, total in zip(kinds, results, strict=True):
        part = next(parts)
        if kind.kind == "rows":
            total[index] = part
        elif kind.kind == "sum":
            total.add_(part)
        elif total.dtype == part.dtype:
            torch.addmm(total, part, next(parts), out=total)
        else:
            total.add_(part @ next(parts))


def _empty(code: Program, like: Tensor, rows_too: bool) -> list[Tensor]:
    """Sums, and where rows are left out results with rows, begin with zeros."""
    found = []
    for result in code.results:
        dtype = getattr(torch, result.dtype)
        if result.kind == "rows":
            make = like.new_zeros if rows_too else like.new_empty
            found.append(make((like.shape[0], *result.shape), dtype=dtype))
        else:
            found.append(like.new_zeros(result.shape, dtype=torch.promote_types(dtype, torch.float32)))
    return found


def log_softmax_(logits: Tensor) -> Tensor:
    """Logarithms of a softmax over the last dimension of (N, V), in the place of its argument."""
    size = logits.shape[0] if logits.is_cuda else max(1, BLOCK_BYTES // max(1, logits.shape[1] * logits.element_size()))
    for block in logits.split(size):
        block.copy_(torch.log_softmax(block, -1))
    return logits


def softmax_gradient_(
    log_probabilities: Tensor, gradients: Tensor, labels: Tensor, weight: Tensor | None, ignored: int
) -> Tensor:
    """The gradient of logits (N, V) from those of their tokens' NLL losses (N), in the place of their log-probabilities."""
    counts = labels != ignored
    safe = labels.where(counts, 0)
    scale = gradients if weight is None else gradients * weight[safe]
    scale = scale.where(counts, 0)[:, None].to(log_probabilities.dtype)
    # p - 1, which is what remains of a label that is predicted well: half precision has no such p but 1
    exact = torch.promote_types(log_probabilities.dtype, torch.float32)
    own = log_probabilities.gather(1, safe[:, None]).to(exact).expm1() * scale
    return log_probabilities.exp_().mul_(scale).scatter_(1, safe[:, None], own.to(log_probabilities.dtype))


CALLED = (log_softmax_, softmax_gradient_)
"""What programs call beside torch's operators."""

define(
    "by_tokens(str program, Tensor[] rows, Tensor[] whole, int chunk, int flops, int workspace) -> Tensor[]",
    by_tokens,
    lambda program, rows, *_: _empty(Program.of(program), rows[0], rows_too=False),
)

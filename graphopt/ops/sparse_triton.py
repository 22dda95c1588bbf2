"""`combine_rows` for CUDA, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 256


@triton.jit
def _kernel(  # type: ignore[no-untyped-def]
    table, indices, weights, out, width, row_stride, column_stride, ENTRIES: tl.constexpr, COLUMNS: tl.constexpr
):
    """One row of the result, COLUMNS of its columns; sums in float32 (float64 for float64)."""
    row = tl.program_id(0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < width
    total = tl.zeros((COLUMNS,), dtype=weights.dtype.element_ty)
    for k in range(ENTRIES):
        source = tl.load(indices + row * ENTRIES + k).to(tl.int64)
        weight = tl.load(weights + row * ENTRIES + k)
        values = tl.load(table + source * row_stride + columns * column_stride, mask=inside, other=0.0)
        total += weight * values.to(weights.dtype.element_ty)
    tl.store(out + row.to(tl.int64) * width + columns, total.to(out.dtype.element_ty), mask=inside)


def combine_rows(table: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    """See `graphopt.ops.sparse.combine_rows`; reads `table` in contiguous rows, so that a transposed one is copied."""
    out = table.new_empty(indices.shape[0], table.shape[1])
    if not out.numel():
        return out
    table = table.contiguous()
    accumulator = torch.float64 if table.dtype == torch.float64 else torch.float32
    grid = (indices.shape[0], triton.cdiv(table.shape[1], _COLUMNS))
    _kernel[grid](
        table, indices.contiguous(), weights.to(accumulator).contiguous(), out, table.shape[1],
        table.stride(0), table.stride(1), ENTRIES=indices.shape[1], COLUMNS=_COLUMNS,
    )  # fmt: skip
    return out

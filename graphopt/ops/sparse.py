"""Sums of few rows: the product of a sparse matrix, with equally many entries per row, by a dense one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphopt.ops.library import define

try:
    from graphopt.ops.sparse_triton import combine_rows as _on_cuda
except ImportError:  # Triton is an extra
    _on_cuda = None  # type: ignore[assignment]


def combine_rows(table: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    """out[r] = sum over k of weights[r, k] * table[indices[r, k]].

    Args:
        table: (M, N), in any memory layout; a transposed one is copied.
        indices: (R, E) int32 rows of `table`.
        weights: (R, E) floating point; rounded to the type of `table` on CPUs, to float32 at most by the CUDA kernel.
    Returns:
        (R, N) in the type of `table`; 2 R E N FLOPs.
    """
    if _on_cuda is not None and table.is_cuda:
        return _on_cuda(table, indices, weights)
    if not table.numel() or not indices.numel():
        return table.new_zeros(indices.shape[0], table.shape[1])
    return torch.nn.functional.embedding_bag(
        indices, table.contiguous(), mode="sum", per_sample_weights=weights.to(table.dtype).contiguous()
    )


def combine_rows_flops(table: Any, indices: Any, weights: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> Any:
    """2 R E N from the shapes."""
    return 2 * indices[0] * indices[1] * table[1]


define(
    "combine_rows(Tensor table, Tensor indices, Tensor weights) -> Tensor",
    combine_rows,
    lambda table, indices, weights: table.new_empty(indices.shape[0], table.shape[1]),
)

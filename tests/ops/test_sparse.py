"""Sums of few rows: on the CPU, compiled, and by the Triton kernel in Triton's interpreter and as machine code."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import triton
from hypothesis import given, strategies as st
from torch.utils.flop_counter import FlopCounterMode
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from graphopt.analysis.flop_formulas import ADDED_FORMULAS
from graphopt.ops.sparse import combine_rows

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def operands(m: int, n: int, r: int, e: int, dtype: torch.dtype = torch.float64) -> tuple[Any, Any, Any]:
    generator = torch.Generator().manual_seed(m + n)
    table = torch.randn(m, n, generator=generator, dtype=torch.float64).to(dtype)
    return table, torch.randint(m, (r, e), dtype=torch.int32, generator=generator), torch.randn(r, e, generator=generator)


def dense(table: Any, indices: Any, weights: Any) -> Any:
    return (table.double()[indices.long()] * weights.to(table.dtype).double()[..., None]).sum(1)


@given(st.integers(1, 9), st.integers(0, 9), st.integers(1, 9), st.integers(1, 5), st.booleans())
def test_it_is_the_weighted_sum_of_the_rows(m: int, n: int, r: int, e: int, transposed: bool) -> None:
    table, indices, weights = operands(m, n, r, e)
    given_table = table.t().contiguous().t() if transposed else table
    torch.testing.assert_close(combine_rows(given_table, indices, weights), dense(table, indices, weights))


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_sums_in_every_precision(dtype: torch.dtype) -> None:
    table, indices, weights = operands(8, 33, 5, 4, dtype)
    result = combine_rows(table, indices, weights)
    assert result.dtype == dtype
    torch.testing.assert_close(result.double(), dense(table, indices, weights), rtol=2e-2, atol=2e-2)


def test_the_operator_is_registered_and_its_flops_are_counted() -> None:
    table, indices, weights = operands(6, 7, 5, 3, torch.float32)
    torch.library.opcheck(
        torch.ops.graphopt.combine_rows.default, (table, indices, weights), test_utils=("test_schema", "test_faketensor")
    )
    with FlopCounterMode(display=False, custom_mapping=ADDED_FORMULAS) as counter:
        torch.ops.graphopt.combine_rows(table, indices, weights)
    assert counter.get_total_flops() == 2 * 5 * 3 * 7


_KERNEL = """
import torch
from graphopt.ops.sparse_triton import combine_rows
from tests.ops.test_sparse import DTYPES, dense, operands
for dtype in DTYPES:
    for shape in ((8, 600, 5, 4), (3, 1, 2, 1), (4, 0, 3, 2)):
        table, indices, weights = operands(*shape, dtype)
        for layout in (table, table.t().contiguous().t()):
            result = combine_rows(layout, indices, weights)
            assert result.dtype == dtype
            torch.testing.assert_close(result.double(), dense(table, indices, weights), rtol=2e-2, atol=2e-2)
            if dtype == torch.float64:
                torch.testing.assert_close(result, dense(table, indices, weights.double()))
print("kernel agrees")
"""


def test_the_triton_kernel_agrees_in_tritons_interpreter() -> None:
    """In a process of its own: Triton reads the variable when it is imported."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run([sys.executable, "-c", _KERNEL], env=environment, capture_output=True, text=True, check=False)
    assert "kernel agrees" in run.stdout, run.stderr[-2000:]


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(("table", "weights"), [("fp32", "fp32"), ("bf16", "fp32"), ("fp16", "fp32"), ("fp64", "fp64")])
def test_the_triton_kernel_is_machine_code_for_gpus_that_are_not_here(table: str, weights: str, capability: int) -> None:
    from graphopt.ops.sparse_triton import _kernel

    pointers = {"table": f"*{table}", "indices": "*i32", "weights": f"*{weights}", "out": f"*{table}"}
    sizes = {"width": "i32", "row_stride": "i32", "column_stride": "i32"}
    constants = {"ENTRIES": 4, "COLUMNS": 256}
    source = ASTSource(fn=_kernel, signature={**pointers, **sizes, **dict.fromkeys(constants, "constexpr")}, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    assert f".target sm_{capability}" in compiled.asm["ptx"]
    assert compiled.asm["cubin"].startswith(b"\x7fELF")

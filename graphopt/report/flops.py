"""FLOPs of a step by tensor, as a table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from graphopt.analysis.flops import FlopProfile, TensorFlops


def show_flops(flops: FlopProfile, shown: Sequence[TensorFlops], console: Console, title: str) -> None:
    """Print them.

    Args:
        shown: those of its tensors that are listed.
    """
    table = Table(title=title)
    for column in ("tensor", "shape", "own gradient (t_dw)", "passing it on (t_dy)"):
        table.add_column(column, justify="left" if column == "tensor" else "right", overflow="fold")
    for r in shown:
        shape = "x".join(map(str, r.shape))
        table.add_row(r.name, shape, f"{r.weight_grad_flops / 1e9:,.3f}", f"{r.input_grad_flops / 1e9:,.3f}")
    console.print(table)
    if len(shown) < len(flops.tensors):
        console.print(f"{len(flops.tensors) - len(shown)} more tensors; --top 0 lists all")
    console.print(
        f"forward {flops.forward / 1e9:,.3f}  backward {flops.backward / 1e9:,.3f}  step {flops.step / 1e9:,.3f} GFLOPs"
    )

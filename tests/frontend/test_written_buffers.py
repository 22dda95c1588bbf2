"""Buffers that forward() reads and then writes: what the backward computes again must not find the new numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt

FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda buffer: buffer,
    "view": lambda buffer: buffer.view(1, -1),
    "expanded": lambda buffer: buffer.expand(64, -1),
    "transposed": lambda buffer: buffer.view(-1, 1).t(),
    "detached": lambda buffer: buffer.detach(),
    "part": lambda buffer: torch.cat(buffer.split(16)[::-1]),
}


class Shifted(nn.Module):
    """Adds a buffer within every layer, and halves it at the end."""

    def __init__(self, form: Callable[[Tensor], Tensor], width: int = 32, depth: int = 6) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.down = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.register_buffer("shift", torch.linspace(0.5, 1.5, width))
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = down(nn.functional.gelu(torch.tanh(up(x) + self.form(self.shift))))
        with torch.no_grad():
            self.shift.mul_(0.5)
        return x.square().sum()


def assert_as_in_eager_mode(model: nn.Module, x: Tensor, opt: Any) -> None:
    reference = copy.deepcopy(model)
    for run in (reference, opt):
        run(x).backward()
    torch.testing.assert_close(dict(model.named_buffers()), dict(reference.named_buffers()))
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_segments_that_are_computed_again(form: str) -> None:
    model, x = Shifted(FORMS[form]), torch.randn(64, 32)
    limit = 0.9 * graphopt.analyze(model, (x,), backend="aot_eager").memory.peak_bytes
    opt = graphopt.optimize(model, (x,), graphopt.Budget(memory=int(limit)), passes=["recompute"], backend="aot_eager")
    assert opt.plan.decisions["recompute"]
    assert_as_in_eager_mode(model, x, opt)


def test_what_inductor_computes_again_by_itself() -> None:
    """torch's own partitioner finds the new numbers."""
    model, x = Shifted(FORMS["view"]), torch.randn(16, 32)
    assert_as_in_eager_mode(model, x, graphopt.optimize(model, (x,), passes=[]))

"""Buffers that forward() reads and then writes: what the backward computes again must not find the new numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import graphopt
from graphopt.bench.peak import peak_of

FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda buffer: buffer,
    "view": lambda buffer: buffer.view(1, -1),
    "expanded": lambda buffer: buffer.expand(64, -1),
    "transposed": lambda buffer: buffer.view(-1, 1).t(),
    "detached": lambda buffer: buffer.detach(),
    "part": lambda buffer: torch.cat(buffer.split(16)[::-1]),
}

READS: dict[str, dict[str, Callable[[Tensor], Tensor]]] = {
    "copies": {
        "clone": torch.clone,
        "to itself": lambda buffer: buffer.to(torch.float32, copy=True),
        "padded": lambda buffer: nn.functional.pad(buffer, (0, 0)),
        "of one": lambda buffer: torch.cat([buffer]),
        "view": lambda buffer: buffer.t().clone(memory_format=torch.contiguous_format).t(),
        "expanded": lambda buffer: buffer[:1].clone().expand(4, -1),
    },
    "several results": {
        "max": lambda buffer: buffer.max(0, keepdim=True).values,
        "std_mean": lambda buffer: torch.std_mean(buffer, 1, keepdim=True)[0],
        "sort": lambda buffer: buffer.sort(1).values,
    },
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


def test_the_memory_of_segments_is_predicted() -> None:
    model, x = Shifted(FORMS["view"]), torch.randn(1024, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    limit = 0.9 * graphopt.analyze(model, (x,), backend="aot_eager", optimizer=optimizer).memory.peak_bytes
    budget = graphopt.Budget(memory=int(limit))
    opt = graphopt.optimize(model, (x,), budget, passes=["recompute"], backend="aot_eager", optimizer=optimizer)

    def step() -> None:
        opt(x).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    held = sum(t.nbytes for t in (*model.parameters(), *model.buffers(), x))
    assert peak_of(step, "cpu", held) == pytest.approx(opt.report.plan.predicted["peak_bytes"], rel=0.01)


def test_what_inductor_computes_again_by_itself() -> None:
    """torch's own partitioner finds the new numbers."""
    model, x = Shifted(FORMS["view"]), torch.randn(16, 32)
    assert_as_in_eager_mode(model, x, graphopt.optimize(model, (x,), passes=[]))


class Scaled(nn.Module):
    """Multiplies by what each of `forms` reads of a buffer, and changes the buffer at the end.

    Compiled, the layers may be checkpointed; in eager mode that would read the buffer again, with its new numbers.
    """

    def __init__(self, forms: dict[str, Callable[[Tensor], Tensor]], checkpointed: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({form: nn.Linear(8, 8) for form in forms})
        self.register_buffer("scale", torch.randn(4, 8))
        self.forms, self.checkpointed = forms, checkpointed

    def body(self, x: Tensor) -> Tensor:
        return sum((torch.tanh(self.layers[k](x)) * form(self.scale)).sin() for k, form in self.forms.items())

    def forward(self, x: Tensor) -> Tensor:
        checkpointed = self.checkpointed and torch.compiler.is_compiling()
        x = checkpoint(self.body, x, use_reentrant=False) if checkpointed else self.body(x)
        with torch.no_grad():
            self.scale.mul_(0.9).add_(0.3)
        return x.sum()


@pytest.mark.parametrize("kind", READS)
@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
def test_what_the_backward_reads_of_a_buffer(kind: str, checkpointed: bool) -> None:
    """Inductor removes operators that only copy, so that the backward would read the buffer itself."""
    model, x = Scaled(READS[kind], checkpointed), torch.randn(4, 8)
    opt = graphopt.optimize(model, (x,), passes=[])
    assert_as_in_eager_mode(model, x, opt)
    assert not any("could not be compiled" in note for note in opt.report.notes)

"""Buffers that forward() reads and then writes: what the backward computes again must not find the new numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from graphopt.passes import Recompute
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import graphopt
from graphopt.bench.peak import peak_of
from graphopt.capture import capture
from tests.measure import planned_peak

FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda buffer: buffer,
    "view": lambda buffer: buffer.view(1, -1),
    "expanded": lambda buffer: buffer.expand(64, -1),
    "transposed": lambda buffer: buffer.view(-1, 1).t(),
    "detached": lambda buffer: buffer.detach(),
    "part": lambda buffer: torch.cat(buffer.split(16)[::-1]),
}

READS: dict[str, Callable[[Tensor], Tensor]] = {
    "clone": torch.clone,
    "to itself": lambda buffer: buffer.to(torch.float32, copy=True),
    "padded": lambda buffer: nn.functional.pad(buffer, (0, 0)),
    "of one": lambda buffer: torch.cat([buffer]),
    "view": lambda buffer: buffer.t().clone(memory_format=torch.contiguous_format).t(),
    "expanded": lambda buffer: buffer[:1].clone().expand(4, -1),
    "max": lambda buffer: buffer.max(0, keepdim=True).values,
    "std_mean": lambda buffer: torch.std_mean(buffer, 1, keepdim=True)[0],
    "sort": lambda buffer: buffer.sort(1).values,
}
"""Copies, and operators of several results."""


class Shifted(nn.Module):
    """Adds a buffer within every layer, to each in its form, and halves it at the end."""

    def __init__(self, forms: Sequence[Callable[[Tensor], Tensor]], width: int = 32) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(width, 2 * width) for _ in forms)
        self.down = nn.ModuleList(nn.Linear(2 * width, width) for _ in forms)
        self.register_buffer("shift", torch.linspace(0.5, 1.5, 2 * width))
        self.forms = forms

    def forward(self, x: Tensor) -> Tensor:
        for up, down, form in zip(self.up, self.down, self.forms, strict=True):
            x = down(nn.functional.gelu(torch.tanh(up(x) + form(self.shift))))
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


def test_segments_that_are_computed_again() -> None:
    model, x = Shifted([*FORMS.values()]), torch.randn(64, 32)
    sites = Recompute().applicable(capture(model, (x,), symbolic=False))
    opt = graphopt.optimize(model, (x,), passes=[Recompute(tuple(site.name for site in sites))], backend="aot_eager")
    assert_as_in_eager_mode(model, x, opt)
    ((_, backward),) = opt.last_step.halves
    assert len(backward.graph.find_nodes(op="call_function", target=torch.ops.aten.tanh.default)) == len(FORMS)


def test_the_memory_of_segments_is_predicted() -> None:
    model, x = Shifted([FORMS["view"]] * 6), torch.randn(1024, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    limit = 0.9 * planned_peak(model, (x,), optimizer)
    budget = graphopt.Budget(memory=int(limit))
    opt = graphopt.optimize(model, (x,), budget, passes=["recompute"], backend="aot_eager", optimizer=optimizer)

    def step() -> None:
        opt(x).backward()
        optimizer.step()
        optimizer.zero_grad()

    assert_as_in_eager_mode(model, x, opt)
    optimizer.zero_grad()
    step()
    held = sum(t.nbytes for t in (*model.parameters(), *model.buffers(), x))
    assert peak_of(step, "cpu", held) == pytest.approx(opt.report.plan.predicted["peak_bytes"], rel=0.01)


def test_what_inductor_computes_again_by_itself() -> None:
    """torch's own partitioner finds the new numbers."""
    model, x = Shifted([FORMS["view"]] * 2), torch.randn(16, 32)
    assert_as_in_eager_mode(model, x, graphopt.optimize(model, (x,), passes=[]))


class Scaled(nn.Module):
    """Multiplies by what each of `READS` reads of a buffer of its own, and changes the buffers at the end.

    Compiled, the layers may be checkpointed; in eager mode that would read the buffers again, with their new numbers.
    """

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({form: nn.Linear(8, 8) for form in READS})
        for form in READS:
            self.register_buffer(f"scale {form}", torch.randn(4, 8))
        self.checkpointed = checkpointed

    def body(self, x: Tensor) -> Tensor:
        return sum((torch.tanh(self.layers[k](x)) * form(self.get_buffer(f"scale {k}"))).sin() for k, form in READS.items())

    def forward(self, x: Tensor) -> Tensor:
        checkpointed = self.checkpointed and torch.compiler.is_compiling()
        x = checkpoint(self.body, x, use_reentrant=False) if checkpointed else self.body(x)
        with torch.no_grad():
            for scale in self.buffers():
                scale.mul_(0.9).add_(0.3)
        return x.sum()


@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
def test_what_the_backward_reads_of_a_buffer(checkpointed: bool) -> None:
    """Inductor removes operators that only copy, so that the backward would read the buffer itself."""
    model, x = Scaled(checkpointed), torch.randn(4, 8)
    opt = graphopt.optimize(model, (x,), passes=[])
    assert_as_in_eager_mode(model, x, opt)
    assert not any("could not be compiled" in note for note in opt.report.notes)

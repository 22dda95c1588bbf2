"""Buffers that an operator's own backward writes or reads: as in eager mode, whatever is trained."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from graphopt.passes import GreenTrainer
from torch import Tensor, nn

import graphopt
from graphopt.analysis.step_memory import step_memory


class _Watched(torch.autograd.Function):
    """The identity; counts its backwards in a buffer, and keeps the largest gradient in another."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: Tensor, largest: Tensor) -> Tensor:
        ctx.count, ctx.largest = count, largest
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        with torch.no_grad():
            ctx.count.add_(1)
            ctx.largest.copy_(gradient.abs().amax())
        return gradient, None, None


class Watching(nn.Module):
    """Two layers with the gradient between them watched; the forward writes `count`, too, if it `counts`."""

    def __init__(self, counts: bool = False, logits: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)
        self.counts, self.logits = counts, logits
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        logits = self.second(_Watched.apply(self.first(x), self.count, self.largest))
        if self.counts:
            with torch.no_grad():
                self.count.mul_(2)
        loss = logits.square().mean()
        return (loss, logits) if self.logits else loss


@pytest.mark.parametrize("train", [("first.weight", "second.weight"), ("second.weight",)], ids=["both", "last"])
@pytest.mark.parametrize("model", [Watching(), Watching(counts=True), Watching(logits=True)], ids=["", "counts", "logits"])
def test_what_the_backward_writes_is_written_then(model: Watching, train: tuple[str, ...]) -> None:
    """It was lost where it is computed of gradients, and else written in the forward."""
    model, x = copy.deepcopy(model), torch.randn(3, 4)
    eager = copy.deepcopy(model)
    opt = graphopt.optimize(model, (x,), passes=[GreenTrainer(train=train)], backend="aot_eager")
    for _ in range(2):
        losses = [found[0] if eager.logits else found for found in (opt(x), eager(x))]
        assert_same_buffers(model, eager)
        for loss in losses:
            loss.backward()
        assert_same_buffers(model, eager)
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == (name in train)
        if name in train:
            torch.testing.assert_close(parameter.grad, eager.get_parameter(name).grad)


def assert_same_buffers(model: nn.Module, eager: nn.Module) -> None:
    for (name, ours), theirs in zip(model.named_buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, msg=name)


def test_a_buffer_that_requires_a_gradient_gets_it_where_nothing_before_it_is_trained() -> None:
    class Moved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)
            self.register_buffer("shift", torch.zeros(4, requires_grad=True))

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x + self.shift)
            torch._dynamo.graph_break()
            return self.second(hidden).square().mean()

    model, x = Moved(), torch.randn(3, 4)
    eager = copy.deepcopy(model)
    opt = graphopt.optimize(model, (x,), passes=[GreenTrainer(train=("second.weight",))], backend="aot_eager")
    for run in (opt, eager):
        run(x).backward()
    torch.testing.assert_close(model.shift.grad, eager.shift.grad)
    assert model.first.weight.grad is None


def test_a_step_that_writes_in_its_backward_is_analysed(tmp_path: Path) -> None:
    model, x = Watching(), torch.randn(3, 4)
    opt = graphopt.optimize(model, (x,), budget=0.7, backend="aot_eager", verify=True)
    assert_same_buffers(model, Watching())
    opt(x).backward()
    assert opt.last_step is not None
    assert step_memory(opt.last_step.graph, "aot_eager", None).peak_bytes > 0
    opt.dump(tmp_path)
    assert "aten.copy_.default(largest, " in "".join(file.read_text() for file in tmp_path.glob("*.py"))


def test_such_a_step_is_not_sampled() -> None:
    """Trials would write, and what is written would be of the rows that are drawn."""
    model, x = Watching(), torch.randn(6, 4)
    opt = graphopt.optimize(model, (x,), graphopt.Budget(variance=0.5), backend="aot_eager")
    assert "backward of an operator writes" in opt.plan.not_separable
    assert_same_buffers(model, Watching())

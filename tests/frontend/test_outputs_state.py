"""Outputs beside the loss that are differentiated late, of models whose forward changes what it reads, and state between."""

from __future__ import annotations

import copy
from collections import Counter, deque
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt
from graphopt import Budget
from graphopt.errors import RerunError
from graphopt.frontend.rerun import Rerun
from tests.frontend.stepping import assert_gradients
from tests.frontend.test_outputs import Heads, rows
from tests.measure import peak_and_rest

WIDTH = 5


class Reversed(torch.autograd.Function):
    """The identity, whose gradient is multiplied by minus a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return -ctx.factor * gradients[0], None


class Stateful(nn.Module):
    """A loss, and an output that depends on what forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        self.double()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.body(x))
        return self.head(hidden).square().mean(), self.changed(hidden)

    def changed(self, hidden: Tensor) -> Tensor:
        raise NotImplementedError


class Counted(Stateful):
    """By a number that grows from step to step, and that the backward alone reads."""

    factor = 0.0

    def changed(self, hidden: Tensor) -> Tensor:
        self.factor += 0.25
        return Reversed.apply(hidden, self.factor)


class Averaged(Stateful):
    """A running mean in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH, dtype=torch.float64))
        self.mean: Tensor

    def changed(self, hidden: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(hidden.mean(0), alpha=0.1)
        return hidden * self.mean


class Shifted(nn.Module):
    """Returns what a large buffer shifts beside the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("shift", torch.linspace(0, 1, 1000 * WIDTH).view(1000, WIDTH))
        self.shift: Tensor

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.layer(x) + self.shift.mean(0)
        return hidden.square().mean(), hidden.tanh()


class Dropped(Averaged):
    """The same, with dropout."""

    def changed(self, hidden: Tensor) -> Tensor:
        return super().changed(nn.functional.dropout(hidden, 0.3))


class Followed(Stateful):
    """By a weight that is not trained, and follows another."""

    def __init__(self) -> None:
        super().__init__()
        self.target = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64), requires_grad=False)

    def changed(self, hidden: Tensor) -> Tensor:
        with torch.no_grad():
            self.target.lerp_(self.body.bias, 0.1)
        return hidden * self.target


class Carried(Stateful):
    """A state that is handed on from step to step."""

    state: Tensor | None = None

    def changed(self, hidden: Tensor) -> Tensor:
        before, self.state = self.state, hidden.detach()
        return hidden if before is None else hidden * before


class Queued(Stateful):
    """Containers of the standard library, which nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: deque[int] = deque(maxlen=99)
        self.calls: Counter[str] = Counter()

    def changed(self, hidden: Tensor) -> Tensor:
        self.seen.append(len(self.seen))
        self.calls["all"] += 1
        return hidden * 2


class Normed(Stateful):
    """By the running mean of a batch norm, as it is after the step."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, dtype=torch.float64)

    def changed(self, hidden: Tensor) -> Tensor:
        normed = self.norm(hidden)
        mean = self.norm.running_mean
        assert mean is not None
        return normed * mean.clone()


KINDS: tuple[Callable[[], Stateful], ...] = (Counted, Averaged, Dropped, Followed, Carried, Queued, Normed)


def train(called: Any, module: nn.Module, step: int, late: int) -> None:
    """A step; from step `late` on, the other output is differentiated, too."""
    module.zero_grad()
    torch.manual_seed(step)
    loss, other = called(rows(step))
    (loss + other.pow(3).sum() if step >= late else loss).backward()


@pytest.mark.parametrize("late", [0, 1, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_forward_changes_what_it_reads(kind: Callable[[], Stateful], late: int) -> None:
    model = kind()
    eager = copy.deepcopy(model)
    opt = graphopt.optimize(model, (rows(0),), backend="aot_eager")
    for step in range(8):
        for called, module in ((eager, eager), (opt, model)):
            train(called, module, step, late)
        for (name, mine), theirs in zip(model.named_parameters(), eager.parameters(), strict=True):
            if theirs.grad is None:  # torch.compile has zeros, as soon as all outputs are prepared
                assert mine.grad is None or not mine.grad.any()
            else:
                torch.testing.assert_close(mine.grad, theirs.grad, msg=f"{name} in step {step}")
        torch.testing.assert_close(dict(model.named_buffers()), dict(eager.named_buffers()))
    assert getattr(model, "seen", None) == getattr(eager, "seen", None)
    assert getattr(model, "calls", None) == getattr(eager, "calls", None)
    assert opt.report.notes == []


class Scaled(Stateful):
    """By a number that the training loop sets."""

    factor = 0.5

    def changed(self, hidden: Tensor) -> Tensor:
        return Reversed.apply(hidden, self.factor)


@pytest.mark.parametrize("late", [0, 6])
def test_what_the_loop_sets_between_a_step_and_its_backward(late: int) -> None:
    """Early steps remember what they began with; a later one is refused, and those after it are prepared."""
    model = Scaled()
    eager = copy.deepcopy(model)
    opt = graphopt.optimize(model, (rows(0),), backend="aot_eager")
    for step in range(9):
        for called, module in ((eager, eager), (opt, model)):
            module.zero_grad()
            loss, other = called(rows(step))
            module.factor = 0.1 * step  # type: ignore[assignment]
            with pytest.raises(RerunError) if called is opt and step == late == 6 else nullcontext():
                (loss + other.pow(3).sum() if step >= late else loss).backward()
        if step != 6 or late == 0:
            assert_gradients(model, eager)


@pytest.mark.parametrize("late", [0, 6])
def test_a_step_runs_again_once_for_an_output_and_the_loss(late: int, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[int] = []
    own = Rerun.__call__
    monkeypatch.setattr(Rerun, "__call__", lambda self, *args: (runs.append(1), own(self, *args))[1])
    model = Heads()
    eager = copy.deepcopy(model)
    opt = graphopt.optimize(model, (rows(0),), backend="aot_eager")
    for step in range(9):
        for called, module in ((eager, eager), (opt, model)):
            module.zero_grad()
            out = called(rows(step))
            (out["loss"] + out["logits"].pow(3).sum() if step >= late else out["loss"]).backward()
        assert_gradients(model, eager)
    assert len(runs) == 1
    assert opt.report.compilations <= 3  # the first one, the one that ran again, and sizes


class Judge(nn.Module):
    """A discriminator with its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 8), nn.LeakyReLU(0.2), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        out = self.layers(x)
        return (out - wanted).square().mean(), out


def test_a_model_that_is_frozen_as_a_whole_passes_gradients_on_to_its_inputs() -> None:
    """The generator's step in adversarial training, beside the discriminator's own under a budget."""
    judge, maker = Judge(), nn.Linear(3, WIDTH)
    twin = copy.deepcopy(judge)
    opt = graphopt.optimize(judge, (torch.ones(4, WIDTH), torch.ones(4, 1)), Budget(flops=0.6), backend="aot_eager")
    for step in range(4):
        made = maker(torch.randn(4, 3))
        opt(made.detach(), torch.zeros(4, 1))[0].backward()
        assert {name for name, p in judge.named_parameters() if p.grad is not None} == opt.selected
        judge.zero_grad()
        found = []
        for called, module in ((twin, twin), (opt, judge)):
            module.requires_grad_(False)
            found.append(torch.autograd.grad(called(made, torch.ones(4, 1))[0], maker.weight, retain_graph=True)[0])
            module.requires_grad_(True)
        torch.testing.assert_close(found[1], found[0], msg=f"step {step}")


def test_buffers_that_are_only_read_take_no_memory_in_the_first_backwards() -> None:
    """A step may have to run again as it began; BERT's positions were 1.5 % of a small step's memory."""
    model, x = Shifted(), torch.randn(4096, WIDTH)
    opt = graphopt.optimize(model, (x,), backend="aot_eager")

    def step() -> None:
        opt(x)[0].backward()
        model.zero_grad()

    step()
    assert len({peak_and_rest(step) for _ in range(6)}) == 1


def test_a_buffer_that_was_made_in_inference_mode() -> None:
    with torch.inference_mode():
        model = Shifted()
    model.layer = nn.Linear(WIDTH, WIDTH)
    x = torch.randn(64, WIDTH)
    opt = graphopt.optimize(model, (x,), backend="aot_eager")
    for output in (0, 1, 0):
        found = torch.autograd.grad(opt(x)[output].sum(), list(model.parameters()))
        expected = torch.autograd.grad(model(x)[output].sum(), list(model.parameters()))
        torch.testing.assert_close(found, expected)

"""Gradients that a model's own forward asks for, as adversarial training does: of a tensor that it has require one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.frontend.stepping import assert_steps_as_in_eager
from tests.frontend.test_regions import batch, call


class Adversarial(nn.Module):
    """Trains on inputs that are moved by the sign of their gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))

    def loss(self, x: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(self.layers(x), labels)

    def moved(self, x: Tensor, labels: Tensor) -> Tensor:
        own = x.detach().clone().requires_grad_(True)
        (gradient,) = torch.autograd.grad(self.loss(own, labels), own)
        return x + 0.1 * gradient.sign()

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.moved(x, labels), labels)


class Apart(Adversarial):
    """What requires a gradient and what it is asked of come out of a function that is traced by itself."""

    def moved(self, x: Tensor, labels: Tensor) -> Tensor:
        print(end="")
        loss, own = self.both(x, labels)
        (gradient,) = torch.autograd.grad(loss, own)
        return x + 0.1 * gradient.sign()

    def both(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        own = x.detach().clone().requires_grad_(True)
        return self.loss(own, labels), own


class Elsewhere(Apart):
    """The gradient is asked for where nothing is traced."""

    def moved(self, x: Tensor, labels: Tensor) -> Tensor:
        return x + 0.1 * sign(*self.both(x, labels))


@torch.compiler.disable
def sign(loss: Tensor, own: Tensor) -> Tensor:
    loss.backward(inputs=[own])
    assert own.grad is not None
    return own.grad.sign()


@pytest.mark.parametrize("kind", [Adversarial, Apart, Elsewhere])
@pytest.mark.parametrize("budget", [None, 0.7])
def test_steps_are_those_of_eager_mode(kind: type[Adversarial], budget: float | None) -> None:
    opt = assert_steps_as_in_eager(kind(), batch(9), call, budget)
    assert budget is None or opt.report.flops_ratio <= budget

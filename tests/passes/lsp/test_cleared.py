"""Compressed gradients and the model's own `zero_grad`, which knows of none; and the first gradient of every weight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graphopt.passes import Lsp
from torch import Tensor, nn

import graphopt


class Stack(nn.Module):
    def __init__(self, bias: bool = True, unused: bool = False) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 64, bias=bias), nn.Linear(64, 64, bias=bias)
        if unused:
            self.norm = nn.LayerNorm(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x))).square().mean()


def made(lr: float = 0.0, **options: Any) -> tuple[Stack, Tensor, Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model, x = Stack(**options), torch.randn(32, 64)
    opt = graphopt.optimize(model, (x,), passes=[Lsp(subspace=16, nonzeros=4)], backend="aot_eager")
    return model, x, opt, opt.make_optimizer(torch.optim.AdamW, lr=lr)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("options", [{}, {"bias": False}, {"bias": False, "unused": True}])
def test_the_models_own_zero_grad_clears_them(options: dict[str, Any], set_to_none: bool) -> None:
    model, x, opt, optimizer = made(**options)
    variable, found = opt.states["lsp"].weights["a.weight"].variable, []
    for _ in range(3):
        for _ in range(2):  # gathered within a step
            opt(x).backward()
        found.append(variable.grad.clone())
        optimizer.step()
        model.zero_grad(set_to_none)
    opt(x).backward()
    for gradient in found:
        torch.testing.assert_close(gradient, 2 * variable.grad)


def test_another_optimizer_that_steps_more_often_clears_none() -> None:
    model, x = Stack(), torch.randn(32, 64)
    opt = graphopt.optimize(model, (x,), passes=[Lsp(subspace=16, nonzeros=4)], backend="aot_eager")
    own = opt.make_optimizer(torch.optim.AdamW, [model.a.weight, model.b.weight], lr=0.0)
    other = torch.optim.AdamW([model.a.bias, model.b.bias], lr=0.0)
    variable = opt.states["lsp"].weights["a.weight"].variable
    opt(x).backward()
    once = variable.grad.clone()
    for _ in range(2):
        other.step()
        other.zero_grad()
        opt(x).backward()
    torch.testing.assert_close(variable.grad, 3 * once)
    own.step()


@pytest.mark.parametrize("schedule", ["sequential", "layerwise"])
def test_the_first_gradient_of_every_weight_takes_the_place_of_its_random_projectors(schedule: str) -> None:
    model, x = Stack(), torch.randn(32, 64)
    rewrite = Lsp(subspace=16, nonzeros=4, schedule=schedule)
    opt = graphopt.optimize(model, (x,), passes=[rewrite], backend="aot_eager")
    optimizer = opt.make_optimizer(torch.optim.AdamW, lr=1e-3)
    weights = opt.states["lsp"].weights.values()
    drawn = [w.subspace for w in weights]
    opt(x).backward()
    fitted = [w.subspace for w in weights]
    optimizer.step()  # what was learned too late comes into force here
    assert all(w.subspace is own is not before for w, own, before in zip(weights, fitted, drawn, strict=True))


def test_so_it_does_after_a_step_that_a_scaler_leaves_out() -> None:
    _, x, opt, optimizer = made(lr=1e-3)
    weights = opt.states["lsp"].weights.values()
    drawn = [w.subspace for w in weights]
    opt(x * torch.inf).backward()
    optimizer.zero_grad()
    opt(x).backward()
    assert all(w.subspace is not before and w.next is None for w, before in zip(weights, drawn, strict=True))

"""What is told of a step that takes more of the FLOPs than its budget allows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import graphopt
from graphopt import PassError


def perceptron() -> tuple[graphopt.OptimizedModule, nn.Module, Tensor]:
    """A model at 0.6 of its FLOPs, and a batch."""
    torch.manual_seed(0)
    layers = (nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    model, x = nn.Sequential(*layers), torch.randn(4, 8)
    opt = graphopt.optimize(model, (x,), 0.6, loss=lambda y: y.square().mean(), backend="aot_eager")
    opt(x).square().mean().backward()
    return opt, model, x


def test_nothing_where_tensors_are_frozen_that_were_not_trained() -> None:
    opt, model, x = perceptron()
    assert "0.weight" not in opt.selected
    flops = opt.report.step_flops
    model[0].requires_grad_(False)  # full training takes less now, the step the same
    opt(x).square().mean().backward()
    assert opt.last_step is not None
    assert opt.last_step.reports[-1].step_flops_after == flops
    assert not opt.report.notes


def test_of_gradients_of_inputs_that_the_example_did_not_require() -> None:
    opt, _, x = perceptron()
    for _ in range(2):
        opt(x.clone().requires_grad_()).square().mean().backward()
    (note,) = opt.report.notes
    assert "over flops=0.6: gradients of inputs are computed as well" in note


def test_where_all_that_is_trained_is_frozen_the_error_names_what_helps() -> None:
    opt, model, x = perceptron()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in opt.selected)
    with pytest.raises(PassError, match=r"call reselect\(batch\).*with a larger one"):
        opt(x)
    assert not opt.reselect((x,)).changed
    larger = graphopt.optimize(model, (x,), 1.0, loss=lambda y: y.square().mean(), backend="aot_eager")
    larger(x).square().mean().backward()
    assert model[0].weight.grad is not None


class FourLosses(nn.Module):
    """A head and a loss after every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.heads = nn.ModuleList(nn.Linear(16, 5) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> list[Tensor]:
        losses = []
        for layer, head in zip(self.layers, self.heads, strict=True):
            x = torch.relu(layer(x))
            losses.append(nn.functional.cross_entropy(head(x), y))
        return losses


def test_nothing_of_a_first_output_where_the_loss_that_was_planned_for_reads_more() -> None:
    torch.manual_seed(0)
    batch = torch.randn(8, 16), torch.arange(8) % 5
    opt = graphopt.optimize(FourLosses(), batch, 0.7, loss=lambda losses: sum(losses), backend="aot_eager")
    for _ in range(3):
        sum(opt(*batch)).backward()
    assert not opt.report.notes
    assert 0.6 < opt.report.flops_ratio <= 0.7

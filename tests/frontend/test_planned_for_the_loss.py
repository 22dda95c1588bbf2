"""A plan counts the gradients of the loss, not those of outputs beside it that only their differentiation would need."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import graphopt
from tests.messages import warnings_of

OTHERS = {"other.0.weight", "other.0.bias", "other.2.weight", "other.2.bias"}


class Heads(nn.Module):
    """A loss, and an output of layers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.ReLU())))
        self.head = nn.Linear(16, 3)
        self.other = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.trunk(x)
        return nn.functional.cross_entropy(self.head(hidden), labels), self.other(hidden)


def heads() -> tuple[Heads, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return Heads(), (torch.randn(8, 16), torch.randint(0, 3, (8,)))


def both(outputs: Any) -> Tensor:
    return outputs[0] + outputs[1].square().mean()


def test_what_a_plan_counts_is_a_step_of_the_loss() -> None:
    model, batch = heads()
    with FlopCounterMode(display=False) as counter:
        model(*batch)[0].backward()
    assert graphopt.analyze(model, batch).flops.step == counter.get_total_flops()
    with warnings_of() as warned:
        opt = graphopt.optimize(model, batch, 0.85, backend="aot_eager")
        model.zero_grad()
        opt(*batch)[0].backward()
    assert not warned
    assert opt.report.full_step_flops == counter.get_total_flops()
    assert opt.report.flops_ratio <= 0.85
    assert opt.selected == {name for name, p in model.named_parameters() if p.grad is not None}
    assert {row.name for row in opt.report.tensors if row.status == "unused"} == OTHERS


@pytest.mark.parametrize("budget", [None, 0.85])
def test_an_output_that_is_differentiated_all_the_same_has_its_gradients(budget: float | None) -> None:
    model, batch = heads()
    opt = graphopt.optimize(model, batch, budget, backend="aot_eager")
    with warnings_of() as warned:
        for _ in range(3):
            model.zero_grad()
            both(opt(*batch)).backward()
    assert [text for text in warned if "loss= where more than the model's first output" in text] == warned[: budget is not None]
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == OTHERS | opt.selected
    model.zero_grad()
    both(model(*batch)).backward()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, model.get_parameter(name).grad)


def test_a_loss_of_its_own_is_planned_for_all_outputs() -> None:
    model, batch = heads()
    opt = graphopt.optimize(model, batch, 0.85, backend="aot_eager", loss=both)
    with FlopCounterMode(display=False) as counter:
        both(model(*batch)).backward()
    assert opt.report.full_step_flops == counter.get_total_flops()
    assert not any(row.status == "unused" for row in opt.report.tensors)


def test_a_budget_below_the_forward_of_all_outputs_names_what_leaves_them_out() -> None:
    model, batch = heads()
    with pytest.raises(graphopt.BudgetError, match="below the forward pass alone .* outputs='loss' leaves out what only other"):
        graphopt.optimize(model, batch, 0.5, backend="aot_eager")
    graphopt.optimize(model, batch, 0.5, backend="aot_eager", outputs="loss")

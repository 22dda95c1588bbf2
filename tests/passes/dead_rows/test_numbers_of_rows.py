"""Numbers of rows, and labels, that models compute in less usual ways."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

import graphopt
from tests.passes.dead_rows.test_labels import LanguageModel, prompts
from tests.passes.dead_rows.test_technique import WIDTH, OfEach, last_kept, padded


def assert_as_eager(model: nn.Module, inputs: tuple[Tensor, ...]) -> graphopt.OptimizedModule:
    """Trained with eager mode's gradients; returns the optimised copy."""
    opt = graphopt.optimize(copy.deepcopy(model), inputs, backend="aot_eager", outputs="loss")
    for run in (model, opt):
        run(*inputs).backward()
    for parameter, other in zip(model.parameters(), opt.parameters(), strict=True):
        torch.testing.assert_close(other.grad, parameter.grad)
    return opt


def test_a_constant_of_forward_among_the_numbers() -> None:
    model = OfEach(lambda mask, hidden: last_kept(mask, hidden) * torch.tensor(1), blocks=1)
    assert assert_as_eager(model, padded()).report.sections["dead_rows"]["rows"]


class AndOfTheWhole(LanguageModel):
    """With a loss of each sample beside that of its tokens, as models that are trained for both have it."""

    def __init__(self) -> None:
        super().__init__()
        self.classes = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, labels: Tensor, kind: Tensor) -> Any:
        return super().forward(x, labels) + nn.functional.cross_entropy(self.classes(x.mean(1)), kind)


def test_a_loss_of_whole_samples_beside_that_of_tokens() -> None:
    inputs = *prompts(rows=24), torch.tensor([0, 1, 2])
    assert assert_as_eager(AndOfTheWhole(), inputs).report.sections["dead_rows"]["rows"]

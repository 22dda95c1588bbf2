"""Logits to which something of one row is added or multiplied, viewed by samples, and cut."""

from __future__ import annotations

import copy

import pytest
import torch
from graphopt.passes import LinearCrossEntropy
from torch import Tensor, nn

import graphopt


class Shifted(nn.Module):
    def __init__(self, vocabulary: int = 40) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocabulary, 16), nn.Linear(16, vocabulary, bias=False)
        self.bias = nn.Parameter(torch.randn(1, vocabulary))

    def forward(self, x: Tensor) -> Tensor:
        logits = self.head(self.embedding(x).flatten(0, 1)) + self.bias
        logits = logits.unflatten(0, x.shape)[:, :-1]
        return nn.functional.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten())


@pytest.mark.parametrize("shape", [(4, 8), (1, 5), (1, 2), (2, 2)])
def test_a_bias_of_one_row(shape: tuple[int, int]) -> None:
    model, x = Shifted().double(), torch.randint(0, 40, shape)
    reference = copy.deepcopy(model)
    opt = graphopt.optimize(model, (x,), passes=[LinearCrossEntropy(3)], backend="aot_eager")
    loss, expected = opt(x), reference(x)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected)
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    if shape[1] > 2:
        assert opt.last_step is not None
        assert opt.last_step.reports[0].changes.changed == ("head.weight",)

"""Gradients of complex numbers, and batches that a layer averages over."""

from __future__ import annotations

import pytest
import torch
from graphopt.passes import Vcas
from torch import Tensor, nn

import graphopt
from graphopt.calls import as_call
from graphopt.capture import capture_to_run
from graphopt.testing import check_pass
from tests.messages import warnings_of


class Turned(nn.Module):
    """A product of complex numbers; of every second sample the loss reads the imaginary part alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.turn = nn.Parameter(0.2 * torch.randn(16, 16, dtype=torch.complex128))

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x)).to(self.turn.dtype) @ self.turn
        return torch.tanh(hidden.real * real + hidden.imag * (1 - real)).square().sum(1).mean()


class Centred(nn.Module):
    """Reads the mean over the batch below its last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        hidden = torch.tanh(self.second(hidden + hidden.mean(0)))
        return self.third(hidden).square().mean()


@pytest.mark.parametrize("ratios", [{"keep_rows": 0.5}, {"keep_tokens": 0.5}], ids=str)
def test_imaginary_gradients_count_as_much_as_real_ones(ratios: dict[str, float]) -> None:
    model, rewrite = Turned().double(), Vcas(**ratios)
    inputs = torch.randn(8, 8, dtype=torch.float64), (torch.arange(8) % 2).double()[:, None]
    chosen = rewrite.ratios(capture_to_run(model, *as_call(inputs)))
    assert chosen
    check_pass(rewrite, model, inputs, chosen, dtypes=[torch.float64])


def test_a_mean_over_the_batch_is_sampled() -> None:
    """torch.compile hands the batch's size to such a graph as a number."""
    x = torch.randn(8, 8)
    with warnings_of() as texts:
        opt = graphopt.optimize(Centred(), (x,), passes=[Vcas(keep_rows=0.5)], backend="aot_eager")
        opt(x).backward()
    assert texts == []
    assert opt.last_step is not None
    assert opt.last_step.sampled_part < 1

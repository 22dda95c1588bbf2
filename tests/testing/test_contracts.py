"""The harness on models that its usual ones are not like."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graphopt.passes import GreenTrainer
from torch import Tensor, nn

from graphopt import PassError
from graphopt.graph import TrainingGraph
from graphopt.testing import check_pass

aten = torch.ops.aten


class Complex(nn.Module):
    """A complex weight, buffer and output."""

    turn: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 5, dtype=torch.complex64))
        self.register_buffer("turn", torch.tensor(1j))

    def forward(self, x: Tensor) -> Tensor:
        return torch.mm(x * self.turn, self.weight)


class Conjugated(GreenTrainer):
    """A fault: the imaginary part of every gradient has the wrong sign."""

    def apply(self, graph: TrainingGraph, decisions: Any) -> Any:
        changes = super().apply(graph, decisions)
        for gradient in graph.gradients().values():
            with graph.graph.inserting_after(gradient):
                wrong = graph.graph.call_function(aten._conj_physical.default, (gradient,))
            wrong.meta = dict(gradient.meta)
            graph.graph.output_node().replace_input_with(gradient, wrong)
        graph.module.recompile()
        return changes


def test_complex_models_stay_complex() -> None:
    model, x = Complex(), torch.randn(4, 6, dtype=torch.complex64)
    checks = check_pass(GreenTrainer(), model, (x,), {"weight"})
    assert [check.graph.parameters[0].dtype for check in checks] == [torch.complex128, torch.complex64]
    assert model.weight.dtype == torch.complex64
    with pytest.raises(PassError, match="the gradient of weight differs from eager's"):
        check_pass(Conjugated(), model, (x,), {"weight"})

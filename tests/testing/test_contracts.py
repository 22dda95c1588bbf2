"""The harness on models that its usual ones are not like."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graphopt.passes import GreenTrainer
from graphopt.passes.base import Preserves
from torch import Tensor, nn

from graphopt import InputError, PassError
from graphopt.graph import TrainingGraph
from graphopt.testing import check_pass, check_passes
from tests import zoo
from tests.frontend.test_values import Scaled

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


def test_a_mean_over_one_draw_says_nothing() -> None:
    """Its standard error is not a number, within which everything was."""
    with pytest.raises(InputError, match="draws=1"):
        check_passes([(GreenTrainer(), {"weight"})], Complex(), (torch.randn(4, 6, dtype=torch.complex64),), draws=1)


def test_a_pass_that_supplies_what_it_adds_is_checked_with_that() -> None:
    model, inputs = zoo.make("mlp", 4)
    own = Scaled()
    check_pass(own, model, inputs, {"first.weight"})
    assert own.sums.keys() == {"sum of first.weight", "noise"}
    own.factor = 3.0
    with pytest.raises(PassError, match=r"scaled: the gradient of first\.weight differs"):
        check_pass(own, model, inputs, {"first.weight"})


def test_a_pass_that_does_not_say_what_it_adds_is_refused() -> None:
    class Nameless:
        name, preserves, serves = "nameless", Preserves.EXACT, ()
        applicable, apply = Scaled.applicable, Scaled.apply

    model, inputs = zoo.make("mlp", 4)
    with pytest.raises(PassError, match="no pass says what the added input or result 'factor' is"):
        check_pass(Nameless(), model, inputs, {"first.weight"})


def test_inductor_is_refused() -> None:
    with pytest.raises(InputError, match="checked operator by operator"):
        check_pass(GreenTrainer(), nn.Linear(2, 2), (torch.ones(2, 2),), backend="inductor")

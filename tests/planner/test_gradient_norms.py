"""Norms of one batch's gradients, measured without a trace."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from graphopt import ImportanceError
from graphopt.calls import as_call
from graphopt.planner.gradient_norms import gradient_norms
from graphopt.planner.importance import Importance, measure_importance
from tests import zoo
from tests.long_forms import long


@pytest.mark.parametrize("name", ["mlp", "cnn", "bert", *long("llama")])
def test_norms_are_those_of_eager_training(name: str) -> None:
    model, inputs = zoo.make(name, 4)
    twin = copy.deepcopy(model)
    zoo.loss_of(zoo.call(twin, inputs)).backward()
    expected = {n: float(p.grad.norm()) for n, p in twin.named_parameters() if p.grad is not None}
    found = gradient_norms(model, *as_call(inputs), list(expected))
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-7)
    some = list(expected)[-3:]
    assert gradient_norms(model, *as_call(inputs), some) == pytest.approx({n: expected[n] for n in some}, rel=1e-4, abs=1e-7)


class Careless(nn.Module):
    """A forward that leaves traces wherever it can, and draws from every random stream."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.head = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)
        self.unused = nn.Linear(2, 2)
        self.calls, self.seen = 0, []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(float(x.sum()))
        x.add_(random.random() + numpy.random.rand())
        hidden = nn.functional.dropout(self.norm(self.layer(x)), 0.5)
        return torch.as_tensor(self.head(hidden).square().mean())


@pytest.mark.parametrize("measure", [gradient_norms, measure_importance])
def test_no_trace_is_left(measure: Callable[..., Any]) -> None:
    model, x, calls = Careless(), torch.randn(6, 4), []
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
        parameter.register_hook(lambda gradient: calls.append(gradient))

    def everything() -> Any:
        draws = (torch.get_rng_state(), random.getstate(), str(numpy.random.get_state()))
        tensors = [*model.state_dict().values(), *(p.grad for p in model.parameters()), x]
        versions = [p._version for p in model.parameters()]
        return copy.deepcopy((tensors, draws, versions, model.calls, model.seen))

    before = everything()
    found = measure(model, (x,), {}, [n for n, _ in model.named_parameters()])
    tensors, (stream, *others), *rest = everything()
    assert all(map(torch.equal, tensors, before[0]))
    assert torch.equal(stream, before[1][0])
    assert others == list(before[1][1:])
    assert rest == list(before[2:])
    assert not calls
    norms = found.values if isinstance(found, Importance) else found
    assert norms["unused.weight"] == 0.0 < norms["layer.weight"]


def test_a_batch_whose_gradient_is_not_finite_is_refused() -> None:
    with pytest.raises(ImportanceError, match="gradient of .* is NaN or infinite"):
        gradient_norms(Careless(), (torch.full((6, 4), math.nan),), {}, ["layer.weight"])


class BackwardInBackward(torch.autograd.Function):
    """As checkpointing by hand does it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Linear) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        return torch.as_tensor(layer(x))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            ctx.layer(x).backward(gradient)
        return x.grad, None


def test_a_gradient_that_comes_in_parts_is_refused() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            inner = BackwardInBackward.apply(self.layer(x), self.layer)  # type: ignore[no-untyped-call]
            return torch.as_tensor(inner.square().mean())

    with pytest.raises(ImportanceError, match="the gradient of layer.* is accumulated in parts"):
        gradient_norms(Twice(), (torch.randn(6, 4),), {}, ["layer.weight", "layer.bias"])


def test_a_model_without_a_loss_needs_one() -> None:
    model, x = nn.Linear(3, 2), torch.ones(4, 3)
    with pytest.raises(ImportanceError, match="pass loss="):
        gradient_norms(model, (x,), {}, ["weight"])
    found = gradient_norms(model, (x,), {}, ["bias"], lambda output: output.sum())
    assert found["bias"] == pytest.approx(math.sqrt(2) * 4)


def test_a_model_that_cannot_be_copied_is_refused() -> None:
    model = Careless()
    model.seen = (x for x in ())  # type: ignore[assignment]
    with pytest.raises(ImportanceError, match="cannot be copied"):
        gradient_norms(model, (torch.ones(6, 4),), {}, ["layer.weight"])


def test_the_gradient_of_a_sparse_embedding_counts_once_per_row() -> None:
    norms = []
    for sparse in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(5, 3, sparse=sparse), nn.Linear(3, 1))
        found = gradient_norms(model, (torch.tensor([1, 1, 4]),), {}, ["0.weight"], lambda output: output.sum())
        norms.append(found["0.weight"])
    assert norms[1] == pytest.approx(norms[0])

"""Which models share a trace, and which do not."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from graphopt.calls import as_call, flatten_call
from graphopt.capture import capture
from tests import shared_captures, zoo
from tests.long_forms import long


def traces(models: list[tuple[nn.Module, Any]]) -> int:
    """How many traces it takes to capture all of them."""
    with (
        mock.patch("tests.shared_captures._trace", side_effect=shared_captures._trace) as trace,
        mock.patch("tests.shared_captures._known", type(shared_captures._known)()),
        mock.patch("graphopt.capture._trace", shared_captures._shared_trace),
    ):
        for model, inputs in models:
            capture(model, *as_call(inputs))
        return int(trace.call_count)


@pytest.mark.parametrize("name", ["mlp", "lora", *long("bert")])
def test_equal_models_share_a_trace_whatever_their_weights(name: str) -> None:
    (first, inputs), (second, others) = zoo.make(name), zoo.make(name)
    with torch.no_grad():
        for p in second.parameters():
            p += 1
    assert traces([(first, inputs), (second, others)]) == 1


def frozen(model: nn.Module) -> None:
    next(model.parameters()).requires_grad_(False)


def tied(model: nn.Module) -> None:
    model.third.bias = model.first.bias = nn.Parameter(torch.zeros(8))
    model.third.weight = nn.Parameter(torch.zeros(8, 8))


def on_one_storage(model: nn.Module) -> None:
    tied(model)
    model.third.bias = nn.Parameter(model.first.bias.detach())


def with_a_forward_of_its_own(model: nn.Module) -> None:
    model.forward = types.MethodType(lambda self, x, labels: type(self).forward(self, 2 * x, labels), model)


def in_eval_mode(model: nn.Module) -> None:
    model.second.eval()


def with_a_hook(model: nn.Module) -> None:
    model.second.register_forward_hook(lambda module, args, output: 2 * output)


@pytest.mark.parametrize("change", [frozen, tied, on_one_storage, with_a_forward_of_its_own, in_eval_mode, with_a_hook])
def test_models_that_differ_do_not(change: Callable[[nn.Module], None]) -> None:
    models = [zoo.make("mlp") for _ in range(2)]
    change(models[1][0])
    assert traces(models) == 2


def test_one_tensor_and_two_on_one_storage_differ() -> None:
    models = [zoo.make("mlp") for _ in range(2)]
    tied(models[0][0])
    on_one_storage(models[1][0])
    assert traces(models) == 2


@pytest.mark.parametrize(("change", "count"), [(None, 1), (frozen, 2), (tied, 2)])
def test_models_without_memory_are_compared_as_others_are(change: Callable[[nn.Module], None] | None, count: int) -> None:
    with torch.device("meta"):
        models = [zoo.make("mlp") for _ in range(2)]
        if change is not None:
            change(models[1][0])
    assert traces(models) == count
    assert traces([models[0], zoo.make("mlp")]) == 2


OFFSET = [0.0]
"""Data of the module, which a test's model reads."""


def local(factor: float, offset: float = 0.0) -> tuple[nn.Module, Any]:
    """A model of a class of a test's own, with a function."""

    class Local(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.then = nn.Linear(3, 3), lambda x: factor * x

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.then(self.layer(x)).sum() + OFFSET[0]

    OFFSET[0] = offset
    return Local(), (torch.randn(4, 3),)


def test_classes_and_functions_of_a_test_are_compared_by_what_they_hold() -> None:
    same, other = [local(2.0), local(2.0)], [local(2.0), local(3.0)]
    assert traces(same) == 1
    assert traces(other) == 2


def test_data_that_a_function_reads_is_compared() -> None:
    def captured(offset: float) -> str | None:
        model, inputs = local(2.0, offset)
        return shared_captures._fingerprint(model, (flatten_call(*as_call(inputs)), list(inputs), 0))

    assert captured(0.0) == captured(0.0)
    assert captured(0.0) != captured(1.0)

"""Steps of a diverted model: how many compilations numbers and lengths that vary cost."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

import graphopt
from graphopt.integrations.diverted import Diverted
from graphopt.integrations.training_steps import TrainingSteps


def steps_of(model: nn.Module) -> TrainingSteps:
    diverted = Diverted.of(model)

    def make(_: TrainingSteps, batch: Any) -> Any:
        return graphopt.optimize(model, batch, backend="aot_eager")

    steps = TrainingSteps(diverted, make, None, None)
    diverted.run = steps
    return steps


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, divisor: float = 1.0) -> Tensor:
        mask = attention_mask.unsqueeze(-1)
        pooled = (self.embed(input_ids) * mask).sum(1) / mask.sum(1)
        return self.head(pooled).square().sum() / divisor


def ids(length: int) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(3, 50, (4, length)), "attention_mask": torch.ones(4, length, dtype=torch.int64)}


def assert_steps_as_in_eager(model: nn.Module, steps: TrainingSteps, *batches: dict[str, Any]) -> None:
    reference = copy.deepcopy(model)
    for batch in batches:
        loss, expected = model(**batch), reference(**batch)
        assert loss.dtype == expected.dtype
        torch.testing.assert_close(loss, expected)
        for module, value in ((model, loss), (reference, expected)):
            module.zero_grad()
            value.backward()
        torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in reference.parameters()])
    assert steps.opt is not None
    assert steps.opt.counters.captures == 1
    assert steps.savings.original == 0


def test_a_number_that_varies_is_compiled_as_a_constant_and_then_once_more(warnings: list[str]) -> None:
    model = Pooled()
    steps = steps_of(model)
    assert_steps_as_in_eager(model, steps, *({**ids(6), "divisor": divisor} for divisor in (2, 3, 4, 5, 0.5, 0.25)))
    assert steps.opt is not None
    assert steps.opt.counters.compilations <= 3  # the constant, integers, floating-point numbers
    assert warnings == []


def test_many_lengths_are_compiled_at_most_twice(warnings: list[str]) -> None:
    model = Pooled()
    steps = steps_of(model)
    assert_steps_as_in_eager(model, steps, *map(ids, (4, 5, 6, 7, 8, 4, 7, 9, 10, 11, 12)))
    assert steps.opt is not None
    assert steps.opt.counters.compilations <= 2
    assert warnings == []

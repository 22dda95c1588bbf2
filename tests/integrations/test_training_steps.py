"""Steps of a diverted model: how many compilations numbers and lengths that vary cost."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt
from graphopt.distributed.ranks import Ranks
from graphopt.errors import RankError
from graphopt.integrations import trainer
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


def test_a_number_that_varies_is_as_exact_as_the_weights() -> None:
    model, exact = Pooled(), Pooled().double()
    exact.load_state_dict(model.state_dict())
    batch = ids(6)
    for of in (exact, model):
        steps, reference = steps_of(of), copy.deepcopy(of)
        for divisor in (0.3, 0.7, 0.1):
            loss, expected = of(**batch, divisor=divisor), reference(**batch, divisor=divisor)
            assert loss.dtype == expected.dtype
            torch.testing.assert_close(loss, expected, rtol=1e-14 if of is exact else None, atol=0 if of is exact else None)
        assert steps.savings.original == 0


def test_many_lengths_are_compiled_at_most_twice(warnings: list[str]) -> None:
    model = Pooled()
    steps = steps_of(model)
    assert_steps_as_in_eager(model, steps, *map(ids, (4, 5, 6, 7, 8, 4, 7, 9, 10, 11, 12)))
    assert steps.opt is not None
    assert steps.opt.counters.compilations <= 2
    assert warnings == []


class Missing(Ranks):
    """Another rank does not come."""

    def together(self, make: Any, what: str) -> Any:
        raise RankError(f"rank 1 did not come to {what}")


def missing(*args: Any, **options: Any) -> Any:
    raise RankError("rank 1 did not come")


def test_a_rank_that_is_missing_ends_the_first_step_and_adapting(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Pooled()
    steps = TrainingSteps(Diverted.of(model), missing, None, None)
    with pytest.raises(RankError):
        steps(model.forward, (), ids(4))
    steps = steps_of(model)
    model(**ids(4))
    monkeypatch.setattr(steps.opt, "recheck_merges", missing)
    steps.merges_due.every = 1
    with pytest.raises(RankError):
        steps.after_step()
    steps.opt.load_state = missing
    with pytest.raises(RankError):
        trainer._resume(steps.opt, Path("state"), steps)


@pytest.mark.parametrize("budget", [None, 0.7])
def test_a_rank_that_is_missing_ends_selecting_anew(budget: float | None) -> None:
    model = Pooled()
    opt = graphopt.optimize(model, ids(4), budget, backend="aot_eager")
    opt.__dict__["_ranks"] = Missing()
    opt.head.bias.requires_grad_(False)
    with pytest.raises(RankError):
        opt.reselect(ids(4))

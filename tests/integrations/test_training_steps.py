"""Steps of a diverted model: how many compilations numbers and lengths that vary cost."""

from __future__ import annotations

import contextlib
import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt
from graphopt.distributed.ranks import Ranks
from graphopt.errors import RankError
from graphopt.frontend.running import Running
from graphopt.integrations import trainer
from graphopt.integrations.diverted import Diverted
from graphopt.integrations.training_steps import TrainingSteps


def steps_of(model: nn.Module, budget: float | None = None) -> TrainingSteps:
    diverted = Diverted.of(model)

    def make(_: TrainingSteps, batch: Any) -> Any:
        return graphopt.optimize(model, batch, budget, backend="aot_eager")

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


def test_a_number_that_varies_is_a_number_to_the_model(warnings: list[str]) -> None:
    """It came as a tensor, which is in no set and a key of no dict."""

    class Scheduled(Pooled):
        def forward(self, input_ids: Tensor, attention_mask: Tensor, epoch: int = 0, task: float = 0.0) -> Tensor:
            loss = super().forward(input_ids, attention_mask)
            loss = loss * 2 if epoch in {1, 2} else loss
            return loss * {0.5: 3.0}.get(task, 1.0) if isinstance(task, float) else loss * 0

    model, batch = Scheduled(), ids(6)
    steps = steps_of(model)
    numbers = ((0, 0.0), (1, 0.5), (2, 0.25), (0, 0.5))
    assert_steps_as_in_eager(model, steps, *({**batch, "epoch": epoch, "task": task} for epoch, task in numbers))
    assert warnings == []


def test_steps_that_fail_are_of_one_kind_whatever_number_they_have(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = Pooled(), ids(6)
    steps = steps_of(model)
    model(**batch)

    def fails(*_: Any) -> Any:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(Running, "__call__", fails)
    for divisor in (2.0, 3.0, 4.0, 5.0):
        model(**batch, divisor=divisor)
    assert steps.numbers()["graphopt/original_steps"] == 4
    monkeypatch.undo()
    model(**ids(7))
    assert steps.numbers()["graphopt/original_steps"] == 4


def test_a_batch_is_not_put_into_words_while_nothing_has_failed() -> None:
    class Words:
        asked = 0

        def __str__(self) -> str:
            Words.asked += 1
            return "words"

    class Captioned(Pooled):
        def forward(self, input_ids: Tensor, attention_mask: Tensor, caption: Any = None) -> Tensor:
            return super().forward(input_ids, attention_mask)

    model = Captioned()
    steps_of(model)
    for _ in range(2):
        model(**ids(6), caption=Words()).backward()
    assert Words.asked == 0


def test_steps_that_nobody_counts_keep_no_tensors() -> None:
    model = Pooled()
    steps_of(model)
    found = []
    for _ in range(4):
        model(**ids(6)).backward()
        gc.collect()
        found.append(sum(isinstance(held, Tensor) for held in gc.get_objects()))
    assert found[-1] == found[1]


def test_errors_of_the_model_are_its_own_and_nothing_is_given_up_for_them(warnings: list[str]) -> None:
    class Fussy(Pooled):
        def forward(self, input_ids: Tensor, attention_mask: Tensor, divisor: float = 1.0) -> Tensor:
            if input_ids.shape[1] < 6:
                raise ValueError("too short")
            return super().forward(input_ids, attention_mask, divisor)

    model = Fussy()
    steps = steps_of(model)
    for length in (6, 2, 3, 4, 5, 6, 7):
        with pytest.raises(ValueError, match="too short") if length < 6 else contextlib.nullcontext():
            model(**ids(length)).backward()
    assert (steps.savings.steps, steps.savings.original) == (3, 0)
    assert warnings == []


def test_a_step_that_fails_trains_what_is_selected(monkeypatch: pytest.MonkeyPatch, warnings: list[str]) -> None:
    """In the middle of accumulation, tensors that are not selected had the gradient of that part of the batch alone."""

    def fails(*_: Any) -> Any:
        raise torch.OutOfMemoryError("16 GiB")

    model = Pooled()
    steps = steps_of(model, 0.7)
    model(**ids(6)).backward()
    monkeypatch.setattr(Running, "__call__", fails)
    for length in (6, 7, 8, 9):
        model(**ids(length)).backward()
    assert steps.opt is not None
    assert {name for name, p in model.named_parameters() if p.grad is not None} == steps.opt.selected < set(model.state_dict())
    assert steps.savings.original == 4
    assert ["16 GiB" in text for text in warnings] == [True, True]


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
    opt.__dict__["ranks"] = Missing()
    opt.head.bias.requires_grad_(False)
    with pytest.raises(RankError):
        opt.reselect(ids(4))

"""What a front end can get wrong without a word about inputs: their memory, what forward reads of them, what changes in them.

Most cases were found by comparing many models with eager mode; each is the smallest model that shows it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.frontend.stepping import BUDGETS, Two, X, assert_fails_as_under_torch_compile, assert_steps_as_in_eager, generated

# Inputs that share memory, and what forward reads of inputs in Python.


class Writing(Two):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2)
        return super().forward(x + y)


@BUDGETS
@pytest.mark.parametrize("aliased", [False, True])
def test_the_same_tensor_twice_where_forward_writes_into_one(aliased: bool, budget: float | None) -> None:
    """Whether or not the example was like that."""
    written: list[Tensor] = []

    def call(called: Any, model: Any, step: int) -> Tensor:
        x = generated(step, 4, 5)
        loss = called(x, x)
        written.append(x)
        return loss

    example = generated(9, 4, 5), generated(8, 4, 5)
    assert_steps_as_in_eager(Writing(), (example[0], example[0]) if aliased else example, call, budget)
    torch.testing.assert_close(written[0::2], written[1::2])


def test_overlapping_views_of_one_tensor() -> None:
    def call(called: Any, model: Any, step: int) -> Tensor:
        base = generated(step, 5, 5)
        return called(base[:4], base[1:]) + base.sum()

    assert_steps_as_in_eager(Writing(), (torch.zeros(4, 5), torch.zeros(4, 5)), call)


class WritingBuffer(Two):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.ones(4, 5))

    def forward(self, x: Tensor) -> Tensor:
        self.state.mul_(1.5)
        return super().forward(x + self.state)


def test_an_input_that_is_a_buffer_which_forward_changes() -> None:
    def call(called: Any, model: Any, step: int) -> Tensor:
        return called(model.state)

    assert_steps_as_in_eager(WritingBuffer(), X, call)


class Marked(torch.Tensor):
    """A class of the user's own."""


def _tagged() -> Tensor:
    x = generated(1, 4, 5)
    x.gain = True  # type: ignore[attr-defined]
    return x


READS: dict[str, tuple[Callable[[Any], bool], Callable[[], Tensor]]] = {
    "contiguity": (lambda x: not x.is_contiguous(), lambda: generated(1, 5, 4).t()),
    "strides": (lambda x: x.stride(0) == 10, lambda: generated(1, 4, 10)[:, :5]),
    "the class": (lambda x: isinstance(x, Marked), lambda: generated(1, 4, 5).as_subclass(Marked)),
    "an attribute": (lambda x: getattr(x, "gain", False), _tagged),
}


@pytest.mark.parametrize("what", READS)
def test_what_forward_reads_of_an_input_in_python(what: str) -> None:
    read, later = READS[what]

    class Reading(Two):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * 3 if read(x) else x)

    def call(called: Any, model: Any, step: int) -> Tensor:
        return called(later() if step % 2 else generated(step, 4, 5)).as_subclass(torch.Tensor)

    if what == "the class":
        assert_fails_as_under_torch_compile(Reading(), X, call, "Multiple dispatch failed")
    else:
        assert_steps_as_in_eager(Reading(), X, call, steps=4)


def test_the_memory_of_an_input_with_other_strides() -> None:
    class AsStrided(Two):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.as_strided((4, 5), (5, 1)))

    def call(called: Any, model: Any, step: int) -> Tensor:
        return called(generated(step, 5, 4).t() if step % 2 else generated(step, 4, 5))

    assert_steps_as_in_eager(AsStrided(), X, call, steps=4)


@BUDGETS
def test_zero_and_minus_zero_are_two_numbers(budget: float | None) -> None:
    class Sign(Two):
        def forward(self, x: Tensor, z: float) -> Tensor:
            return super().forward(torch.copysign(x, torch.full_like(x, z)))

    def call(called: Any, model: Any, step: int) -> Tensor:
        return called(generated(step, 4, 5), -0.0 if step % 2 else 0.0)

    assert_steps_as_in_eager(Sign(), (*X, 0.0), call, budget, steps=4, torchs_own=True)


# Numbers and sizes that change.


@pytest.mark.parametrize("how", ["argument", "attribute"])
def test_a_number_that_changes_every_step_is_compiled_at_most_twice(how: str) -> None:
    class Annealed(Two):
        beta = 0.0

        def forward(self, x: Tensor, beta: float = 0.0) -> Tensor:
            return super().forward(x) + (beta + self.beta) * self.a.weight.square().mean()

    def call(called: Any, model: Any, step: int) -> Tensor:
        if how == "attribute":
            model.beta = step / 10
        return called(generated(step, 4, 5), step / 10 if how == "argument" else 0.0)

    opt = assert_steps_as_in_eager(Annealed(), (*X, 0.1), call, steps=12)
    assert opt.counters.captures == 1
    assert opt.counters.compilations <= 2


@BUDGETS
def test_lengths_are_compiled_at_most_twice(budget: float | None) -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.a, self.b = nn.Embedding(97, 16), nn.Linear(16, 32), nn.Linear(32, 97)

        def forward(self, ids: Tensor) -> Tensor:
            logits = self.b(torch.relu(self.a(self.embed(ids))))
            return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())

    def ids(step: int) -> Tensor:
        return (generated(step, 4, 10 + step % 12).abs() * 30).long().clamp(0, 96)

    opt = assert_steps_as_in_eager(Tokens(), (ids(0),), lambda called, _, step: called(ids(step)), budget, steps=24)
    assert opt.counters.captures == 1
    assert opt.counters.compilations <= 2

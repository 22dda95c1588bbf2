"""What a front end can get wrong without a word about what forward does besides: tensors it keeps, and ordinary Python.

Most cases were found by comparing many models with eager mode; each is the smallest model that shows it.
"""

from __future__ import annotations

import copy
import functools
import logging
import random
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import graphopt
from tests.frontend.stepping import BUDGETS, Two, X, assert_steps_as_in_eager, generated, plainly
from tests.messages import warnings_of

LOGGER = logging.getLogger("user")

# Trainable tensors that are no registered parameters.


class Hidden(Two):
    def __init__(self) -> None:
        super().__init__()
        self.experts = [nn.Linear(5, 5)]
        self.__dict__["scale"] = nn.Parameter(torch.ones(5))

    def between(self, hidden: Tensor) -> Tensor:
        return self.experts[0](hidden) * self.scale


@BUDGETS
def test_tensors_that_the_model_does_not_register_are_trained(budget: float | None) -> None:
    def hidden_gradients(model: Any) -> list[Tensor]:
        tensors = [*model.experts[0].parameters(), model.scale]
        assert all(t.grad is not None for t in tensors)
        found = [t.grad.clone() for t in tensors]
        for t in tensors:
            t.grad = None
        return found

    assert_steps_as_in_eager(Hidden(), X, plainly, budget, state=hidden_gradients)


# What forward stores on the model.


class Storing(Two):
    def __init__(self) -> None:
        super().__init__()
        self.aux: Tensor | None = None

    def between(self, hidden: Tensor) -> Tensor:
        self.aux = hidden.square().mean()
        return hidden


class StoringInside(nn.Module):
    """The block that stores is a submodule, as a router's loss."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Storing()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)


@BUDGETS
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_a_tensor_that_forward_stores_on_the_model_is_of_this_step(inside: bool, warm: bool, budget: float | None) -> None:
    """Even if the model ran before in eager mode, as an evaluation does."""
    model: Any = StoringInside() if inside else Storing()
    holder = lambda m: m.block if inside else m  # noqa: E731
    if warm:
        with torch.no_grad():
            model(generated(5, 4, 5))

    def call(called: Any, model: Any, step: int) -> Tensor:
        loss = called(generated(step, 4, 5))
        return loss + 10 * holder(model).aux

    assert_steps_as_in_eager(model, X, call, budget, state=lambda m: holder(m).aux.detach())


@pytest.mark.parametrize("options", [{"passes": []}, {"budget": 0.7}, {"passes": [], "verify": True}])
def test_optimizing_leaves_no_traces_in_the_model(options: dict[str, Any]) -> None:
    class Tracing(Storing):
        def __init__(self) -> None:
            super().__init__()
            self.calls: list[int] = []

        def between(self, hidden: Tensor) -> Tensor:
            self.calls.append(1)
            return super().between(hidden)

    model = Tracing()
    graphopt.optimize(model, (generated(0, 4, 5),), backend="aot_eager", **options)
    assert model.aux is None
    assert model.calls == []


def test_optimizing_changes_neither_weights_nor_the_example() -> None:
    """Nor the state of Python's random numbers: not even where the model has to run for a look at its parts."""

    class Changing(Two):
        def forward(self, x: Tensor) -> Tensor:
            x.mul_(2)
            with torch.no_grad():
                self.a.bias.mul_(0.9)
            print(end="")
            return super().forward(x) * random.random()

    model, x = Changing(), generated(0, 4, 5)
    example, weights, state = x.clone(), copy.deepcopy(model.state_dict()), random.getstate()
    graphopt.optimize(model, (example,), 0.7, backend="aot_eager")
    assert torch.equal(example, x)
    torch.testing.assert_close(dict(model.state_dict()), dict(weights))
    assert random.getstate() == state


@BUDGETS
def test_a_numpy_number_that_forward_reads(budget: float | None) -> None:
    class Numpy(Two):
        def __init__(self) -> None:
            super().__init__()
            self.scale = np.float32(2.0)

        def between(self, hidden: Tensor) -> Tensor:
            return hidden * self.scale

    def call(called: Any, model: Any, step: int) -> Tensor:
        model.scale = np.float32(2.0 + step)
        return called(generated(step, 4, 5))

    with warnings_of() as warned:
        assert_steps_as_in_eager(Numpy(), X, call, budget)
    assert warned == []


@BUDGETS
def test_a_numpy_array_that_forward_reads(budget: float | None) -> None:
    class Numpy(Two):
        def __init__(self) -> None:
            super().__init__()
            self.scale = np.linspace(0.5, 1.5, 5, dtype=np.float32)

        def between(self, hidden: Tensor) -> Tensor:
            return hidden * torch.from_numpy(self.scale)

    def call(called: Any, model: Any, step: int) -> Tensor:
        model.scale = model.scale + np.float32(step)
        return called(generated(step, 4, 5))

    with warnings_of() as warned:
        assert_steps_as_in_eager(Numpy(), X, call, budget)
    assert warned == []


def test_data_of_a_weight_that_forward_replaces() -> None:
    class Decaying(Two):
        def forward(self, x: Tensor) -> Tensor:
            self.a.weight.data = self.a.weight.data * 0.9
            return super().forward(x)

    assert_steps_as_in_eager(Decaying(), X, plainly, state=lambda m: m.a.weight.detach().clone())


# Ordinary Python in forward.


class Habit(Two):
    """Something that most models' authors do at some time."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.started = 0.0

    def between(self, hidden: Tensor) -> Tensor:
        if self.how == "print":
            print(end="")
        elif self.how == "logging":
            logging.getLogger("user").info("shape %s", hidden.shape)
        elif self.how == "time":
            self.started = time.time()
        elif self.how == "random":
            return hidden * (1 + 0 * random.random())
        elif self.how == "random factor":
            return hidden * (1 + random.random())
        elif self.how == "nan check" and torch.isnan(hidden).any():
            raise ValueError("nan")
        elif self.how == "item" and hidden.mean().item() > 0:
            return -hidden
        elif self.how == "mask":
            return hidden[hidden > 0].sum() * hidden
        elif self.how == "nonzero":
            return hidden * len(torch.nonzero(hidden > 0.5))
        elif self.how == "unique":
            return hidden * torch.unique(hidden.detach().round()).numel()
        return hidden


@BUDGETS
@pytest.mark.parametrize(
    "how",
    ["print", "logging", "time", "random", "random factor", "nan check", "item", "mask", "nonzero", "unique"],
)
def test_ordinary_python_in_forward(how: str, budget: float | None) -> None:
    def call(called: Any, model: Any, step: int) -> Tensor:
        random.seed(step)
        return called(generated(step, 4, 5))

    model = Habit(how)
    with warnings_of() as warned:
        opt = assert_steps_as_in_eager(model, X, call, budget)
    assert warned == []
    assert budget is None or opt.report.flops_ratio <= budget
    if how == "time":
        assert time.time() - model.started < 60


def test_a_message_that_is_given_once_breaks_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the loggers of transformers have them."""
    told_once = functools.lru_cache(lambda logger, *message: logger.warning(*message))
    monkeypatch.setattr(logging.Logger, "told_once", told_once, raising=False)

    class Telling(Two):
        def between(self, hidden: Tensor) -> Tensor:
            LOGGER.told_once("hidden of %s", self.a.out_features)  # type: ignore[attr-defined]
            return hidden

    model, x = Telling(), generated(0, 4, 5)
    with warnings_of("user") as told:
        opt = graphopt.optimize(model, X, backend="aot_eager", fullgraph=True)
        for _ in range(3):
            assert torch.equal(opt(x), copy.deepcopy(model)(x))
    assert told == [f"hidden of {model.a.out_features}"]


def test_an_exception_of_forward_is_the_callers() -> None:
    model = Habit("nan check")
    opt = graphopt.optimize(model, X, 0.7, backend="aot_eager")
    opt(generated(0, 4, 5)).backward()
    with pytest.raises(ValueError, match="nan"):
        opt(torch.full((4, 5), float("nan")))
    opt(generated(0, 4, 5)).backward()
    assert opt.model_runs == 0


@BUDGETS
def test_a_loss_on_masked_tokens_alone(budget: float | None) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(97, 16), nn.Linear(16, 97)

        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            hidden, keep = self.embed(ids), labels != -100
            return nn.functional.cross_entropy(self.head(hidden[keep]), labels[keep])

    def batch(step: int) -> tuple[Tensor, Tensor]:
        ids = (generated(step, 4, 8).abs() * 30).long().clamp(0, 96)
        return ids, ids.masked_fill(generated(step + 50, 4, 8) < 0.5, -100)

    assert_steps_as_in_eager(Masked(), batch(9), lambda called, _, step: called(*batch(step)), budget)


CALLS: list[int] = []
INSIDE: list[Any] = [torch.sin]


@torch.library.custom_op("graphopt_tests::compiled_inside", mutates_args=())
def _compiled_inside(x: Tensor) -> Tensor:
    CALLS.append(1)
    return torch.compile(lambda x: INSIDE[0](x), backend="eager")(x).clone()


@_compiled_inside.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


_compiled_inside.register_autograd(lambda context, gradient: gradient)


class CompilesInside(Two):
    def between(self, hidden: Tensor) -> Tensor:
        return _compiled_inside(hidden)


def test_an_operator_that_has_python_of_its_own_compiled_runs_once_in_every_step() -> None:
    opt = graphopt.optimize(CompilesInside(), X, backend="aot_eager")
    for function in (torch.sin, torch.sin, torch.sin, torch.cos):
        CALLS.clear()
        INSIDE[0] = function
        opt(*X).backward()
    assert len(CALLS) == 1
    CALLS.clear()


@torch.compiler.disable
def _counted(x: Tensor) -> Tensor:
    CALLS.append(1)
    return x


class BreaksLater(Two):
    breaks = False

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(_counted(x) if self.breaks else x)


@BUDGETS
def test_what_comes_before_the_first_graph_runs_once_when_it_appears_in_later_steps(budget: float | None) -> None:
    model = BreaksLater()
    opt = graphopt.optimize(model, X, budget, backend="aot_eager")
    for _ in range(4):
        opt(*X).backward()
    model.breaks = True
    for calls in (1, 2):
        opt(*X).backward()
        assert len(CALLS) == calls
    CALLS.clear()

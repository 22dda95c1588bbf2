"""Steps that run again for an output beside the loss: what is before the model, hooks, and steps of other kinds between."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import graphopt
from graphopt.errors import RerunError
from tests.frontend.stepping import assert_gradients, assert_steps_as_in_eager
from tests.frontend.test_outputs import LOSSES, Heads, X
from tests.frontend.test_outputs_shared import Shared, rows


class Pair(Shared):
    """Of two inputs."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return super().forward(x + torch.sin(y))


def summed(out: dict[str, Tensor]) -> Tensor:
    return out["loss"] + out["a"].pow(3).sum()


COMPUTED: dict[str, Callable[[Any, Any, Tensor], Any]] = {
    "one input from the other": lambda called, _, x: summed(called(x, x + 1)),
    "both": lambda called, _, x: (lambda doubled: summed(called(doubled, doubled + 1)))(x * 2),
    "an input from a weight": lambda called, model, x: summed(called(x, x + model.body.weight[0])),
    "an input from an output": lambda called, _, x: summed(called(called(x, x)["a"].repeat(1, 2)[:, :5], x)),
}


@pytest.mark.parametrize("budget", [None, 0.7])
@pytest.mark.parametrize("kind", COMPUTED)
def test_inputs_that_are_computed_from_one_another(kind: str, budget: float | None) -> None:
    """What comes before the model has its gradients once."""
    model = Pair()
    eager = copy.deepcopy(model)
    opt = graphopt.optimize(model, (rows(0), rows(1)), budget, backend="aot_eager")
    for step in range(3):
        found = []
        for module, called in ((eager, eager), (model, opt)):
            module.zero_grad()
            x = rows(step).requires_grad_()
            COMPUTED[kind](called, module, x).backward()
            found.append(x.grad)
        if budget is None or "weight" not in kind:
            torch.testing.assert_close(found[1], found[0])
        for (name, mine), theirs in zip(model.named_parameters(), eager.parameters(), strict=True):
            if name in opt.selected and theirs.grad is not None:
                torch.testing.assert_close(mine.grad, theirs.grad)


def test_hooks_on_what_a_step_reads_are_called_once() -> None:
    model = Shared()
    eager = copy.deepcopy(model)
    opt = graphopt.optimize(model, (rows(0),), backend="aot_eager")
    for module in (eager, model):
        for parameter in module.body.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1) * 3)
    for step in range(3):
        found = []
        for module, called in ((eager, eager), (model, opt)):
            module.zero_grad()
            x = rows(step).requires_grad_()
            y = x * 2
            for tensor in (x, y):
                tensor.register_hook(lambda gradient: gradient * 3)
            y.retain_grad()
            summed(called(y)).backward()
            found.append((x.grad, y.grad))
        torch.testing.assert_close(found[1], found[0])
        assert_gradients(model, eager)


def test_what_was_frozen_between_a_step_and_its_backward_is_refused_once() -> None:
    """Its gradient would be missing without a word; eager mode computes it."""
    model = Shared()
    eager = copy.deepcopy(model)
    opt = graphopt.optimize(model, (rows(0),), backend="aot_eager")
    for step in range(3):
        for module, called in ((eager, eager), (model, opt)):
            module.zero_grad()
            loss = summed(called(rows(step)))
            module.body.requires_grad_(False)
            with pytest.raises(RerunError) if called is opt and step == 0 else nullcontext():
                loss.backward()
            module.body.requires_grad_(True)
        for mine, theirs in zip(model.body.parameters(), eager.body.parameters(), strict=True):
            if step > 0:
                torch.testing.assert_close(mine.grad, theirs.grad)


def test_an_output_that_is_differentiated_first_with_the_graph_kept_in_every_step() -> None:
    def train(called: Any, _: Any, step: int) -> Tensor:
        out = called(rows(step))
        out["a"].pow(3).sum().backward(retain_graph=True)
        return out["loss"]

    assert_steps_as_in_eager(Shared(), (rows(0),), train, steps=4)


def test_dropout_is_the_same_where_steps_without_it_take_turns() -> None:
    """As evaluation with gradients enabled between steps of training."""

    def train(called: Any, module: Any, step: int) -> Tensor:
        module.eval()
        called(rows(step))
        module.train()
        torch.manual_seed(step)
        return LOSSES["loss" if step < 6 else "all"](called(rows(step)))

    assert assert_steps_as_in_eager(Heads(dropout=0.5), X, train, steps=8).report.notes == []

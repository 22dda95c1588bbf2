"""Training steps of an optimised model beside those of a copy in eager mode."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt
from tests.long_forms import long

Call = Callable[[Any, Any, int], Tensor]
"""From what is called, the model that holds the attributes, and the number of the step to the loss."""


BUDGETS = pytest.mark.parametrize("budget", [0.7, *long(None)])
"""A budget's steps are compared in all but what is cut; what is compared without one, other tests of the same files are about."""


class Two(nn.Module):
    """Two layers; what a test is about goes between them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 5)

    def between(self, hidden: Tensor) -> Tensor:
        return hidden

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        return self.b(self.between(torch.tanh(self.a(x)))).sin().sum()


def plainly(called: Any, model: Any, step: int) -> Tensor:
    return called(generated(step, 4, 5))


X = (torch.zeros(4, 5),)


def assert_steps_as_in_eager(
    model: Any,
    example: Any,
    call: Call,
    budget: float | None = None,
    steps: int = 3,
    state: Callable[[Any], Any] = lambda model: None,
    torchs_own: bool = False,
    **options: Any,
) -> graphopt.OptimizedModule:
    """A few steps of SGD: losses, gradients, buffers and `state` as in eager mode; no gradient of what is not selected.

    Args:
        torchs_own: torch.compile does not notice the change and trains otherwise than eager mode: so does graphopt, and in the
            same way. This fails when torch mends it.
        state: what else the model holds: attributes, gradients of tensors that are no parameters.
        options: for `graphopt.optimize`.
    """
    eager = copy.deepcopy(model)
    opt = graphopt.optimize(model, example, budget, **{"backend": "aot_eager", **options})
    assert isinstance(opt, graphopt.OptimizedModule)
    plain = copy.deepcopy(eager)
    reference = torch.compile(eager, backend="aot_eager") if torchs_own else eager
    differs = False
    for step in range(steps):
        losses = []
        for called, module in ((reference, eager), (opt, model)):
            module.zero_grad()
            torch.manual_seed(step)
            loss = call(called, module, step)
            loss.backward()
            losses.append(loss.detach())
        plain.load_state_dict(eager.state_dict())
        differs |= torchs_own and not torch.allclose(call(plain, plain, step), losses[0])
        torch.testing.assert_close(losses[1], losses[0])
        trained = frozenset(name for name, _ in model.named_parameters() if opt.selects_tensor(name))
        assert_gradients(model, eager, trained)
        torch.testing.assert_close(dict(model.named_buffers()), dict(eager.named_buffers()))
        torch.testing.assert_close(state(model), state(eager))
        for module in (eager, model):
            descend(module, opt.selected)
    assert opt.model_runs == 0
    assert differs == torchs_own
    return opt


def assert_fails_as_under_torch_compile(model: Any, example: Any, call: Call, match: str) -> None:
    """torch.compile fails where eager mode trains: so does graphopt, by the same error. This fails when torch mends it."""

    def train(called: Any) -> None:
        for step in range(4):
            call(called, called, step).backward()

    opt = graphopt.optimize(copy.deepcopy(model), example, backend="aot_eager")
    for called in (torch.compile(copy.deepcopy(model), backend="aot_eager"), opt):
        with pytest.raises(Exception, match=match):
            train(called)
    train(model)


def assert_gradients(model: nn.Module, eager: nn.Module, selected: frozenset[str] | None = None) -> None:
    """Gradients are those of eager mode, of what is not selected None."""
    expected = dict(eager.named_parameters())
    for name, parameter in model.named_parameters():
        if selected is not None and name not in selected:
            assert parameter.grad is None, name
        else:
            assert (parameter.grad is None) == (expected[name].grad is None), name
            torch.testing.assert_close(parameter.grad, expected[name].grad, msg=lambda text, name=name: f"{name}: {text}")


def descend(module: nn.Module, selected: frozenset[str]) -> None:
    """A step of SGD of the selected parameters."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name in selected and parameter.grad is not None:
                parameter.sub_(0.05 * parameter.grad)


def generated(step: int, *shape: int) -> Tensor:
    """The same random tensor for the same step."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(100 + step))

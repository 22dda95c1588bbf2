"""What hooks and attributes collect is computed, and counted by the plan: no step is over its budget."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt
from graphopt.capture import capture
from tests.passes.dead_rows.test_technique import Classifier

Collect = Callable[[Any], Callable[[], list[Tensor]]]


def into_a_list(model: Any) -> Callable[[], list[Tensor]]:
    kept: list[Tensor] = []
    model.blocks[0].register_forward_hook(lambda _, __, output: kept.append(output))
    return lambda: kept


def copies_into_a_dict(model: Any) -> Callable[[], list[Tensor]]:
    kept: dict[str, Tensor] = {}
    model.blocks[0].up.register_forward_hook(lambda _, __, output: kept.update(up=output.detach().clone()))
    return lambda: [*kept.values()]


def into_an_attribute(model: Any) -> Callable[[], list[Tensor]]:
    model.blocks[0].register_forward_hook(lambda module, _, output: setattr(module, "seen", output))
    return lambda: [model.blocks[0].seen]


def into_a_variable(model: Any) -> Callable[[], list[Tensor]]:
    seen: Any = None

    def keep(_: nn.Module, __: Any, output: Tensor) -> None:
        nonlocal seen
        seen = output.detach() * 2

    model.blocks[0].register_forward_hook(keep)
    return lambda: [seen]


def into_a_queue(model: Any) -> Callable[[], list[Tensor]]:
    kept: deque[Tensor] = deque(maxlen=1)
    model.blocks[0].register_forward_hook(lambda _, __, output: kept.append(output.mean(-1)))
    return lambda: list(kept)


def first_row(x: Tensor) -> Tensor:
    return x[:, 0]


@pytest.mark.parametrize("collect", [into_a_list, copies_into_a_dict, into_an_attribute, into_a_variable, into_a_queue])
def test_a_step_keeps_to_its_budget(collect: Collect) -> None:
    torch.manual_seed(0)
    model, x = Classifier(first_row), torch.randn(3, 6, 8)
    reference = copy.deepcopy(model)
    theirs = collect(reference)
    reference(x).backward()
    ours = collect(model)
    opt = graphopt.optimize(model, (x,), 0.7, backend="aot_eager")
    opt(x).backward()
    assert opt.report.flops_ratio <= 0.7
    assert not opt.report.notes
    torch.testing.assert_close(ours()[-1], theirs()[-1])  # measuring importance calls hooks, too
    for (name, parameter), own in zip(model.named_parameters(), reference.parameters(), strict=True):
        if name in opt.selected:
            torch.testing.assert_close(parameter.grad, own.grad)


class Counting(nn.Module):
    """Keeps a number, its input and a parameter; what it computes, nobody else gets."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Classifier(first_row)
        self.calls = 0
        self.given: Any = None
        self.kept: list[Any] = [None]

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.given = x
        self.kept[0] = self.model.head.weight
        local: dict[str, Any] = {}
        local["result"] = self.model(x)
        result: Tensor = local["result"]
        return result


def test_only_what_the_model_computes_and_others_get_is_handed_out() -> None:
    x = torch.randn(3, 6, 8)
    assert not capture(Counting(), (x,)).hands_out
    assert not capture(Classifier(first_row), (x,)).hands_out
    hooked = Classifier(first_row)
    into_a_list(hooked)
    assert capture(hooked, (x,)).hands_out

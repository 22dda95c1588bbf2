"""The state of an optimizer is taken whole or not at all."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from graphopt import InputError
from graphopt.runtime.load_optimizer import load_optimizer
from tests.runtime.comparing import same

KINDS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    name: getattr(torch.optim, name)
    for name in (
        "Adam",
        "AdamW",
        "SGD",
        "RMSprop",
        "Adagrad",
        "Adadelta",
        "Adamax",
        "NAdam",
        "RAdam",
        "Rprop",
        "ASGD",
        "Adafactor",
    )
}


def stepped(kind: str) -> torch.optim.Optimizer:
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    optimizer = KINDS[kind](model.parameters(), lr=0.1, **({"momentum": 0.9} if kind == "SGD" else {}))
    model(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("kind", KINDS)
def test_its_own_state_is_loaded(kind: str) -> None:
    state, other = stepped(kind).state_dict(), stepped(kind)
    load_optimizer(other, copy.deepcopy(state))
    assert same(other.state_dict(), state)


def spoilt(state: dict[str, Any], what: str) -> None:
    (group,) = state["param_groups"]
    if what == "groups":
        state["param_groups"] = [group, copy.deepcopy(group)]
    elif what == "parameters":
        group["params"] = group["params"][1:]
    else:
        del state[what]


@pytest.mark.parametrize("what", ["groups", "parameters", "state", "param_groups"])
@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_what_does_not_fit_is_refused_and_changes_nothing(kind: str, what: str) -> None:
    optimizer = stepped(kind)
    state, before = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(optimizer.state_dict())
    spoilt(state, what)
    with pytest.raises(InputError, match=f"no state of this {kind}"):
        load_optimizer(optimizer, state)
    assert same(optimizer.state_dict(), before)


def test_options_that_a_state_of_another_torch_lacks_are_torchs_own() -> None:
    optimizer = stepped("AdamW")
    state = copy.deepcopy(optimizer.state_dict())
    for name in ("fused", "foreach", "differentiable", "decoupled_weight_decay"):
        del state["param_groups"][0][name]
    load_optimizer(optimizer, state)
    optimizer.step()
    assert optimizer.param_groups[0]["decoupled_weight_decay"]

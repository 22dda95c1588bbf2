"""The state of an optimizer is taken whole or not at all, and nothing in it is of a wrong type or shape."""

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


def smuggled(state: dict[str, Any], what: str) -> None:
    entries = state["state"][0]
    name = next(n for n, value in entries.items() if isinstance(value, torch.Tensor) and value.dim())
    if what == "shape":
        entries[name] = torch.zeros(5)
    elif what == "larger":
        entries[name] = entries[name].expand(2, 4, 3)
    elif what == "text":
        entries[name] = "four"
    elif what == "list":
        entries["more"] = [1.0]
    elif what == "entries":
        state["state"][0] = [entries]
    else:
        state["state"][7] = entries


@pytest.mark.parametrize("what", ["shape", "larger", "text", "list", "entries", "parameter"])
@pytest.mark.parametrize("kind", ["AdamW", "SGD", "Adagrad"])
def test_what_does_not_fit_is_refused_before_the_optimizer_sees_it(kind: str, what: str, monkeypatch: Any) -> None:
    optimizer = stepped(kind)
    state, before = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(optimizer.state_dict())
    smuggled(state, what)
    seen: list[Any] = []
    monkeypatch.setattr(optimizer, "load_state_dict", seen.append)
    with pytest.raises(InputError, match=f"no state of this {kind}"):
        load_optimizer(optimizer, state)
    assert not seen
    assert same(optimizer.state_dict(), before)

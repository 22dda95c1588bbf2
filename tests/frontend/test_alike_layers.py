"""Layers that look alike and are graphs of their own: one of Dynamo's graphs, and a plan for each."""

from __future__ import annotations

import pytest
import torch
from graphopt.passes import GreenTrainer
from torch import Tensor, nn

import graphopt
from tests.frontend.stepping import assert_steps_as_in_eager
from tests.frontend.test_regions import batch, call
from tests.long_forms import long


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layer(x))
        print(end="")
        return x


class Blocks(nn.Module):
    """The same code is a part twice in a step, with other parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(3)), nn.Linear(8, 3)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.in_one(x, labels)

    def in_one(self, x: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(x), labels)


@pytest.mark.parametrize("budget", [None, 0.5, *long(0.8)])
def test_layers_that_look_alike_and_are_a_part_each(budget: float | None) -> None:
    """Dynamo compiles one graph for all of them; what is trained in one need not be in another."""
    opt = assert_steps_as_in_eager(Blocks(), batch(9), call, budget)
    assert budget is None or opt.report.flops_ratio <= budget


@pytest.mark.parametrize("train", [("blocks.1.layer.weight",), ("blocks.0.layer.weight", "blocks.2.layer.bias")])
def test_a_selection_among_layers_that_look_alike(train: tuple[str, ...]) -> None:
    opt = assert_steps_as_in_eager(Blocks(), batch(9), call, 1.0, passes=[GreenTrainer(train=train)])
    assert opt.selected == set(train)


def test_a_new_weight_is_not_taken_for_one_that_lay_at_its_address() -> None:
    model, train = Blocks(), ("blocks.0.layer.weight", "blocks.2.layer.weight")
    for block in model.blocks:
        block.layer = nn.Linear(8, 8, bias=False)
    opt = graphopt.optimize(model, batch(9), passes=[GreenTrainer(train=train)], backend="aot_eager")
    layers, reused = [block.layer for block in model.blocks], 0
    for _ in range(3):
        opt(*batch(9)).backward()
        assert {name for name, p in model.named_parameters() if p.grad is not None} == set(train)
        places = {id(layer.weight): (i + 1) % 3 for i, layer in enumerate(layers)}
        for layer in layers:
            layer.weight = None
        del layer
        made = [nn.Parameter(torch.randn(8, 8)) for _ in range(4)]
        while len(made) < 50_000 and id(made[-1]) not in places:  # memory has many free places
            made.append(nn.Parameter(torch.randn(8, 8)))
        weights = {places[id(p)]: p for p in made if id(p) in places}
        others = [p for p in made if id(p) not in places]
        reused += len(weights)
        for i, layer in enumerate(layers):
            layer.weight = weights[i] if i in weights else others.pop()
    assert reused

"""Gradients between parts of a model that is several graphs: of what eager mode computes there, and of views of one tensor."""

from __future__ import annotations

import pytest
import torch
from graphopt.passes import GreenTrainer
from torch import Tensor, nn

from graphopt.analysis.flops import flop_profile
from graphopt.capture import capture
from graphopt.frontend.recording import record
from tests.frontend.stepping import assert_steps_as_in_eager
from tests.frontend.test_regions import batch, call


class Between(nn.Module):
    """A function that is never traced lies between two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        hidden = untraced(torch.tanh(self.first(x)))
        return nn.functional.cross_entropy(self.head(torch.tanh(self.second(hidden))), labels)


@torch.compiler.disable
def untraced(x: Tensor) -> Tensor:
    return x * x.exp() + float(x.detach().numpy().sum() > 1e9)


class InPlace(Between):
    """As before, and the first part's result is changed afterwards; the function makes several tensors of two."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        hidden, other = self.first(x), torch.tanh(self.first(x))
        left, right = halves(hidden, other)
        return nn.functional.cross_entropy(self.head(torch.tanh(self.second(torch.cat([left, right], 1)))), labels)


@torch.compiler.disable
def halves(x: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    left, right = (x + other).split(4, 1)
    x.mul_(0.5)
    return left, right.exp() * float(x.detach().numpy().size)


@pytest.mark.parametrize("kind", [Between, InPlace])
def test_a_gradient_passes_what_is_computed_between_parts_only_where_it_is_needed(kind: type[Between]) -> None:
    """A plan counts what is computed then: below all that is trained, nothing."""
    graph, _ = record(kind(), batch(0), {}, 0, "a part is never traced")
    assert all(desc.target.kind == "parameter" for desc in graph.outputs if desc.kind == "gradient")
    profile = flop_profile(graph)
    products = 6 * 8 * 8 * 2, 6 * 8 * 3 * 2
    assert profile.cost({"head.weight"}) == products[1]
    assert profile.cost({"second.weight"}) == sum(products)
    assert profile.cost({"first.bias"}) == sum(products)
    for budget in (None, 0.65, 0.8):
        opt = assert_steps_as_in_eager(kind(), batch(9), call, budget)
        assert budget is None or opt.report.flops_ratio <= budget
    opt = assert_steps_as_in_eager(kind(), batch(9), call, 1.0, passes=[GreenTrainer(train=("first.weight",))])
    assert opt.selected == {"first.weight"}


class Views(Between):
    """What the first part returns are views of one tensor."""

    breaks = True

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        both = torch.tanh(self.first(x))
        left, right = both[:, :4], both[:, 4:]
        if self.breaks:
            print(end="")
        hidden = self.second(torch.cat([left, right.exp()], 1))
        return nn.functional.cross_entropy(self.head(torch.tanh(hidden)), labels), right


def test_the_gradients_of_views_of_one_tensor_come_from_the_part_that_takes_them() -> None:
    """Also where one of them is returned, too, so that there may be a gradient from outside."""
    parts, model = Views(), Views()
    model.breaks = False
    joined = flop_profile(record(parts, batch(0), {}, 0, "it prints")[0])
    whole = flop_profile(capture(model, batch(0))).at(6)
    for selected in ({"first.bias"}, {"second.weight"}, {"first.weight", "head.bias"}):
        assert joined.cost(selected) == whole.cost(selected), selected
    opt = assert_steps_as_in_eager(Views(), batch(9), lambda called, _, step: called(*batch(step))[0], 0.8)
    assert opt.report.flops_ratio <= 0.8

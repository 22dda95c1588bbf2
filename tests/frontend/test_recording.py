"""Recording a model of several graphs, however often a process does it; what is done with the graphs is in `test_regions`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import graphopt
from graphopt.frontend.recording import record


class TwoParts(nn.Module):
    """Two layers with a line between them that breaks the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        return self.second(hidden).sum()


def test_the_ninth_model_of_a_class_is_recorded_where_all_calls_of_torch_compile_share_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in torch 2.11 and 2.12: after eight compilations of a function Dynamo leaves it to eager mode."""
    monkeypatch.setattr("graphopt.compat.dynamo._isolates", lambda: False)
    torch.compiler.reset()
    for _ in range(9):
        assert len(record(TwoParts(), (torch.ones(3, 4),), {}, 0, "it breaks")[0].trainable) == 4
    torch.compiler.reset()


class Untold:
    """An output in which torch finds no tensors."""

    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


class Uncopied(nn.Module):
    """It cannot be copied, as its weight is the result of a computation; it counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.utils.weight_norm(nn.Linear(8, 8))
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("count", torch.zeros(()))
        self.calls = 0

    def forward(self, x: Tensor) -> Untold:
        self.count += 1
        self.calls += 1
        return Untold(self.norm(self.layer(x)).square().mean())


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_model_that_cannot_be_copied_stays_as_it_was() -> None:
    model, x = Uncopied(), torch.randn(16, 8)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for prepare in (graphopt.analyze, graphopt.optimize):
        prepare(model, (x,), backend="aot_eager")
        torch.testing.assert_close(dict(model.named_buffers()), before)
        assert model.calls == 0


class OfTwo(nn.Module):
    """Takes what may be the same tensor twice, as ids and labels are."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.layer(x) * y
        print(end="")
        return (hidden - y).square().mean()


def test_a_tensor_that_is_given_twice_is_one_input() -> None:
    x = torch.randn(4, 8)
    for given, inputs in (((x, x), 1), ((x, x.clone()), 2)):
        graph, _ = record(OfTwo(), given, {}, 0, "it is not one graph")
        assert sum(desc.kind == "input" for desc in graph.inputs) == inputs

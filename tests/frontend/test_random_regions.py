"""Random models of several graphs: gradients are eager mode's, and what runs takes the FLOPs that were planned."""

from __future__ import annotations

import copy
import random
import sys
import types
from collections.abc import Callable

import pytest
import torch
from graphopt.passes import GreenTrainer
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import graphopt
from graphopt.analysis.flops import flop_profile
from tests.long_forms import long

WIDTH = 8


LINES = {
    "layer": "h = torch.tanh(self.layers[{i}](h))",
    "scale": "h = h * self.scales[{i}]",
    "shortcut": "h = h + kept; kept = h",
    "break": "print(end='')",
    "eager mode": "h = of_two(h, kept)",
    "views": "t = self.layers[{i}](h); left, right = t[:, :4], t[:, 4:]; print(end=''); h = torch.cat([right, left], 1)",
    "in place": "h = self.layers[{i}](h); print(end=''); h.mul_(0.9)",
}
"""Of `forward`; it has no loop, since of one in which the graph breaks nothing is traced."""


@torch.compiler.disable
def of_two(x: Tensor, kept: Tensor) -> Tensor:
    left, right = (x + kept.sin()).split(4, 1)
    return torch.cat([right, left.exp()], 1)


class Random(nn.Module):
    """Its lines are of random kinds."""

    def __init__(self, kinds: list[str]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in kinds)
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(WIDTH)) for _ in kinds)


def model_of(kinds: list[str], monkeypatch: pytest.MonkeyPatch) -> Random:
    lines = [LINES[kind].format(i=i) for i, kind in enumerate(kinds)]
    written = ["def forward(self, h):", " kept = h", *(f" {line}" for line in lines), " return h.square().mean()"]
    module = types.ModuleType("written_by_a_test")
    module.__dict__.update(torch=torch, of_two=of_two)
    monkeypatch.setitem(sys.modules, module.__name__, module)  # Dynamo imports it by name
    exec("\n".join(written), module.__dict__)
    return type("Written", (Random,), {"forward": module.forward})(kinds)


@pytest.mark.parametrize("seed", [1, *long(0, *range(2, 25))])
def test_what_runs_is_what_was_planned(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)
    kinds = ["layer", *(draw.choice([*LINES]) for _ in range(draw.randint(3, 8))), "views", "eager mode", "layer"]
    model = model_of(kinds, monkeypatch)
    x, reference = torch.randn(6, WIDTH), copy.deepcopy(model)
    reference(x).backward()
    used = sorted(name for name, p in reference.named_parameters() if p.grad is not None)
    train = tuple(draw.sample(used, draw.randint(1, 3)))
    opt = graphopt.optimize(model, (x,), passes=[GreenTrainer(train=train)], backend="aot_eager")
    profile = flop_profile(opt.graph)
    planned = profile.forward + profile.cost(train)
    for _ in range(2):
        model.zero_grad()
        with FlopCounterMode(display=False) as counter:
            opt(x).backward()
    assert counter.get_total_flops() == planned
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == (name in train), name
        if name in train:
            torch.testing.assert_close(parameter.grad, reference.get_parameter(name).grad)


class Layer(nn.Module):
    """Attention of one head."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        query, key, value = self.projection(h)[:, None].chunk(3, -1)
        return h + nn.functional.scaled_dot_product_attention(query, key, value)[:, 0]


class Layers(nn.Module):
    """Of the loop nothing is traced, and of the layers each by itself: Dynamo takes the second one's graph for the third."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, h: Tensor) -> Tensor:
        for layer in self.layers:
            print(end="")
            h = layer(h)
        return h.square().mean()


def test_layers_that_share_a_graph_of_dynamos_run_their_attention_once() -> None:
    def attentions(call: Callable[[Tensor], Tensor]) -> int:
        with torch.profiler.profile() as profile:
            call(x).backward()
        wanted = "aten::_scaled_dot_product_flash_attention_for_cpu"
        return sum(event.count for event in profile.key_averages() if event.key == wanted)

    model, x = Layers(), torch.randn(2, 5, WIDTH)
    assert attentions(model) == 3
    opt = graphopt.optimize(model, (x,), budget=0.9, backend="aot_eager")
    opt(x).backward()
    assert attentions(opt) == 3


class FirstPart(nn.Module):
    """The first part has no backward, and a graph of its own."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.frozen, (self.first, self.second, self.head) = frozen, (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.first.requires_grad_(not frozen)

    def forward(self, h: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.frozen):
            h = torch.tanh(self.first(h))
        print(end="")
        return self.head(torch.tanh(self.second(h))).square().mean()


@pytest.mark.parametrize("frozen", [True, False])
def test_a_part_without_a_backward_is_counted(frozen: bool) -> None:
    model, x = FirstPart(frozen), torch.randn(6, WIDTH)

    def flops(call: Callable[[Tensor], Tensor]) -> int:
        with FlopCounterMode(display=False) as counter:
            call(x).backward()
        return counter.get_total_flops()

    full = flops(model)
    assert flop_profile(graphopt.analyze(model, (x,)).graph).step == full
    for budget in (0.7, 0.9):
        opt = graphopt.optimize(copy.deepcopy(model), (x,), budget, backend="aot_eager")
        assert flops(opt) == opt.report.flops_ratio * full <= budget * full


def test_recurrent_layers_are_planned_in_parts_too() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.recurrent, self.second, self.head = nn.LSTM(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

        def forward(self, h: Tensor) -> Tensor:
            h = self.recurrent(h)[0]
            print(end="")
            return self.head(torch.tanh(self.second(h))).square().mean()

    x = torch.randn(5, 2, WIDTH)
    opt = graphopt.optimize(Recurrent(), (x,), 0.7, backend="aot_eager")
    opt(x).backward()
    with FlopCounterMode(display=False) as counter:
        opt(x).backward()
    assert counter.get_total_flops() == pytest.approx(opt.report.flops_ratio * flop_profile(opt.graph).step)
    assert opt.report.flops_ratio <= 0.7
    assert any(name.startswith("recurrent") for name in {p.name for p in opt.graph.parameters})


def test_the_report_after_other_batches_of_a_model_that_reads_a_number_off_a_tensor() -> None:
    class Scaled(FirstPart):
        def forward(self, h: Tensor) -> Tensor:
            h = torch.tanh(self.first(h))
            return self.head(h * float(h.detach().numpy().mean())).square().mean()

    opt = graphopt.optimize(Scaled(False), (torch.randn(4, WIDTH),), 0.9, backend="aot_eager")
    for size in (4, 7):
        opt(torch.randn(size, WIDTH)).backward()
    assert opt.report.flops_ratio <= 0.9

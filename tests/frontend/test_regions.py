"""Models that are several graphs of Dynamo's: planned as one, cut in each part, and exact."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from graphopt.passes import GreenTrainer, Vcas
from torch import Tensor, nn

import graphopt
from graphopt import CaptureError, PassError
from graphopt.analysis.flops import flop_profile
from graphopt.capture import capture
from graphopt.frontend.recording import record
from tests.frontend.stepping import BUDGETS, assert_gradients, assert_steps_as_in_eager, generated
from tests.long_forms import long
from tests.messages import warnings_of


class Stack(nn.Module):
    """Layers and a loss, with a line that breaks the graph before some of the layers."""

    def __init__(self, breaks: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 3)
        self.breaks = breaks

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        if 0 in self.breaks:
            print(end="")
        x = torch.tanh(self.layers[0](x))
        if 1 in self.breaks:
            print(end="")
        x = torch.tanh(self.layers[1](x))
        if 2 in self.breaks:
            print(end="")
        x = torch.tanh(self.layers[2](x))
        if 3 in self.breaks:
            print(end="")
        x = torch.tanh(self.layers[3](x))
        return nn.functional.cross_entropy(self.head(self.norm(x)), labels)


def batch(step: int, size: int = 6) -> tuple[Tensor, Tensor]:
    return generated(step, size, 8), torch.arange(size) % 3


def call(called: Any, model: Any, step: int) -> Tensor:
    return called(*batch(step))


@pytest.mark.parametrize("breaks", [(2,), (1, 2, 3), (0,)])
def test_all_parts_together_cost_what_the_model_without_breaks_costs(breaks: tuple[int, ...]) -> None:
    whole = flop_profile(capture(Stack(), batch(0))).at(6)
    graph, unplanned = record(Stack(breaks), batch(0), {}, 0, "it prints")
    joined = flop_profile(graph)
    assert joined.step == whole.step
    assert joined.order == whole.order
    assert unplanned == ()
    names = [name for name, _ in Stack().named_parameters()]
    for selected in ({"head.weight"}, {"layers.2.weight"}, {"layers.0.bias", "layers.3.weight"}, set(names)):
        assert joined.cost(selected) == whole.cost(selected), selected
    assert [p.name for p in graph.parameters] == names


@pytest.mark.parametrize(
    ("breaks", "budget"),
    [
        *(((2,), None), ((2,), 0.7), ((1, 2, 3), 0.5)),
        *long(((2,), 0.5), ((2,), 0.9), ((1, 2, 3), None), ((1, 2, 3), 0.7), ((1, 2, 3), 0.9)),
    ],
)
def test_steps_of_several_parts_are_exact_and_within_the_budget(breaks: tuple[int, ...], budget: float | None) -> None:
    with warnings_of() as warned:
        opt = assert_steps_as_in_eager(Stack(breaks), batch(9), call, budget)
    assert warned == []
    assert len(opt.last_step.regions) == len(breaks) + 1
    assert budget is None or opt.report.flops_ratio <= budget


def test_a_break_changes_neither_the_selection_nor_what_a_step_costs() -> None:
    rule = [GreenTrainer(rule="capacity")]  # gradients differ in the last bits, which decides between equal tensors
    one, several = (graphopt.optimize(Stack(breaks), batch(0), 0.6, rule, "aot_eager") for breaks in ((), (1, 3)))
    assert one.selected == several.selected
    assert one.report.flops_ratio == pytest.approx(several.report.flops_ratio)


def test_several_parts_under_inductor() -> None:
    def loss(called: Any, model: Any, step: int) -> Tensor:
        return called(*batch(step))[0]  # type: ignore[no-any-return]

    opt = assert_steps_as_in_eager(WithOutputs(), batch(9), loss, 0.7, steps=2, backend="inductor")
    assert len(opt.last_step.regions) == 2
    assert opt.report.flops_ratio <= 0.7


def test_parts_before_all_that_is_trained_have_no_backward_and_give_no_gradient() -> None:
    model = Stack((1, 2))
    last = GreenTrainer(train=("head.weight", "layers.3.weight"))
    opt = assert_steps_as_in_eager(model, batch(9), call, 1.0, passes=[last])
    products = [sum("mm" in str(node.target) for node in graph.nodes) for graph in graphs(opt)]
    assert products == [1, 1, 3 + 3]  # forward alone; of the last part also two weights' gradients and one between them
    assert opt.selected == {"head.weight", "layers.3.weight"}


def graphs(opt: graphopt.OptimizedModule) -> list[Any]:
    """The joint graphs of the parts that ran last."""
    return [region.graph.graph for region in opt.last_step.regions if region.graph is not None]


def test_the_flops_of_what_runs_are_those_that_were_planned() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    model = Stack((1, 3))
    opt = graphopt.optimize(model, batch(0), 0.6, backend="aot_eager")
    opt(*batch(0)).backward()
    with FlopCounterMode(display=False) as counter:
        opt(*batch(1)).backward()
    assert counter.get_total_flops() <= 0.6 * flop_profile(opt.graph).step


def test_other_sizes_of_several_parts() -> None:
    sizes = (6, 4, 9, 6, 5)
    opt = assert_steps_as_in_eager(
        Stack((2,)), batch(9), lambda called, _, step: called(*batch(step, sizes[step])), 0.7, steps=len(sizes)
    )
    assert opt.counters.compilations <= 4  # each part for one size, and for all


def test_a_change_of_selection_in_several_parts() -> None:
    model = Stack((2,))
    opt = graphopt.optimize(model, batch(0), passes=[GreenTrainer(train=("layers.0.weight",))], backend="aot_eager")
    eager = copy.deepcopy(model)
    compiled = []
    for train in ({"layers.0.weight"}, {"head.bias", "layers.2.bias"}, {"layers.0.weight"}, {"layers.1.weight"}):
        opt.adopt(replace(opt.plan, train=frozenset(train)))
        for module, called in ((eager, eager), (model, opt)):
            module.zero_grad()
            called(*batch(1)).backward()
        assert {n for n, p in model.named_parameters() if p.grad is not None} == train
        for name in train:
            torch.testing.assert_close(dict(model.named_parameters())[name].grad, dict(eager.named_parameters())[name].grad)
        compiled.append(opt.counters.compilations)
        assert_buffers(model, eager)
    assert compiled[2] == compiled[1]  # the earlier plan is still compiled


def assert_buffers(model: nn.Module, eager: nn.Module) -> None:
    torch.testing.assert_close(dict(model.named_buffers()), dict(eager.named_buffers()))


# What passes between parts.


class Shared(nn.Module):
    """One layer is used on both sides of the break."""

    def __init__(self, breaks: bool = True) -> None:
        super().__init__()
        self.first, self.shared, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.breaks = breaks

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        hidden = torch.tanh(self.shared(self.first(x)))
        if self.breaks:
            print(end="")
        return nn.functional.cross_entropy(self.head(torch.tanh(self.shared(hidden))), labels)


@BUDGETS
def test_a_parameter_that_two_parts_use_has_the_sum_of_its_gradients(budget: float | None) -> None:
    assert_steps_as_in_eager(Shared(), batch(9), call, budget)


def test_a_parameter_that_two_parts_use_can_be_all_that_is_trained() -> None:
    train = ("shared.weight",)
    opt = assert_steps_as_in_eager(Shared(), batch(9), call, 1.0, passes=[GreenTrainer(train=train)])
    assert opt.selected == set(train)


def test_a_parameter_that_two_parts_use_is_counted_once() -> None:
    graph, _ = record(Shared(), batch(0), {}, 0, "it prints")
    whole = flop_profile(capture(Shared(breaks=False), batch(0))).at(6)
    joined = flop_profile(graph)
    assert joined.step == whole.step
    assert joined.cost({"shared.weight"}) == whole.cost({"shared.weight"})
    assert [p.name for p in graph.parameters] == [name for name, _ in Shared().named_parameters()]


class Tied(nn.Module):
    """Embedding and head are one tensor, in two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer, self.head = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        print(end="")
        return nn.functional.cross_entropy(self.head(torch.tanh(self.layer(hidden))).flatten(0, 1), ids.flatten())


@pytest.mark.parametrize("budget", [None, 0.8])
def test_tied_weights_in_two_parts(budget: float | None) -> None:
    ids = torch.arange(12).reshape(3, 4) % 11
    opt = assert_steps_as_in_eager(Tied(), (ids,), lambda called, _, step: called((ids + step) % 11), budget)
    assert [p.aliases for p in opt.graph.parameters if p.aliases] in ([("head.weight",)], [])


class Untraced(nn.Module):
    """A layer with parameters is never traced."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        hidden = self.in_eager_mode(torch.tanh(self.first(x)))
        return nn.functional.cross_entropy(self.head(torch.tanh(hidden)), labels)

    @torch.compiler.disable
    def in_eager_mode(self, x: Tensor) -> Tensor:
        return self.second(x)


@pytest.mark.parametrize("train", [("head.weight",), ("first.bias",)])
def test_parameters_of_what_is_never_traced_are_unknown_to_the_plan_and_trained(train: tuple[str, ...]) -> None:
    model = Untraced()
    eager = copy.deepcopy(model)
    opt = graphopt.optimize(model, batch(0), passes=[GreenTrainer(train=train)], backend="aot_eager")
    assert not any(parameter.name.startswith("second") for parameter in opt.graph.parameters)
    for step in range(3):
        for module, called in ((eager, eager), (model, opt)):
            module.zero_grad()
            called(*batch(step)).backward()
        assert_gradients(model, eager, frozenset({*train, "second.weight", "second.bias"}))


class Looping(nn.Module):
    """Dynamo leaves a loop with a break in it to eager mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
            print(end="")
        return nn.functional.cross_entropy(self.head(x), labels)


@pytest.mark.parametrize("budget", [0.5, *long(None, 0.8)])
def test_a_loop_with_a_break_in_every_round(budget: float | None) -> None:
    with warnings_of() as warned:
        assert_steps_as_in_eager(Looping(), batch(9), call, budget)
    assert any("torch.compile" in text for text in warned)


class WithOutputs(Stack):
    """Returns what both parts have computed."""

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        hidden = torch.tanh(self.layers[0](x))
        print(end="")
        logits = self.head(self.norm(torch.tanh(self.layers[1](hidden))))
        return nn.functional.cross_entropy(logits, labels), logits, hidden


@pytest.mark.parametrize(
    ("used", "budget"),
    [
        ((0, 2), 0.8),
        ((0, 1, 2), None),
        ((2,), None),  # within the budget, nothing that is selected would have a gradient
        *long(((0, 2), None), ((0, 1, 2), 0.8), *((used, budget) for used in ((0,), (0, 1)) for budget in (None, 0.8))),
    ],
)
def test_outputs_of_several_parts_that_are_differentiated(used: tuple[int, ...], budget: float | None) -> None:
    def combined(called: Any, model: Any, step: int) -> Tensor:
        outputs = called(*batch(step))
        return sum((i + 1) * outputs[i].square().sum() for i in used)  # type: ignore[return-value]

    assert_steps_as_in_eager(WithOutputs(), batch(9), combined, budget)


# What is refused, and what is warned of.


def test_a_model_that_has_to_be_one_graph_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"print.*Remedy"):
        graphopt.optimize(Stack((2,)), batch(0), 0.7, backend="aot_eager", fullgraph=True)


@pytest.fixture(scope="module")
def optimized() -> graphopt.OptimizedModule:
    torch.manual_seed(0)
    return graphopt.optimize(Stack((2,)), batch(0), 0.7, backend="aot_eager")


def test_passes_that_need_one_graph_are_refused_if_they_are_named_and_left_out_if_not(
    optimized: graphopt.OptimizedModule,
) -> None:
    with pytest.raises(PassError, match="vcas needs the model to be one graph.*planned together.*print.*leave vcas out"):
        graphopt.optimize(Stack((2,)), batch(0), passes=[Vcas(keep_rows=0.5)], backend="aot_eager")
    assert {p.name for p in optimized.plan.passes} <= {"greentrainer", "recompute", "runlora"}


def test_the_report_says_that_the_model_is_several_parts(optimized: graphopt.OptimizedModule) -> None:
    assert "print" in optimized.report.batch
    assert optimized.report.flops_ratio <= 0.7


def test_a_copy_of_a_model_of_several_parts_is_its_own(optimized: graphopt.OptimizedModule) -> None:
    opt = optimized
    opt(*batch(0)).backward()
    other = copy.deepcopy(opt)
    for called in (opt, other):
        called.zero_grad()
        called(*batch(1)).backward()
    for ours, theirs in zip(opt.parameters(), other.parameters(), strict=True):
        assert ours is not theirs
        torch.testing.assert_close(ours.grad, theirs.grad)
    assert {n for n, p in other.named_parameters() if p.grad is not None} == opt.selected


class Changes(nn.Module):
    """Its second graph changes an input in place, which the third reads: torch's tangent is of that input, and of no output."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x) * 3
        print(end="")
        hidden.mul_(2)
        below = torch.tanh(self.second(hidden))
        print(end="")
        return (self.third(below) * hidden.sum()).square().sum()


def test_an_input_that_a_part_changes_in_place_passes_its_gradient_on() -> None:
    torch.manual_seed(0)
    model, x = Changes().double(), torch.randn(5, 4, dtype=torch.float64)
    opt = graphopt.optimize(model, (x,), budget=0.9, backend="aot_eager")
    opt(x).backward()
    ours = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert ours.keys() == set(opt.report.selected) < dict(model.named_parameters()).keys()
    model.zero_grad()
    model(x).backward()
    for name, parameter in model.named_parameters():
        if name in ours:
            torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-12, atol=1e-12)


class Spectrum(nn.Module):
    """Returns complex numbers beside its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        found = self.second(torch.tanh(self.first(x)))
        values = torch.linalg.eigvals(found.T @ found + torch.arange(4.0) * torch.eye(4))
        return values.real.square().sum(), values


def test_the_gradient_of_complex_numbers_beside_the_loss() -> None:
    """Of two real tensors, as torch has it, and of no output by its number."""
    torch.manual_seed(0)
    model, x = Spectrum(), torch.randn(5, 4)
    opt = graphopt.optimize(model, (x,), budget=0.95, backend="aot_eager")
    opt(x)[0].backward()
    ours = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert ours.keys() == set(opt.report.selected) < dict(model.named_parameters()).keys()
    model.zero_grad()
    model(x)[0].backward()
    for name, parameter in model.named_parameters():
        if name in ours:
            torch.testing.assert_close(ours[name], parameter.grad)

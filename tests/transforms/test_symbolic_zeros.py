"""Outputs whose gradient never comes: no zeros are made for them, and gradients are those of eager mode."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import graphopt
from graphopt.capture import capture_to_run
from graphopt.compat import output_list
from graphopt.specialise import specialise
from graphopt.transforms.partition import split
from graphopt.transforms.symbolic_zeros import expected_results, without_tangents
from tests.long_forms import long


class Heads(nn.Module):
    """A loss first, then the logits that it is computed from, then a head that the loss does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 6)
        self.head = nn.Linear(6, 3)
        self.other = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = torch.tanh(self.body(x))
        logits = self.head(hidden)
        return logits.square().mean(), logits, torch.softmax(self.other(hidden), -1)


def test_an_input_without_a_shape_is_no_tangent() -> None:
    """As numbers of routed tokens are, of which a graph of Switch Transformers takes one that nothing reads."""
    graph = capture_to_run(Heads(), (torch.randn(5, 4),), {}).clone()
    expected = expected_results(graph)
    places = zip(graph.inputs, graph.placeholders, strict=True)
    del next(node for desc, node in places if desc.kind == "input").meta["val"]
    assert expected_results(graph) == expected == {0}


USED = [c for n in (1, 2, 3) for c in itertools.combinations(range(3), n)]
SOME = [(0,), (1, 2)]


@pytest.mark.parametrize(
    ("used", "backend"),
    [
        *((used, "aot_eager") for used in USED),
        *((used, "inductor") for used in SOME),
        *long(*((used, "inductor") for used in USED if used not in SOME)),
    ],
    ids=str,
)
def test_gradients_are_those_of_eager_whichever_outputs_are_differentiated(used: tuple[int, ...], backend: str) -> None:
    torch.manual_seed(0)
    model, x = Heads(), torch.randn(5, 4)
    opt = graphopt.optimize(model, (x,), backend=backend)
    gradients = []
    for run in (model, opt):
        model.zero_grad(set_to_none=True)
        outputs = run(x)
        sum((i + 1) * outputs[i].pow(3).sum() for i in used).backward()
        gradients.append({n: p.grad for n, p in model.named_parameters()})
    for name, expected in gradients[0].items():
        assert (expected is None) == (gradients[1][name] is None), name
        if expected is not None:
            torch.testing.assert_close(gradients[1][name], expected)


def operators(backward: torch.fx.GraphModule) -> set[str]:
    return {str(n.target) for n in backward.graph.nodes if n.op == "call_function"}


def tangents_of(backward: torch.fx.GraphModule) -> list[str]:
    return [n.name for n in backward.graph.nodes if n.op == "placeholder" and "tangents" in n.name]


def test_an_absent_gradient_leaves_no_zeros_and_no_addition() -> None:
    graph = capture_to_run(Heads(), (torch.randn(5, 4),), {})
    backward = split(specialise(graph, 5), inductor=False).backward
    tangents = tangents_of(backward)
    assert len(tangents) == 3
    loss_only = without_tangents(backward, tangents[1:], tangents)
    targets = operators(loss_only)
    assert not any("add" in t or "full" in t or "softmax" in t for t in targets), targets
    assert sum(node is None for node in output_list(loss_only)) - sum(n is None for n in output_list(backward)) == 2


def test_a_step_is_compiled_for_the_gradient_of_the_loss_alone() -> None:
    model, x = Heads(), torch.randn(5, 4)
    opt = graphopt.optimize(model, (x,), backend="aot_eager")
    opt(x)
    assert opt.last_step is not None
    ((_, backward),) = opt.last_step.halves
    tangents = [n for n in backward.graph.nodes if n.name in tangents_of(backward)]
    assert [bool(node.users) for node in tangents] == [True, False, False]  # autograd calls it without the others
    assert not any("add" in t or "full" in t or "softmax" in t for t in operators(backward)), operators(backward)


def joint(function: Callable[..., Any], *tangents: Tensor) -> fx.GraphModule:
    return make_fx(function, tracing_mode="fake")(*tangents)


def test_what_no_gradient_comes_to_is_absent_whatever_the_operator() -> None:
    def backward(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        return first + torch.cumsum(second, 0), torch.flip(torch.cumsum(second, 0), [0])

    result = without_tangents(joint(backward, torch.ones(3), torch.ones(3)), ["second_1"], ["first_1", "second_1"])
    total, gone = result(torch.ones(3))
    assert torch.equal(total, torch.ones(3))
    assert gone is None
    assert not operators(result)


def test_an_operator_that_reads_a_gradient_that_is_there_gets_zeros_for_the_other() -> None:
    def backward(first: Tensor, second: Tensor) -> tuple[Tensor]:
        return (torch.cat([first, torch.flip(second, [0])]),)

    result = without_tangents(joint(backward, torch.ones(3), torch.ones(2)), ["second_1"], ["first_1", "second_1"])
    assert torch.equal(result(torch.ones(3))[0], torch.tensor([1.0, 1, 1, 0, 0]))


def test_a_term_of_another_dtype_or_shape_is_not_lost_with_the_absent_one() -> None:
    def backward(tangents_1: Tensor, tangents_2: Tensor) -> tuple[Tensor, ...]:
        return torch.ops.aten.add.Tensor(tangents_1, tangents_2), torch.ops.aten.add.Tensor(tangents_2, tangents_1, alpha=2)

    args = torch.ones(3), torch.ones(2, 3, dtype=torch.float64)
    module = joint(backward, *args)
    first, second = [n.name for n in module.graph.nodes if n.op == "placeholder"]
    total, doubled = without_tangents(module, [second], [first, second])(args[0])
    assert torch.equal(total, torch.ones(2, 3, dtype=torch.float64))
    assert torch.equal(doubled, torch.full((2, 3), 2.0, dtype=torch.float64))


class Auxiliary(nn.Module):
    """A loss, and an output of a head of its own through an operator of which autograd's formula is not pointwise."""

    def __init__(self, of: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.head, self.of = nn.Linear(8, 8), nn.Linear(8, 8), of

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(x)
        return hidden.square().mean(), self.of(self.head(hidden))


@pytest.mark.parametrize(
    "of",
    [
        lambda z: z.flip(-1),
        lambda z: z.cumsum(0),
        lambda z: z.roll(1, 0),
        lambda z: nn.functional.pad(z, (1, 1)),
        lambda z: z[:, [2, 0]],
        lambda z: z.max(-1).values,
        lambda z: torch.cat([z, z[:1]]).flip(0),
    ],
)
def test_a_head_that_the_loss_does_not_read_takes_and_trains_nothing(of: Callable[[Tensor], Tensor]) -> None:
    model, x = Auxiliary(of), torch.randn(8, 8)
    assert graphopt.analyze(model, (x,)).flops.step == 4 * 2 * 8**3 - 2 * 8**3
    with pytest.raises(graphopt.BudgetError):
        graphopt.optimize(model, (x,), 0.6, backend="aot_eager")
    opt = graphopt.optimize(model, (x,), 0.8, backend="aot_eager")
    assert set(opt.selected) <= {"body.weight", "body.bias"}


class Spectrum(nn.Module):
    """Its complex eigenvalues make a tangent that is of none of its results."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.eigvals(self.second(torch.tanh(self.first(x)))).abs().square().sum()


def test_a_tangent_that_torch_alone_knows_is_of_no_result(tmp_path: Path) -> None:
    model, x = Spectrum(), torch.randn(4, 4)
    opt = graphopt.optimize(model, (x,), budget=0.8, backend="aot_eager")
    opt(x).backward()
    assert not opt.report.notes
    opt.dump(tmp_path)
    trained = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert set(trained) == opt.selected
    assert opt.report.flops_ratio <= 0.8
    model.zero_grad()
    model(x).backward()
    for name, gradient in trained.items():
        torch.testing.assert_close(gradient, model.get_parameter(name).grad)

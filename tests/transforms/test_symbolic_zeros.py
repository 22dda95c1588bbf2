"""Outputs whose gradient never comes: no zeros are made for them, and gradients are those of eager mode."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

import graphopt
from graphopt.capture import capture_to_run
from graphopt.compat import output_list
from graphopt.lower import lower
from graphopt.specialise import specialise
from graphopt.transforms.symbolic_zeros import expected_results, without_tangents


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


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("used", [c for n in (1, 2, 3) for c in itertools.combinations(range(3), n)], ids=str)
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
    backward = lower(specialise(graph, 5), "aot_eager").halves.backward
    tangents = tangents_of(backward)
    assert len(tangents) == 3
    loss_only = without_tangents(backward, tangents[1:])
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


def test_an_operator_that_is_not_known_to_be_linear_gets_zeros() -> None:
    def backward(tangents_1: Tensor, tangents_2: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ops.aten.add.Tensor(tangents_1, torch.ops.aten.cumsum.default(tangents_2, 0)), tangents_2

    module = torch.fx.experimental.proxy_tensor.make_fx(backward, tracing_mode="fake")(torch.ones(3), torch.ones(3))
    first, second = [n.name for n in module.graph.nodes if n.op == "placeholder"]
    result = without_tangents(module, [second])
    total, gone = result(torch.ones(3))
    assert torch.equal(total, torch.ones(3))
    assert gone is None
    assert first in {n.name for n in result.graph.nodes}


def test_a_term_of_another_dtype_or_shape_is_not_lost_with_the_absent_one() -> None:
    def backward(tangents_1: Tensor, tangents_2: Tensor) -> tuple[Tensor, ...]:
        return torch.ops.aten.add.Tensor(tangents_1, tangents_2), torch.ops.aten.add.Tensor(tangents_2, tangents_1, alpha=2)

    args = torch.ones(3), torch.ones(2, 3, dtype=torch.float64)
    module = torch.fx.experimental.proxy_tensor.make_fx(backward, tracing_mode="fake")(*args)
    second = [n.name for n in module.graph.nodes if n.op == "placeholder"][1]
    total, doubled = without_tangents(module, [second])(args[0])
    assert torch.equal(total, torch.ones(2, 3, dtype=torch.float64))
    assert torch.equal(doubled, torch.full((2, 3), 2.0, dtype=torch.float64))

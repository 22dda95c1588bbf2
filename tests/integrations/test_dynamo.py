from typing import Any

import pytest
import torch
from graphopt.passes import Lsp
from torch import nn

from graphopt.errors import InputError
from graphopt.integrations.dynamo import graphopt_backend
from tests import zoo
from tests.messages import warnings_of


@pytest.mark.parametrize("name", ["mlp", "bert", "cnn"])
def test_torch_compile_with_a_budget(name: str) -> None:
    torch.compiler.reset()
    model, inputs = zoo.make(name, 4)
    reference, _ = zoo.make(name, 4)
    compiled = torch.compile(model, backend="graphopt", options={"budget": 0.5, "backend": "aot_eager"})
    trained = set()
    for batch in (4, 3, 2):
        model.zero_grad()
        reference.zero_grad()
        part = zoo.rows(inputs, batch)
        loss = zoo.loss_of(zoo.call(compiled, part))
        loss.backward()
        expected = zoo.loss_of(zoo.call(reference, part))
        expected.backward()
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        assert 0 < len(gradients) < len(list(model.parameters()))
        trained = trained or set(gradients)
        assert set(gradients) == trained  # whatever the batch, the same tensors
        for n, gradient in gradients.items():
            torch.testing.assert_close(gradient, dict(reference.named_parameters())[n].grad, rtol=1e-4, atol=1e-5)


def test_eval_and_no_grad_pass_through() -> None:
    torch.compiler.reset()
    model = nn.Linear(3, 2)
    compiled = torch.compile(model, backend="graphopt", options={"budget": 0.9, "backend": "aot_eager"})
    x = torch.randn(4, 3)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))


def test_bad_options_are_refused() -> None:
    torch.compiler.reset()
    model = torch.compile(nn.Linear(3, 2), backend="graphopt", options={"bugdet": 0.5})
    with pytest.raises(Exception, match="bugdet"):
        model(torch.randn(4, 3))
    for options in ({"bugdet": 0.5}, {"backend": "tensorrt"}):
        with pytest.raises(InputError, match=r"bugdet|tensorrt"):
            graphopt_backend(torch.fx.symbolic_trace(nn.Linear(3, 2)), [torch.randn(4, 3)], options=options)


def test_compressed_gradients_are_refused_with_the_way_to_have_them() -> None:
    torch.compiler.reset()
    model = torch.compile(nn.Linear(3, 2), backend="graphopt", options={"passes": [Lsp(subspace=2, nonzeros=1)]})
    with pytest.raises(Exception, match=r"lsp needs an optimizer .* opt.make_optimizer\(\)"):
        model(torch.randn(4, 3))


def test_a_number_that_changes_takes_effect() -> None:
    """Dynamo passes it as an input from its second value on."""
    torch.compiler.reset()
    model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.0), nn.Linear(16, 3))
    compiled = torch.compile(model, backend="graphopt", options={"backend": "aot_eager"})
    x = torch.randn(4, 6)
    for p in (0.0, 0.5, 1.0):
        model[1].p = p
        torch.manual_seed(0)
        found = torch.autograd.grad(compiled(x).square().mean(), list(model.parameters()), allow_unused=True)
        torch.manual_seed(0)
        expected = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
        torch.testing.assert_close([e if f is None else f for f, e in zip(found, expected, strict=True)], list(expected))


class Broken(nn.Module):
    """Three graphs: two with parameters, of which they share some, and the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.first, self.second, self.third = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.third(self.first(self.embedding(x)).relu()).relu()
        torch._dynamo.graph_break()
        hidden = self.second(nn.functional.linear(hidden, self.third.weight).relu())
        logits = nn.functional.linear(hidden, self.first.weight).relu() @ self.embedding.weight.t()
        torch._dynamo.graph_break()
        return nn.functional.cross_entropy(logits.flatten(0, 1), x.flatten())


@pytest.mark.parametrize("budget", [None, 0.9, 0.8, 0.7, "auto"])
def test_a_tensor_of_several_graphs_gets_its_whole_gradient_or_none(budget: Any) -> None:
    torch.compiler.reset()
    model, x = Broken(), torch.randint(0, 50, (4, 8))
    expected = dict(zip(dict(model.named_parameters()), torch.autograd.grad(model(x), list(model.parameters())), strict=True))
    compiled = torch.compile(model, backend="graphopt", options={"budget": budget, "backend": "aot_eager"})
    for _ in range(2):
        model.zero_grad()
        compiled(x).backward()
        trained = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert trained
        assert (len(trained) == len(expected)) == (budget is None)
        for name, gradient in trained.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5, msg=name)


def test_a_part_of_a_model_that_cannot_keep_to_the_budget_is_trained_in_full() -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.above, self.below = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.below(x)
            torch._dynamo.graph_break()
            return self.above(x).square().mean()

    torch.compiler.reset()
    model, options = Halves(), {"budget": 0.3, "backend": "aot_eager"}
    with warnings_of() as told:
        torch.compile(model, backend="graphopt", options=options)(torch.randn(4, 8)).backward()
    assert all(p.grad is not None for p in model.parameters())
    assert any("one of the graphs into which torch.compile breaks the model trains all of its 2 tensors" in t for t in told)
    whole = torch.compile(nn.Linear(8, 8), backend="graphopt", options=options)
    with pytest.raises(Exception, match="Smallest feasible"):
        whole(torch.randn(4, 8))


def test_a_function_without_parameters_is_compiled_as_it_is() -> None:
    torch.compiler.reset()
    loss = torch.compile(nn.functional.cross_entropy, backend="graphopt", options={"budget": 0.5, "backend": "aot_eager"})
    logits, labels = torch.randn(4, 3, requires_grad=True), torch.tensor([0, 1, 2, 0])
    (found,) = torch.autograd.grad(loss(logits, labels), logits)
    (expected,) = torch.autograd.grad(nn.functional.cross_entropy(logits, labels), logits)
    torch.testing.assert_close(found, expected)

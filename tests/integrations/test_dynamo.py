import pytest
import torch
from graphopt.passes import Lsp
from torch import nn

from tests import zoo


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

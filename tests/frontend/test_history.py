"""Gradients of a part's inputs are computed only where they lead to something that is trained."""

from __future__ import annotations

import copy

import pytest
import torch
from graphopt.passes import GreenTrainer
from torch import Tensor, nn

import graphopt
from graphopt.frontend import running
from graphopt.frontend.region import needs_gradient, tensor_names
from tests.long_forms import long


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return 2 * ctx.saved_tensors[0] * gradient


def test_a_path_to_a_wanted_leaf_is_found_and_what_is_out_of_sight_counts_as_one() -> None:
    a, b = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    inner = a * 2
    product = inner.exp() * b

    def only(leaf: Tensor):  # type: ignore[no-untyped-def]
        return lambda found: found is leaf

    assert needs_gradient(product, only(a))
    assert needs_gradient(product, only(b))
    assert not needs_gradient(inner, only(b))
    assert not needs_gradient(product.detach(), only(a))
    assert needs_gradient(a, only(a))
    assert not needs_gradient(a, only(b))
    assert needs_gradient(Square.apply(a) + 1, only(b))
    inner.retain_grad()
    assert needs_gradient(inner, only(b))
    hooked = a * 3
    hooked.register_hook(lambda gradient: gradient)
    assert needs_gradient(hooked, only(b))


class Parts(nn.Module):
    """A frozen-in-effect first part, an intermediate that becomes a leaf, and two more parts."""

    def __init__(self, leaf: bool) -> None:
        super().__init__()
        self.first, self.second, self.third, self.last = (nn.Linear(6, 6) for _ in range(4))
        self.leaf = leaf

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        if self.leaf:
            hidden = hidden.detach()
            print(end="")
            hidden.requires_grad = True
        print(end="")
        hidden = torch.tanh(self.second(hidden))
        print(end="")
        return self.last(torch.tanh(self.third(hidden))).square().mean()


@pytest.mark.parametrize(
    ("leaf", "backend"), [(False, "aot_eager"), (True, "aot_eager"), (False, "inductor"), *long((True, "inductor"))]
)
def test_parts_below_all_that_is_trained_have_no_backward(leaf: bool, backend: str) -> None:
    torch.manual_seed(0)
    model, x = Parts(leaf), torch.randn(5, 6)
    reference = copy.deepcopy(model)
    reference(x).backward()
    for train in (("last.weight",), ("third.bias", "last.weight"), ("second.weight",)):
        opt = graphopt.optimize(model, (x,), passes=[GreenTrainer(train=train)], backend=backend)
        for _ in range(2):
            model.zero_grad()
            opt(x).backward()
            found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            assert set(found) == set(train)
            for name, gradient in found.items():
                torch.testing.assert_close(gradient, reference.get_parameter(name).grad)
        assert opt.last_step is not None
        backward = sum(str(n.target).startswith("aten.mm") for _, half in opt.last_step.halves for n in half.graph.nodes)
        if train == ("last.weight",) and not leaf:  # of a leaf that forward makes, somebody may ask for the gradient
            assert backward == 1


def test_names_are_looked_up_once_for_all_leaves_that_may_be_behind_an_input(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up: list[int] = []

    class Eager(Parts):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.before(x))

        @torch.compiler.disable
        def before(self, x: Tensor) -> Tensor:
            return self.second(self.third(x))

    def names(model: nn.Module) -> dict[int, tuple[str, ...]]:
        looked_up.append(1)
        return tensor_names(model)

    model, x = Eager(False), torch.randn(5, 6)
    opt = graphopt.optimize(model, (x,), passes=[GreenTrainer(train=("last.weight",))], backend="aot_eager")
    opt(x).backward()
    monkeypatch.setattr(running, "tensor_names", names)
    opt(x).backward()
    assert len(looked_up) == 1


def test_the_callers_inputs_keep_their_gradient() -> None:
    torch.manual_seed(0)
    model = Parts(False)
    reference = copy.deepcopy(model)
    x, y = (torch.ones(5, 6).requires_grad_() for _ in range(2))
    opt = graphopt.optimize(model, (x,), passes=[GreenTrainer(train=("last.weight",))], backend="aot_eager")
    for _ in range(2):
        x.grad = y.grad = None
        opt(x).backward()
        reference(y).backward()
        torch.testing.assert_close(x.grad, y.grad)


class Held(Parts):
    """Trains tensors that are no parameters: one of a part, one of eager mode between two parts."""

    def __init__(self) -> None:
        super().__init__(False)
        self.scale = torch.ones(6, requires_grad=True)
        self.shift = torch.zeros(6, requires_grad=True)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x)) * self.scale
        torch._dynamo.disable(lambda: None)()
        hidden = self._shifted(hidden)
        return self.last(torch.tanh(self.second(hidden))).square().mean()

    @torch._dynamo.disable
    def _shifted(self, hidden: Tensor) -> Tensor:
        return hidden.detach() + self.shift if self.leaf else hidden + self.shift


@pytest.mark.parametrize("apart", [False, True])
def test_trained_tensors_that_are_no_parameters_keep_their_gradient(apart: bool) -> None:
    torch.manual_seed(0)
    model, x = Held(), torch.randn(5, 6)
    model.leaf = apart
    model(x).backward()
    wanted = model.scale.grad, model.shift.grad
    opt = graphopt.optimize(model, (x,), passes=[GreenTrainer(train=("last.weight",))], backend="aot_eager")
    for _ in range(2):
        model.scale.grad = model.shift.grad = None
        opt(x).backward()
        for found, gradient in zip((model.scale.grad, model.shift.grad), wanted, strict=True):
            assert (found is None) == (gradient is None)
            if gradient is not None:
                torch.testing.assert_close(found, gradient)

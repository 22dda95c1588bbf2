"""Outputs and buffers as eager mode has them: views, aliases, updates, layouts, precision."""

import copy
from typing import Any

import pytest
import torch
from graphopt.passes import Recompute
from torch import Tensor, nn

import graphopt
from graphopt.calls import flatten_call
from graphopt.capture import capture, capture_to_run
from graphopt.lower import lower
from graphopt.runtime.supply import Supply
from graphopt.runtime.uniforms import Uniforms
from tests import zoo
from tests.long_forms import long
from tests.measure import peak_and_rest


class Aliases(nn.Module):
    """Returns an input, a view of an input, two views of one intermediate, and one tensor twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.linear(x)
        return {"x": x, "view": x[:, :2], "left": y[:, :3], "right": y[:, 3:], "whole": y, "again": y, "sum": y.sum()}


def test_aliased_outputs_have_the_values_and_gradients_of_eager() -> None:
    model = Aliases()
    x = torch.randn(5, 4)
    opt = graphopt.optimize(model, (x,), backend="aot_eager")
    ours, theirs = opt(x), model(x)
    for key in theirs:
        torch.testing.assert_close(ours[key], theirs[key])
        assert ours[key].requires_grad == theirs[key].requires_grad, key
    assert ours["x"] is x
    for outputs in (theirs, ours):
        model.zero_grad()
        (outputs["left"].square().sum() + 2 * outputs["right"].sum() + outputs["again"].sum() + 3 * outputs["sum"]).backward()
        if outputs is theirs:
            expected = model.linear.weight.grad.clone()
    torch.testing.assert_close(model.linear.weight.grad, expected)


def test_batch_norm_buffers_are_updated_as_in_eager() -> None:
    model, inputs = zoo.make("cnn", 6)
    reference, _ = zoo.make("cnn", 6)
    opt = graphopt.optimize(model, inputs, budget=0.7, backend="aot_eager")
    for key, value in reference.named_buffers():
        assert torch.equal(value, dict(model.named_buffers())[key])
    for _ in range(3):
        zoo.call(opt, inputs)
        zoo.call(reference, inputs)
    for key, value in reference.named_buffers():
        torch.testing.assert_close(dict(model.named_buffers())[key], value)


class RunningScale(nn.Module):
    """Multiplies by what a buffer was before the step updates it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)
        self.register_buffer("scale", torch.full((8,), 4.0))

    def forward(self, x: Tensor) -> Tensor:
        before = self.scale.clone()
        hidden = torch.tanh(self.first(x)) * before.sqrt()
        with torch.no_grad():
            self.scale.mul_(0.5).add_(hidden.detach().abs().mean(0))
        return self.second(torch.tanh(hidden)).square().mean()


@pytest.mark.parametrize("again", [False, True])
def test_a_backward_reads_a_buffer_as_it_was_before_the_step_changed_it(again: bool) -> None:
    model, x = RunningScale(), torch.randn(6, 4)
    reference = copy.deepcopy(model)
    reference(x).backward()
    segments = tuple(s.name for s in Recompute().applicable(capture_to_run(model, (x,), {}, 0))) if again else ()
    opt = graphopt.optimize(model, (x,), passes=[Recompute(segments)], backend="aot_eager")
    opt(x).backward()
    assert opt.last_step is not None
    torch.testing.assert_close(model.scale, reference.scale)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_a_second_backward_is_refused_and_retained_graphs_work() -> None:
    model, inputs = zoo.make("mlp", 4)
    opt = graphopt.optimize(model, inputs, backend="aot_eager")
    loss = zoo.call(opt, inputs)
    loss.backward(retain_graph=True)
    once = model.first.weight.grad.clone()
    loss.backward()
    torch.testing.assert_close(model.first.weight.grad, 2 * once)
    with pytest.raises(RuntimeError, match="second time|freed"):
        loss.backward()


def test_an_output_that_is_detached_stays_so_in_a_lowered_graph() -> None:
    class Detached(nn.Linear):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return super().forward(x).sum(), x.detach() * 2

    model, x = Detached(4, 4), torch.randn(2, 4, requires_grad=True)
    graph = capture(model, (x,), symbolic=False)
    outputs = lower(graph, "aot_eager", Supply(Uniforms(), {}))(flatten_call((x,), {}), dict(model.named_parameters()))
    assert [output.requires_grad for output in outputs] == [True, False]


def test_inputs_that_require_a_gradient_get_it() -> None:
    model, (x, labels) = zoo.make("mlp", 4)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    opt = graphopt.optimize(model, (a, labels), backend="aot_eager")
    opt(a, labels).backward()
    model(b, labels).backward()
    torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize(("name", "dtype"), [("llama", torch.bfloat16), ("mlp", torch.float16), *long(("llama", torch.float16))])
def test_half_precision_models(name: str, dtype: torch.dtype) -> None:
    model, inputs = zoo.make(name, 4, dtype)
    reference, _ = zoo.make(name, 4, dtype)
    opt = graphopt.optimize(model, inputs, budget=0.6, backend="aot_eager")
    zoo.loss_of(zoo.call(opt, inputs)).backward()
    zoo.loss_of(zoo.call(reference, inputs)).backward()
    expected = dict(reference.named_parameters())
    for name in opt.selected:
        gradient = dict(model.named_parameters())[name].grad
        assert gradient.dtype == dtype
        torch.testing.assert_close(gradient, expected[name].grad, rtol=0.05, atol=1e-3)


def test_autocast_is_compiled_and_told_apart() -> None:
    model, inputs = zoo.make("bert", 4, layers=1)
    reference, _ = zoo.make("bert", 4, layers=1)
    opt = graphopt.optimize(model, inputs, backend="aot_eager")
    for enabled in (True, False, True):
        model.zero_grad()
        reference.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            ours, theirs = zoo.call(opt, inputs), zoo.call(reference, inputs)
        assert ours.logits.dtype == theirs.logits.dtype == (torch.bfloat16 if enabled else torch.float32)
        ours.loss.backward()
        theirs.loss.backward()
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            assert p.grad.dtype == q.grad.dtype
            torch.testing.assert_close(p.grad, q.grad, rtol=0.1, atol=5e-3 if enabled else 1e-5)
    assert opt.counters.captures == 1
    assert opt.counters.compilations <= 2  # with and without autocast


def test_other_memory_layouts_of_inputs_and_weights() -> None:
    model, (x, labels) = zoo.make("cnn", 4)
    opt = graphopt.optimize(model, (x, labels), backend="aot_eager")
    expected = opt(x, labels)["logits"].detach()
    again, _ = zoo.make("cnn", 4)
    model.load_state_dict(again.state_dict())
    model.to(memory_format=torch.channels_last)
    torch.testing.assert_close(opt(x.contiguous(memory_format=torch.channels_last), labels)["logits"], expected)


@pytest.mark.parametrize(("name", "backend"), [("bert", "aot_eager"), ("mlp", "inductor"), *long(("bert", "inductor"))])
def test_after_a_step_nothing_is_left_but_the_gradients(name: str, backend: str) -> None:
    model, inputs = zoo.make(name, 16)
    opt = graphopt.optimize(zoo.in_one_block(model), inputs, backend=backend)

    def step() -> None:
        zoo.loss_of(zoo.call(opt, inputs)).backward()

    for _ in range(2):
        step()
        model.zero_grad()
    _, rest = peak_and_rest(step)
    assert rest == sum(p.grad.numel() * p.grad.element_size() for p in model.parameters() if p.grad is not None)


def test_a_backend_of_the_users_can_compile_what_it_is_given() -> None:
    model, inputs = zoo.make("mlp", 4)
    compiled = []

    def backend(module: torch.fx.GraphModule, examples: list[Tensor]) -> Any:
        compiled.append(module)
        assert "def forward" in module.recompile().src
        return torch.compile(module, fullgraph=True, backend="eager")

    zoo.call(graphopt.optimize(model, inputs, backend=backend), inputs).backward()
    reference, _ = zoo.make("mlp", 4)
    zoo.call(reference, inputs).backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in reference.parameters()])
    assert len(compiled) == 2


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_gradients_of_gradients_are_refused(backend: str) -> None:
    """As of a gradient penalty: without a word, it would have no effect."""
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    x = torch.randn(4, 6, requires_grad=True)
    opt = graphopt.optimize(model, (x,), backend=backend)
    (gradient,) = torch.autograd.grad(opt(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        gradient.square().sum().backward()
    (found,) = torch.autograd.grad(opt(x).sum(), x)
    torch.testing.assert_close(found, torch.autograd.grad(model(x).sum(), x)[0])

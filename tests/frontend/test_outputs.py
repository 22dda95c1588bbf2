"""Outputs beside the loss: they cost nothing until somebody differentiates them, and then their gradients are exact."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt
from graphopt.errors import GraphoptError
from graphopt.frontend.outputs import with_backward
from tests.frontend.stepping import assert_gradients, assert_steps_as_in_eager, generated
from tests.long_forms import long
from tests.messages import warnings_of


class Heads(nn.Module):
    """A loss, the logits that it is computed from, and a head that it does not read."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.body, self.head, self.other = nn.Linear(5, 6), nn.Linear(6, 3), nn.Linear(6, 2)
        self.dropout = nn.Dropout(dropout)
        self.norm = nn.BatchNorm1d(6)
        self.double()  # sums are taken in another order where a step runs again

    def forward(self, x: Tensor) -> dict[str, Any]:
        hidden = self.dropout(torch.tanh(self.norm(self.body(x))))
        logits = self.head(hidden)
        return {"loss": logits.square().mean(), "logits": logits, "more": [torch.softmax(self.other(hidden), -1), None, 3]}


X = (torch.zeros(4, 5, dtype=torch.float64),)


def rows(step: int) -> Tensor:
    return generated(step, 4, 5).double()


Loss = Callable[[dict[str, Any]], Tensor]

LOSSES: dict[str, Loss] = {
    "loss": lambda out: out["loss"],
    "logits": lambda out: out["logits"].pow(3).sum(),
    "other": lambda out: out["more"][0].pow(3).sum(),
    "loss and logits": lambda out: out["loss"] + out["logits"].pow(3).sum(),
    "all": lambda out: out["loss"] * out["logits"].sum() + out["more"][0].pow(3).sum(),
}


@pytest.mark.parametrize(
    ("used", "backend"),
    [
        *((used, "aot_eager") for used in LOSSES),
        ("loss and logits", "inductor"),
        *long(*((used, "inductor") for used in LOSSES if used != "loss and logits")),
    ],
)
def test_gradients_are_exact_whichever_outputs_are_differentiated(used: str, backend: str) -> None:
    """And None, not zeros, for what they do not depend on; buffers are updated once a step."""

    def call(called: Any, model: Any, step: int) -> Tensor:
        return LOSSES[used](called(rows(step)))

    assert_steps_as_in_eager(Heads(), X, call, backend=backend)


@pytest.mark.parametrize("used", ["loss", "loss and logits", "all"])
def test_under_a_budget_what_is_not_selected_has_no_gradient(used: str) -> None:
    assert_steps_as_in_eager(Heads(), X, lambda called, _, step: LOSSES[used](called(rows(step))), 0.7)


def test_which_outputs_are_differentiated_may_change_from_step_to_step() -> None:
    order = [LOSSES[name] for name in ("loss", "logits", "loss", "other", "all", "loss")]

    def call(called: Any, model: Any, step: int) -> Tensor:
        return order[step](called(rows(step)))

    def compare(budget: float | None) -> None:
        model = Heads()
        eager = copy.deepcopy(model)
        opt = graphopt.optimize(model, X, budget, backend="aot_eager")
        for step in range(len(order)):
            for module, called in ((eager, eager), (model, opt)):
                module.zero_grad()
                call(called, module, step).backward()
            for name, parameter in model.named_parameters():
                expected = dict(eager.named_parameters())[name].grad
                if not opt.selects_tensor(name):
                    assert parameter.grad is None
                elif expected is None:  # compiled for outputs that need it, whose gradient is zero here
                    assert parameter.grad is None or not parameter.grad.any()
                else:
                    torch.testing.assert_close(parameter.grad, expected)
            torch.testing.assert_close(dict(model.named_buffers()), dict(eager.named_buffers()))

    for budget in (None, 0.7):
        compare(budget)


def test_the_structure_and_the_other_values_are_the_models() -> None:
    model = Heads()
    opt = graphopt.optimize(model, X, backend="aot_eager")
    x = rows(0)
    ours, theirs = opt(x), copy.deepcopy(model)(x)
    assert list(ours) == list(theirs)
    assert ours["more"][1:] == [None, 3]
    torch.testing.assert_close(ours["logits"], theirs["logits"])
    assert ours["logits"].requires_grad
    assert ours["more"][0].requires_grad


@pytest.mark.parametrize("budget", [None, 0.6])
def test_a_parameter_among_the_outputs_is_returned_as_itself(budget: float | None) -> None:
    class Shown(Heads):
        def forward(self, x: Tensor) -> dict[str, Any]:
            return {**super().forward(x), "weight": self.other.weight, "again": self.body.weight}

    model = Shown()
    opt = graphopt.optimize(model, X, budget=budget, backend="aot_eager")
    for step in range(3):
        model.zero_grad()
        output = opt(rows(step))
        assert output["weight"] is model.other.weight
        assert output["again"] is model.body.weight
        (output["loss"] + output["weight"].square().sum()).backward()
        torch.testing.assert_close(model.other.weight.grad, 2 * model.other.weight.detach())


def test_the_second_step_needs_no_rerun() -> None:
    """The step that is compiled for both runs the model once."""
    runs: list[int] = []

    class Counted(Heads):
        def forward(self, x: Tensor) -> dict[str, Any]:
            count(x)
            return super().forward(x)

    @torch.library.custom_op("graphopt_test::count", mutates_args=())
    def count(x: Tensor) -> None:
        runs.append(1)

    count.register_fake(lambda x: None)
    model = Counted()
    opt = graphopt.optimize(model, X, backend="aot_eager")
    added = []
    for step in range(3):
        before = len(runs)
        output = opt(rows(step))
        (output["loss"] + output["logits"].sum()).backward()
        added.append(len(runs) - before)
    if added != [0, 0, 0]:  # torch may drop an operator without a result
        assert added == [2, 1, 1]
    compilations = opt.counters.compilations
    assert compilations <= 3
    output = opt(rows(3))
    (output["loss"] + output["logits"].sum()).backward()
    assert opt.counters.compilations == compilations


def test_an_output_that_is_never_differentiated_costs_nothing() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    model = Heads()
    opt = graphopt.optimize(model, X, backend="aot_eager")
    opt(rows(0))["loss"].backward()
    with FlopCounterMode(display=False) as counter:
        opt(rows(0))["loss"].backward()
    forward, backward = 2 * 4 * (5 * 6 + 6 * 3 + 6 * 2), 2 * 4 * (5 * 6 + 2 * 6 * 3)  # none of the other head
    assert counter.get_total_flops() == forward + backward
    assert model.other.weight.grad is None


def test_gradients_by_autograd_grad() -> None:
    model = Heads()
    eager = copy.deepcopy(model)
    opt = graphopt.optimize(model, X, backend="aot_eager")
    for step in range(3):
        x, y = (rows(step).requires_grad_() for _ in range(2))
        found = torch.autograd.grad(opt(x)["logits"].pow(3).sum(), [x, model.body.weight, model.head.weight])
        expected = torch.autograd.grad(eager(y)["logits"].pow(3).sum(), [y, eager.body.weight, eager.head.weight])
        torch.testing.assert_close(found, expected)
    assert all(p.grad is None for p in model.parameters())


def test_two_backwards_one_for_the_loss_and_one_for_the_logits() -> None:
    model = Heads()
    eager = copy.deepcopy(model)
    opt = graphopt.optimize(model, X, backend="aot_eager")
    for module, called in ((eager, eager), (model, opt)):
        module.zero_grad()
        output = called(rows(0))
        output["loss"].backward(retain_graph=True)
        output["logits"].pow(3).sum().backward()
    assert_gradients(model, eager)


def test_gradients_of_inputs_before_the_model() -> None:
    """The model is a part of a larger one."""
    model, before = Heads(), nn.Linear(5, 5).double()
    eager, eager_before = copy.deepcopy(model), copy.deepcopy(before)
    opt = graphopt.optimize(model, X, backend="aot_eager")
    for step in range(2):
        for module, called, layer in ((eager, eager, eager_before), (model, opt, before)):
            module.zero_grad()
            layer.zero_grad()
            LOSSES["all"](called(layer(rows(step)))).backward()
        assert_gradients(model, eager)
        assert_gradients(before, eager_before)


def test_dropout_is_the_same_where_the_step_runs_again() -> None:
    """What was returned is what is differentiated: the finite difference under the same seed says so."""
    model = Heads(dropout=0.5)
    opt = graphopt.optimize(model, X, backend="aot_eager")
    eager = copy.deepcopy(model)
    for step in range(2):
        for module, called in ((eager, eager), (model, opt)):
            module.zero_grad()
            torch.manual_seed(step)
            LOSSES["loss and logits"](called(rows(step))).backward()
            after = torch.rand(1)
        assert_gradients(model, eager)
        torch.manual_seed(step)
        eager_again = copy.deepcopy(eager)
        eager_again(rows(step))
        assert torch.equal(torch.rand(1), after)  # the stream goes on as after one step


def test_dropout_that_cannot_be_drawn_again_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on other devices than the CPU, or where the user draws from a stream of their own."""
    monkeypatch.setattr(torch, "set_rng_state", lambda state: None)
    model = Heads(dropout=0.5)
    opt = graphopt.optimize(model, X, backend="aot_eager")
    with warnings_of() as warned:
        LOSSES["loss and logits"](opt(rows(0))).backward()
    assert ["dropout was drawn again" in text for text in warned] == [True]
    assert warned == opt.report.notes
    with warnings_of() as warned:
        LOSSES["loss and logits"](opt(rows(1))).backward()
    assert warned == []


class Writing(Heads):
    def forward(self, x: Tensor) -> dict[str, Any]:
        x.mul_(2)
        return super().forward(x)


def test_an_input_that_forward_changes_is_an_error_or_exact_and_later_steps_are_exact() -> None:
    model = Writing()
    eager = copy.deepcopy(model)
    opt = graphopt.optimize(model, X, backend="aot_eager")
    for step in range(3):
        ours, theirs = rows(step), rows(step)
        for module in (eager, model):
            module.zero_grad()
        LOSSES["loss and logits"](eager(theirs)).backward()
        try:
            LOSSES["loss and logits"](opt(ours)).backward()
        except GraphoptError:
            assert step == 0
            eager.load_state_dict(model.state_dict())
            continue
        torch.testing.assert_close(ours, theirs)
        for module in (eager, model):  # later steps are compiled for all outputs, and have zeros for what is not asked for
            for parameter in module.other.parameters():
                assert parameter.grad is None or not parameter.grad.any()
                parameter.grad = None
        assert_gradients(model, eager)
        torch.testing.assert_close(dict(model.named_buffers()), dict(eager.named_buffers()))


def test_an_attribute_that_forward_counts_is_not_counted_twice() -> None:
    class Counting(Heads):
        calls = 0

        def forward(self, x: Tensor) -> dict[str, Any]:
            self.calls += 1
            return super().forward(x)

    assert_steps_as_in_eager(Counting(), X, lambda called, _, step: LOSSES["all"](called(rows(step))), state=lambda m: m.calls)


def test_weights_that_were_changed_before_the_backward_are_refused() -> None:
    """As in eager mode: the step cannot run again with what is no longer there."""
    model = Heads()
    opt = graphopt.optimize(model, X, backend="aot_eager")
    output = opt(rows(0))
    with torch.no_grad():
        model.head.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output["logits"].sum().backward()


@pytest.mark.parametrize("output", ["loss", "logits"])
def test_gradients_of_gradients_are_as_in_eager_or_refused(output: str) -> None:
    """As of a gradient penalty: without a word, it would have no effect."""
    model = Heads()
    eager = copy.deepcopy(model)
    opt = graphopt.optimize(model, X, backend="aot_eager")

    def penalised(called: Any) -> None:
        x = rows(0).requires_grad_()
        out = called(x)
        (gradient,) = torch.autograd.grad(out[output].sum(), x, create_graph=True)
        (out["loss"] + gradient.square().sum()).backward()

    penalised(eager)
    for _ in range(2):
        model.zero_grad()
        try:
            penalised(opt)
        except (GraphoptError, RuntimeError):  # ours, or torch's own
            continue
        assert_gradients(model, eager)


def test_outputs_that_do_not_begin_with_a_scalar_are_left_alone() -> None:
    x = torch.ones(3, requires_grad=True)
    for output in (x.sum(), {"a": x * 2, "b": x.sum()}, (torch.tensor(1.0), x * 2)):
        same, positions = with_backward(output, frozenset({0}))
        assert same is output
        assert positions == ()
    (loss, logits, kept), positions = with_backward((x.sum(), x * 2, x * 3), frozenset({0, 2}))
    assert positions == (1,)
    gradients = [torch.autograd.grad(t.sum(), x, retain_graph=True)[0] for t in (loss, logits, kept)]
    assert [float(gradient[0]) for gradient in gradients] == [1, 2, 3]  # nothing is traced here: all have their backward


class Opaque:
    """A class that torch cannot look into."""

    def __init__(self, loss: Tensor, other: Tensor) -> None:
        self.loss, self.other = loss, other


class ReturnsOpaque(Heads):
    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        hidden = torch.tanh(self.body(x))
        return Opaque(self.head(hidden).square().mean(), self.other(hidden))


class LossLast(Heads):
    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        hidden = torch.tanh(self.body(x))
        return {"other": self.other(hidden), "loss": self.head(hidden).square().mean()}


def test_what_only_outputs_without_a_gradient_depend_on_is_not_moved() -> None:
    """AOTAutograd may give zeros where eager mode gives None, if no output can be taken for the loss."""
    for model, loss_of in ((ReturnsOpaque(), lambda out: out.loss), (LossLast(), lambda out: out["loss"])):
        opt = graphopt.optimize(model, X, backend="aot_eager")
        loss_of(opt(rows(0))).backward()
        gradient = model.other.weight.grad
        assert gradient is None or not gradient.any()
        model.zero_grad()

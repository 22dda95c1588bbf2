"""A model's numbers, flags, submodules and hooks are as they are now, not as they were when it was traced."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from peft.helpers import rescale_adapter_scale
from torch import Tensor, nn

import graphopt
from tests import zoo
from tests.long_forms import long
from tests.messages import warnings_of

SHIFT = {"tensor": torch.zeros(3)}
FACTOR = torch.ones(3)


class Layers(nn.Module):
    """Something of every kind that `forward` may look at."""

    sign = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 16), nn.Linear(16, 3)
        self.dropout, self.activation = nn.Dropout(0.0), nn.ReLU()
        self.scale, self.options, self.mask = 1.0, {"shift": 0.0, "signs": [1.0, -1.0]}, torch.ones(16)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.dropout(self.activation(self.first(x))) * self.mask
        hidden = self.second(hidden) * FACTOR + SHIFT["tensor"]
        return hidden * self.scale * self.sign + self.options["shift"] + sum(self.options["signs"])


def gradients(model: nn.Module, run: Callable[..., Any], *inputs: Any, **named: Any) -> dict[str, Tensor]:
    """The loss and its gradients."""
    model.zero_grad()
    torch.manual_seed(0)
    output = run(*inputs, **named)
    loss = output.square().mean() if isinstance(output, Tensor) else zoo.loss_of(output)
    loss.backward()
    return {"loss": loss.detach(), **{n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}}


def assert_as_in_eager(model: nn.Module, opt: nn.Module, *inputs: Any, **named: Any) -> None:
    reference = copy.deepcopy(model)
    torch.testing.assert_close(gradients(model, opt, *inputs, **named), gradients(reference, reference, *inputs, **named))


def assert_steps_as_in_eager(model: Any, opt: Any, *inputs: Any, steps: int = 4) -> Any:
    """Several steps of the model and of a copy of it, which is returned: values, gradients, buffers and plain tensors."""
    reference = copy.deepcopy(model)
    for _ in range(steps):
        torch.testing.assert_close(gradients(model, opt, *inputs), gradients(reference, reference, *inputs))
        torch.testing.assert_close(dict(model.named_buffers()), dict(reference.named_buffers()))
        torch.testing.assert_close(model.mask, reference.mask)
    assert opt.model_runs == 0
    return reference


def doubled(layer: nn.Linear, x: Tensor) -> Tensor:
    return 2 * nn.functional.linear(x, layer.weight, layer.bias)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a number": lambda m: setattr(m, "scale", 3.0),
    "a number in a dict": lambda m: m.options.update(shift=0.5),
    "the length of a list": lambda m: m.options["signs"].append(2.0),
    "a submodule's number": lambda m: setattr(m.dropout, "p", 0.5),
    "a submodule": lambda m: setattr(m, "activation", nn.Tanh()),
    "a tensor that is no buffer": lambda m: setattr(m, "mask", torch.full((16,), 2.0)),
    "an attribute of the class": lambda m: setattr(type(m), "sign", -1.0),
    "a tensor in a global": lambda m: globals().update(FACTOR=torch.full((3,), 2.0)),
    "a tensor in a global dict": lambda m: SHIFT.update(tensor=torch.ones(3)),
    "such a tensor's values": lambda m: m.mask.mul_(2.0),
    "a hook": lambda m: m.first.register_forward_hook(lambda module, inputs, output: output * 2),
    "the forward of a submodule": lambda m: setattr(m.first, "forward", types.MethodType(doubled, m.first)),
}


def test_what_is_set_on_the_optimised_model_is_set_on_the_model() -> None:
    """As with torch.compile's wrapper; what libraries note of a wrapper stays with it."""
    model, x = Layers(), torch.randn(4, 6)
    opt = graphopt.optimize(model, (x,), backend="aot_eager")
    assert_as_in_eager(model, opt, x)
    opt.scale, opt.sign, opt.activation = 3.0, -1.0, nn.Tanh()
    assert (model.scale, model.sign, type(model.activation)) == (3.0, -1.0, nn.Tanh)
    assert_as_in_eager(model, opt, x)
    opt.remark, opt._remark = "the model's", "the wrapper's"
    assert (model.remark, hasattr(model, "_remark"), opt._remark) == ("the model's", False, "the wrapper's")
    del opt.remark, opt._remark, opt.sign
    assert not any(hasattr(module, name) for module in (model, opt) for name in ("remark", "_remark"))
    assert model.sign == 1.0  # the class's
    opt.training = False
    assert not model.training
    assert not copy.deepcopy(opt).training


@pytest.mark.parametrize("change", CHANGES)
def test_what_the_user_changes_takes_effect(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Layers(), torch.randn(4, 6)
    opt = graphopt.optimize(model, (x,), backend="aot_eager")
    assert_as_in_eager(model, opt, x)
    monkeypatch.setattr(Layers, "sign", 1.0)  # undone at the end, whatever the change
    monkeypatch.setitem(globals(), "FACTOR", FACTOR)
    monkeypatch.setitem(SHIFT, "tensor", SHIFT["tensor"])
    CHANGES[change](model)
    assert_as_in_eager(model, opt, x)
    captures, compilations = opt.counters.captures, opt.counters.compilations
    assert_as_in_eager(model, opt, x)
    assert (opt.counters.captures, opt.counters.compilations) == (captures, compilations)


def test_what_comes_back_is_not_compiled_again() -> None:
    model, x = Layers(), torch.randn(4, 6)
    opt = graphopt.optimize(model, (x,), budget=0.8, backend="aot_eager")
    for scale in (1.0, 2.0):
        model.scale = scale
        opt(x[:3]).mean().backward()
    compilations = opt.counters.compilations
    assert compilations <= 2
    for scale in (1.0, 2.0, 1.0):
        model.scale = scale
        opt(x[:3]).mean().backward()
    assert (opt.counters.captures, opt.counters.compilations) == (1, compilations)
    assert opt.report.flops_ratio <= 0.8


def test_what_forward_writes_and_looks_at_compiles_at_most_once_more() -> None:
    """transformers writes the kind of problem into the configuration in the first forward, which looks at it."""
    model, inputs = zoo.make("bert", 4, layers=1)
    model.config.problem_type = None
    opt = graphopt.optimize(model, inputs, backend="aot_eager")
    assert model.config.problem_type is None
    for _ in range(3):
        assert_as_in_eager(model, opt, **inputs)
    assert model.config.problem_type == "single_label_classification"
    assert opt.counters.captures == 1
    assert opt.counters.compilations <= 2


def test_a_schedule_of_numbers_is_compiled_once_for_all() -> None:
    """A floating-point number that has changed once becomes an input of what is compiled."""
    model, x = Layers(), torch.randn(4, 6)
    opt = graphopt.optimize(model, (x,), backend="aot_eager")
    with warnings_of("graphopt") as warned:
        for i in (*range(12), 3):
            model.scale = 1.0 + i
            assert_as_in_eager(model, opt, x)
    assert (opt.counters.captures, opt.model_runs, warned) == (1, 0, [])
    assert opt.counters.compilations <= 2


class Waiting(Layers):
    """Looks at a number that makes no difference yet."""

    epoch = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.epoch >= 100:
            raise RuntimeError("too long")
        return super().forward(x)


def test_numbers_that_make_no_difference_are_followed_for_long() -> None:
    model, x = Waiting(), torch.randn(4, 6)
    opt = graphopt.optimize(model, (x,), backend="aot_eager")
    for epoch in range(20):
        model.epoch = epoch
        opt(x).mean().backward()
    assert (opt.counters.captures, opt.model_runs) == (1, 0)
    assert opt.counters.compilations <= 3  # 0, 1, and all others


def test_a_model_whose_code_fixes_the_batch_is_followed_without_a_word(capfd: pytest.CaptureFixture[str]) -> None:
    class Rows(Layers):
        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([Layers.forward(self, row) for row in x])

    model, x = Rows(), torch.randn(4, 6)
    with warnings_of("graphopt") as warned:
        opt = graphopt.optimize(model, (x,), backend="aot_eager")
        assert_as_in_eager(model, opt, x)
        model.scale = 2.0
        assert_as_in_eager(model, opt, x)
    assert (warned, capfd.readouterr().err) == ([], "")


class Counting(Layers):
    """Every call depends on how many there were."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


class Lazy(Layers):
    """The first call prepares something."""

    ready = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.ready:
            self.ready = True
            return super().forward(x) * 2
        return super().forward(x)


@pytest.mark.parametrize("kind", [Counting, Lazy])
def test_attributes_that_forward_sets(kind: type[Layers]) -> None:
    model, x = kind(), torch.randn(4, 6)
    opt = graphopt.optimize(model, (x,), backend="aot_eager")
    with warnings_of("graphopt") as warned:
        reference = assert_steps_as_in_eager(model, opt, x, steps=5)
    assert warned == []
    set_by_forward = {name: value for name, value in vars(model).items() if name in ("calls", "ready")}
    assert set_by_forward == {name: vars(reference)[name] for name in set_by_forward} != {}
    assert opt.counters.compilations <= 3


class Adding(Layers):
    """Adds to a tensor that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = torch.zeros(1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.plain += 1
        return super().forward(x) * self.plain


def test_planning_leaves_tensors_that_are_no_buffers_as_they_were() -> None:
    """Each trace had added to the model's own."""
    model, x = Adding(), torch.randn(4, 6)
    opt = graphopt.optimize(model, (x,), backend="aot_eager")
    graphopt.analyze(model, (x,), backend="aot_eager")
    assert model.plain == 0
    assert_steps_as_in_eager(model, opt, x, steps=3)
    assert model.plain == 3


class Remembering(Waiting):
    last = -1

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.epoch
        return super().forward(x)


def test_what_forward_sets_is_what_it_would_set_now() -> None:
    model, x = Remembering(), torch.randn(4, 6)
    opt = graphopt.optimize(model, (x,), backend="aot_eager")
    for epoch in (0, 1, 1, 0, 2):
        model.epoch = epoch
        opt(x).mean().backward()
        assert model.last == epoch
    assert (opt.counters.captures, opt.model_runs) == (1, 0)
    assert opt.counters.compilations <= 3


class Averaging(Layers):
    """A tensor that is no buffer follows the hidden values."""

    def forward(self, x: Tensor) -> Tensor:
        self.mask = 0.9 * self.mask + 0.1 * self.first(x).detach().mean(0)
        return super().forward(x)


class AveragingInBuffer(Layers):
    """The same with a buffer that is replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        self.average = 0.9 * self.average + 0.1 * self.first(x).detach().mean(0)
        return super().forward(x) + self.average.sum()


class InPlace(AveragingInBuffer):
    """And with one that is changed in place; moving the mask to where it is already changes nothing."""

    def forward(self, x: Tensor) -> Tensor:
        self.mask = self.mask.to(x.device)
        self.average.mul_(0.9).add_(self.first(x).detach().mean(0), alpha=0.1)
        return Layers.forward(self, x) + self.average.sum()


class Resizing(Layers):
    """A tensor that is no buffer is made anew where its size does not fit; nothing is computed from the one before."""

    def forward(self, x: Tensor) -> Tensor:
        if self.mask.shape[0] != self.first.out_features:
            self.mask = torch.ones(self.first.out_features)
        return super().forward(x)


class Listing(Layers):
    def forward(self, x: Tensor) -> Tensor:
        self.options["signs"].append(1.0)
        return super().forward(x)


@pytest.mark.parametrize("budget", [0.8, *long(None)])
@pytest.mark.parametrize("kind", [Averaging, AveragingInBuffer, InPlace, Resizing, Listing])
def test_tensors_and_lists_that_forward_changes(kind: type[Layers], budget: float | None) -> None:
    """Whatever it changes, and however: in place, or by putting another one there."""
    model, x = kind(), torch.randn(4, 6)
    if kind is Resizing:
        model.mask = torch.ones(3)
    opt = graphopt.optimize(model, (x,), budget, backend="aot_eager", loss=lambda output: output.square().mean())
    reference = copy.deepcopy(model)
    with warnings_of("graphopt") as warned:
        for _ in range(3):
            ours, theirs = gradients(model, opt, x), gradients(reference, reference, x)
            assert set(ours) == {"loss", *opt.selected}
            torch.testing.assert_close(ours, {name: theirs[name] for name in ours})
            torch.testing.assert_close(dict(model.named_buffers()), dict(reference.named_buffers()))
            torch.testing.assert_close(model.mask, reference.mask)
            assert model.options == reference.options
    assert (warned, opt.model_runs) == ([], 0)


def test_optimizing_leaves_what_forward_changes_as_it_was() -> None:
    x = torch.randn(4, 6)
    for kind in (Counting, Averaging, AveragingInBuffer, InPlace, Listing):
        model = kind()
        before = copy.deepcopy(model)
        graphopt.optimize(model, (x,), 0.8, backend="aot_eager", loss=lambda output: output.square().mean())
        torch.testing.assert_close(dict(model.named_buffers()), dict(before.named_buffers()))
        torch.testing.assert_close(model.mask, before.mask)
        assert (model.options, vars(model).get("calls")) == (before.options, vars(before).get("calls")), kind


def test_a_parametrization_that_changes_its_buffers() -> None:
    model, x = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 4)), torch.randn(4, 6)
    reference = copy.deepcopy(model)
    with warnings_of("graphopt") as warned:
        opt = graphopt.optimize(model, (x,), backend="aot_eager")
        for _ in range(3):
            torch.testing.assert_close(gradients(model, opt, x), gradients(reference, reference, x))
            torch.testing.assert_close(dict(model.named_buffers()), dict(reference.named_buffers()))
    assert warned == []


def test_adapters_that_are_scaled_and_merged() -> None:
    config = peft.LoraConfig(r=4, target_modules=["first"], init_lora_weights=False)
    model, x = peft.get_peft_model(Layers(), config), torch.randn(4, 6)
    opt = graphopt.optimize(model, (x,), backend="aot_eager")
    assert_as_in_eager(model, opt, x)
    with rescale_adapter_scale(model, 4.0):
        assert_as_in_eager(model, opt, x)
    compilations = opt.counters.compilations
    assert_as_in_eager(model, opt, x)
    assert opt.counters.compilations == compilations <= 2


def test_adapters_with_a_head_that_is_trained_beside_them() -> None:
    config = peft.LoraConfig(r=4, target_modules=["first"], modules_to_save=["second"], init_lora_weights=False)
    adapted, x = peft.get_peft_model(Layers(), config), torch.randn(4, 6)
    opt = graphopt.optimize(adapted, (x,), backend="aot_eager")
    assert_as_in_eager(adapted, opt, x)
    adapted.merge_adapter()
    assert_as_in_eager(adapted, opt, x)
    adapted.unmerge_adapter()
    assert_as_in_eager(adapted, opt, x)


def test_a_copy_looks_at_its_own_model() -> None:
    model, x = Layers(), torch.randn(4, 6)
    opt = graphopt.optimize(model, (x,), backend="aot_eager")
    assert_as_in_eager(model, opt, x)
    other = copy.deepcopy(opt)
    model.scale = 2.0
    changed = copy.deepcopy(model)
    changed.scale = 1.0
    compilations = opt.counters.compilations
    for _ in range(2):
        torch.testing.assert_close(other(x), changed(x))
        assert other.counters.compilations == compilations + 1
    assert opt.counters.compilations == compilations
    assert_as_in_eager(model, opt, x)


def test_tensors_that_take_each_others_place_in_memory() -> None:
    model, x = Layers(), torch.randn(4, 6)
    opt = graphopt.optimize(model, (x,), backend="aot_eager")
    for i in range(6):
        model.mask = None  # the next one can have its address, and its id
        model.mask = torch.full((16,), float(i))
        assert_as_in_eager(model, opt, x)

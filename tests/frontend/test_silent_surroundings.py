"""What a front end can get wrong without a word about what lies around the model: hooks, globals, transforms, threads.

Most cases were found by comparing many models with eager mode; each is the smallest model that shows it.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

import graphopt
from tests.forked import ended
from tests.frontend.stepping import BUDGETS, Two, X, assert_steps_as_in_eager, generated, plainly

# What lies outside the model.


SEEN: dict[str, Any] = {}


def _keep_globally(module: nn.Module, inputs: Any, output: Tensor) -> None:
    SEEN["a"] = output


@BUDGETS
@pytest.mark.parametrize("where", ["global", "closure"])
def test_a_hook_that_keeps_activations_for_another_loss(where: str, budget: float | None) -> None:
    """Feature extraction: the loss of a step reads what the hook has kept in that step, with its gradient."""
    model, mine = Two(), {}
    model.a.register_forward_hook(_keep_globally if where == "global" else lambda m, i, o: mine.__setitem__("a", o))
    kept = SEEN if where == "global" else mine

    def call(called: Any, model: Any, step: int) -> Tensor:
        kept.clear()
        return called(generated(step, 4 + step, 5)) + kept["a"].square().mean()

    assert_steps_as_in_eager(model, X, call, budget)


def test_hooks_that_collect_run_once_per_step() -> None:
    model, norms = Two(), []
    model.a.register_forward_hook(lambda module, inputs, output: norms.append(float(output.detach().norm())))
    opt = graphopt.optimize(model, X, backend="aot_eager")
    norms.clear()
    for step in range(4):
        opt(generated(step, 4 + step, 5)).backward()
    expected = [float(model.a(generated(step, 4 + step, 5)).norm()) for step in range(4)]
    assert norms[:4] == pytest.approx(expected)
    assert len(norms) == 8  # the four of the line above, too


def test_backward_hooks_run_even_if_they_come_later() -> None:
    def call(called: Any, model: Any, step: int) -> Tensor:
        if step == 1:
            model.b.register_full_backward_hook(lambda module, gin, gout: (2 * gin[0],))
        return called(generated(step, 4, 5))

    assert_steps_as_in_eager(Two(), X, call)
    first = Two()
    first.b.register_full_backward_hook(lambda module, gin, gout: (2 * gin[0],))
    assert_steps_as_in_eager(first, X, plainly)


def test_of_a_module_with_backward_hooks_that_come_later_it_is_told_that_the_budget_is_not_kept() -> None:
    model = Two()
    opt = graphopt.optimize(model, X, budget=0.7, backend="aot_eager")
    opt(*X).backward()
    assert not opt.report.notes
    model.b.register_full_backward_hook(lambda module, gin, gout: None)
    opt(*X).backward()
    assert any("backward hooks" in note and "whatever the budget" in note for note in opt.report.notes)


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize("late", [False, True])
def test_hooks_of_parameters_that_are_not_trained_are_not_called(kind: str, late: bool) -> None:
    model = Two()
    opt = graphopt.optimize(model, X, budget=0.7, backend="aot_eager")
    assert opt.selected < {name for name, _ in model.named_parameters()}
    called: list[str] = []
    for step in range(3):
        if step == int(late):
            for name, p in model.named_parameters():
                getattr(p, kind)(lambda _, name=name: called.append(name))
        called.clear()
        model.zero_grad()
        opt(*X).backward()
    assert set(called) == opt.selected
    assert {name for name, p in model.named_parameters() if p.grad is not None} == opt.selected


def test_an_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    class Environment(Two):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * float(os.environ.get("GRAPHOPT_TEST_SCALE", "1"))

    def call(called: Any, model: Any, step: int) -> Tensor:
        monkeypatch.setenv("GRAPHOPT_TEST_SCALE", str(1 + step))
        return called(generated(0, 4, 5))

    assert_steps_as_in_eager(Environment(), X, call)


class WithActivation(Two):
    def __init__(self) -> None:
        super().__init__()
        self.activation = nn.Tanh()

    def between(self, hidden: Tensor) -> Tensor:
        return self.activation(hidden)


def test_a_class_whose_forward_is_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    def call(called: Any, model: Any, step: int) -> Tensor:
        with monkeypatch.context() as patch:
            if step % 2:
                patch.setattr(nn.Tanh, "forward", lambda self, x: x * 3)
            return called(generated(0, 4, 5))

    assert_steps_as_in_eager(WithActivation(), X, call, steps=4, torchs_own=True)


def test_a_hook_of_all_modules() -> None:
    @contextlib.contextmanager
    def hooked() -> Iterator[None]:
        handle = register_module_forward_hook(lambda m, i, o: o * 2 if isinstance(m, nn.Linear) else None)
        try:
            yield
        finally:
            handle.remove()

    def call(called: Any, model: Any, step: int) -> Tensor:
        with hooked() if step % 2 else contextlib.nullcontext():
            return called(generated(0, 4, 5))

    assert_steps_as_in_eager(Two(), X, call, steps=4, torchs_own=True)


GLOBAL_LIST: list[float] = [1.0]


def test_a_list_outside_the_model() -> None:
    class Reads(Two):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * sum(GLOBAL_LIST)

    def call(called: Any, model: Any, step: int) -> Tensor:
        GLOBAL_LIST[:] = [1.0] * (1 + step)
        return called(generated(0, 4, 5))

    assert_steps_as_in_eager(Reads(), X, call)


# Transforms of torch.


class Scaled(Two):
    def forward(self, x: Tensor) -> Tensor:
        return _scaled(super().forward(x))  # type: ignore[name-defined]  # noqa: F821


def test_a_function_among_pythons_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as gettext's `_`, or what a profiler puts there."""
    torch.compile(abs, backend="eager")(torch.ones(1))  # Dynamo lists Python's own functions in its first trace
    monkeypatch.setattr("builtins._scaled", lambda x: x, raising=False)
    model = Scaled()
    opt = graphopt.optimize(model, X, backend="aot_eager")
    for scale in (1.0, 1.0, 1.0, 2.0):
        monkeypatch.setattr("builtins._scaled", lambda x, scale=scale: scale * x)
        assert opt(*X).item() == pytest.approx(model(*X).item())


def test_forward_mode_is_refused_as_torch_compile_refuses_it() -> None:
    import torch.autograd.forward_ad as forward_ad

    model, x = Two(), generated(0, 4, 5)
    opt = graphopt.optimize(model, X, backend="aot_eager")
    opt(x).backward()
    for called in (torch.compile(model, backend="aot_eager"), opt):
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="must implement the jvp function"):
            called(forward_ad.make_dual(x, torch.ones_like(x)))


def test_functional_gradients_are_right() -> None:
    model, x = Two(), generated(0, 4, 5)
    opt = graphopt.optimize(model, X, backend="aot_eager")
    tensors = {name: p.detach() * 2 for name, p in model.named_parameters()}
    expected = torch.func.grad(lambda p: torch.func.functional_call(model, p, (x,)))(tensors)
    found = torch.func.grad(lambda p: torch.func.functional_call(opt, p, (x,)))(tensors)
    torch.testing.assert_close(found, expected)


class Labelled(nn.Module):
    """Whose labels say which rows the loss reads."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.hidden, self.head = nn.Embedding(20, 16), nn.Linear(16, 32), nn.Linear(32, 20)

    def forward(self, words: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(torch.relu(self.hidden(self.words(words))))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def test_gradients_of_each_sample() -> None:
    """Techniques counted the labels of a batch that `vmap` had taken apart."""
    model, words = Labelled(), torch.randint(20, (4, 16))
    batch = words, words.masked_fill(torch.arange(16) > 3, -100)
    opt = graphopt.optimize(model, batch, backend="aot_eager")
    tensors = {name: p.detach() for name, p in model.named_parameters()}

    def of_each(called: nn.Module) -> dict[str, Tensor]:
        def loss(parameters: dict[str, Tensor], words: Tensor, labels: Tensor) -> Tensor:
            result: Tensor = torch.func.functional_call(called, parameters, (words[None], labels[None]))
            return result

        found: dict[str, Tensor] = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(tensors, *batch)
        return found

    torch.testing.assert_close(of_each(opt), of_each(model))


@pytest.mark.parametrize("warm", [True, False])
def test_after_functional_gradients_the_plan_is_kept_to(warm: bool) -> None:
    model, batch = Two(), (torch.randn(4, 5),)
    opt = graphopt.optimize(model, batch, budget=0.7, backend="aot_eager")
    if warm:
        opt(*batch).backward()
    tensors = {name: p.detach() for name, p in model.named_parameters()}
    torch.func.grad(lambda p: torch.func.functional_call(opt, p, batch))(tensors)
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        opt(*batch).backward()
        assert {name for name, p in model.named_parameters() if p.grad is not None} == opt.selected
        assert opt.last_step is not None  # compiled


# Around the model.


@pytest.mark.usefixtures("_only_new_objects")
def test_tensors_in_the_place_of_parameters_are_not_selected_among_and_the_report_says_so() -> None:
    """Gradients with respect to what takes the parameters' place are the caller's own business, as in meta-learning."""
    model, batch = Two(), (torch.randn(4, 5),)
    opt = graphopt.optimize(model, batch, budget=0.7, backend="aot_eager")
    assert opt.selected < set(dict(model.named_parameters()))
    noisy = {name: p * 1.5 for name, p in model.named_parameters()}
    torch.func.functional_call(opt, noisy, batch).backward()
    ours = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    torch.func.functional_call(model, {name: p * 1.5 for name, p in model.named_parameters()}, batch).backward()
    torch.testing.assert_close(ours, {name: p.grad for name, p in model.named_parameters()})
    assert any("functional_call" in note for note in opt.report.notes)
    leaves = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    torch.func.functional_call(opt, leaves, batch).backward()
    assert all(leaf.grad is not None for leaf in leaves.values())


def test_tensors_take_the_place_of_a_part_that_is_called_model() -> None:
    """They were set on the model itself, and the part was run with its own."""

    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._model = nn.Linear(5, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self._model(x).square().sum()

    model, x = Wrapper(), torch.randn(4, 5)
    opt = graphopt.optimize(model, (x,), backend="aot_eager")
    found = []
    for called in (opt, model):
        leaves = {name: (p.detach() * 1.5).requires_grad_() for name, p in model.named_parameters()}
        torch.func.functional_call(called, leaves, (x,)).backward()
        found.append({name: leaf.grad for name, leaf in leaves.items()})
    torch.testing.assert_close(*found)
    assert opt._model is model._model


def test_models_are_freed() -> None:
    references = []
    for _ in range(3):
        model = Two()
        opt = graphopt.optimize(model, X, 0.7, backend="aot_eager")
        for step in range(2):
            opt(generated(step, 4 + step, 5)).backward()
        references += [weakref.ref(model), weakref.ref(opt)]
        del model, opt
    gc.collect()
    assert [reference() for reference in references] == [None] * 6


def layers(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 5))


def a_model_each() -> None:
    call, found = nn.Module.__call__, dict[int, Any]()

    def work(width: int) -> None:
        try:
            model = layers(width)
            opt = graphopt.optimize(model, (torch.zeros(4, 5),), backend="aot_eager")
            for step in range(3):
                x = torch.randn(4 + step, 5)
                model.zero_grad()
                opt(x).square().sum().backward()
                ours = [p.grad.clone() for p in model.parameters() if p.grad is not None]
                model.zero_grad()
                model(x).square().sum().backward()
                torch.testing.assert_close(ours, [p.grad for p in model.parameters()])
            found[width] = opt.counters.compilations > 0 and opt.report.notes == []
        except BaseException as error:
            found[width] = error

    threads = [threading.Thread(target=work, args=(width,)) for width in (6, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {6: True, 7: True}, found
    assert nn.Module.__call__ is call
    assert not torch.is_anomaly_enabled()


def one_model() -> None:
    model, found, over = layers(6), list[Any](), threading.Event()
    opt = graphopt.optimize(model, (torch.zeros(4, 5),), backend="aot_eager")
    references = [copy.deepcopy(model) for _ in range(4)]  # torch can deadlock where several threads run one model in eager mode

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        steps = 0
        try:
            while steps < 20 or (seed == 0 and not over.is_set()):
                x, steps = torch.randn(4, 5, generator=generator), steps + 1
                pairs = (opt, model), (references[seed], references[seed])
                ours, eager = (torch.autograd.grad(run(x).square().sum(), list(own.parameters())) for run, own in pairs)
                torch.testing.assert_close(ours, eager)
            found.append(True)
        except BaseException as error:
            found.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]  # they call one opt, at first uncompiled
    for thread in threads:
        thread.start()
    for width in (7, 8):  # while one of them goes on, others are captured and compiled
        graphopt.optimize(layers(width), (torch.zeros(4, 5),), backend="aot_eager")(torch.zeros(4, 5)).sum().backward()
    over.set()
    for thread in threads:
        thread.join()
    assert found == [True] * 4, found
    assert opt.report.notes == [], opt.report.notes


@pytest.mark.parametrize("program", [a_model_each, one_model])
def test_threads(program: Callable[[], None]) -> None:
    """In a process of its own: what breaks breaks torch for all that follows."""
    assert ended(program, seconds=120) == 0


def test_an_optimised_model_can_be_saved_after_steps() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    opt = graphopt.optimize(model, (torch.zeros(4, 8),), backend="aot_eager")
    x = generated(0, 4, 8)
    opt(x).mean().backward()
    file = io.BytesIO()
    torch.save(opt, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    torch.testing.assert_close(again(x), opt(x))


def test_parameters_of_two_modules_under_one_name() -> None:
    """Where torch.compile is called with a function, or modules are kept in a list."""
    first, second, head = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5)

    def function(x: Tensor) -> Tensor:
        return second(torch.tanh(first(x))).sin().sum()

    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.head = [first, second], head

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.layers[1](torch.tanh(self.layers[0](x)))).sin().sum()

    everything = nn.ModuleList([first, second, head])
    x = generated(0, 4, 5)
    for model in (function, Listed()):
        gradients = []
        torch.compiler.reset()
        for called in (model, torch.compile(model, backend="graphopt", options={"passes": [], "backend": "aot_eager"})):
            everything.zero_grad()
            called(x).backward()
            gradients.append([None if p.grad is None else p.grad.clone() for p in everything.parameters()])
        torch.testing.assert_close(gradients[1], gradients[0])


# Other libraries.


def test_dora_adapters() -> None:
    import peft

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 3)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return nn.functional.cross_entropy(self.b(torch.relu(self.a(x))), y)

    model = peft.get_peft_model(Net(), peft.LoraConfig(r=4, target_modules=["a", "b"], use_dora=True, init_lora_weights=False))
    batch = {"x": generated(0, 8, 16), "y": torch.arange(8) % 3}
    assert_steps_as_in_eager(model, batch, lambda called, _, step: called(**batch))

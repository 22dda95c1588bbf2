from __future__ import annotations

import copy
import gc
import importlib
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from graphopt.passes import GreenTrainer, Lsp, Vcas
from graphopt.passes.base import Changes, Preserves, Site
from graphopt.passes.lsp.subspaces import Subspaces
from torch import Tensor, nn

import graphopt
from graphopt import PassError
from graphopt.errors import GraphoptError
from graphopt.frontend.running import Running
from graphopt.graph import TrainingGraph
from graphopt.planner.plan import Plan
from graphopt.runtime.fallback import ATTEMPTS, Fallback
from tests import zoo
from tests.messages import warnings_of

Inputs = tuple[Tensor, Tensor]

TRAINED = ("second.weight", "third.bias")
TOP = ("classifier.weight", "classifier.bias")


def mlp(**options: Any) -> tuple[Any, Inputs, Any]:
    model, inputs = zoo.make("mlp", 6)
    return model, inputs, graphopt.optimize(model, inputs, **{"backend": "aot_eager", **options})


PLACES = {
    "rewriting": ("could not be rewritten", "graphopt.planner.plan.Plan.rewrite_region"),
    "compiling": ("could not be compiled under the plan", "graphopt.frontend.backend.compile_joint"),
    "anything": ("could not be compiled", "graphopt.frontend.backend.compile_plainly"),
}
"""What can fail under a plan that only rewrites graphs: what is then warned of, and where; "anything" fails after "compiling"."""


@dataclass
class Failing:
    """Has compilations under plans that only rewrite graphs fail while `now` is set; `attempts` counts those."""

    now: bool = True
    attempts: int = 0
    error: Exception = field(default_factory=lambda: RuntimeError("no room\nfor details"))

    def patch(self, monkeypatch: pytest.MonkeyPatch, place: str) -> Failing:
        self._replace(monkeypatch, PLACES[place][1], counted=place != "anything")
        if place == "anything":
            self._replace(monkeypatch, PLACES["compiling"][1], counted=True)
        return self

    def _replace(self, monkeypatch: pytest.MonkeyPatch, target: str, counted: bool) -> None:
        module, _, name = target.rpartition(".")
        owner = Plan if module.endswith(".Plan") else importlib.import_module(module)
        run = getattr(owner, name)

        def failing(*args: Any, **options: Any) -> Any:
            if not self.now:
                return run(*args, **options)
            self.attempts += counted
            raise type(self.error)(*self.error.args)  # a new one, which holds no frames of earlier calls

        monkeypatch.setattr(owner, name, failing)


def gradients_of(model: nn.Module, call: Callable[[nn.Module], Tensor]) -> dict[str, Tensor | None]:
    model.zero_grad()
    call(model).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def eager_gradients(model: nn.Module, inputs: Inputs) -> dict[str, Tensor | None]:
    return gradients_of(copy.deepcopy(model), lambda m: m(*inputs))


def assert_close(ours: dict[str, Any], eager: dict[str, Any], names: Any = None) -> None:
    for name, gradient in ours.items():
        if names is not None and name not in names:
            assert gradient is None, name
        else:
            torch.testing.assert_close(gradient, eager[name])


@pytest.mark.parametrize("place", PLACES)
def test_a_size_that_cannot_be_compiled_is_trained_all_the_same_and_not_tried_again(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs, opt = mlp(passes=[GreenTrainer(train=TRAINED)])
    assert_close(gradients_of(model, lambda _: opt(*inputs)), eager_gradients(model, inputs), TRAINED)
    failing, few = Failing().patch(monkeypatch, place), zoo.rows(inputs, 3)
    with warnings_of() as texts:
        for _ in range(3):
            assert_close(gradients_of(model, lambda _: opt(*few)), eager_gradients(model, few), TRAINED)
        assert_close(gradients_of(model, lambda _: opt(*inputs)), eager_gradients(model, inputs), TRAINED)
    assert failing.attempts == 1
    assert opt.report.notes == texts
    assert "RuntimeError: no room)" in texts[-1]
    assert PLACES[place][0] in texts[-1]
    assert len(texts) == (2 if place == "anything" else 1)


@pytest.mark.parametrize("place", PLACES)
def test_a_batch_size_whose_sampling_cannot_be_compiled_runs_exactly(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs, opt = mlp(passes=[Vcas(keep_rows=0.5)])
    opt(*inputs).backward()
    failing, few = Failing().patch(monkeypatch, place), zoo.rows(inputs, 3)
    with warnings_of() as texts:
        for _ in range(3):
            assert_close(gradients_of(model, lambda _: opt(*few)), eager_gradients(model, few))
        opt(*inputs).backward()
    assert opt.last_step is not None
    assert opt.last_step.sampled_part < 1
    assert failing.attempts <= 3  # the trial of its samples, the sampler, and the plan without it
    assert texts == opt.report.notes != []


@pytest.mark.parametrize("place", PLACES)
def test_one_warning_per_cause(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, inputs, opt = mlp(passes=[GreenTrainer(train=TRAINED)])
    Failing().patch(monkeypatch, place)
    with warnings_of() as texts:
        for size in (6, 3, 4, 6):
            opt(*zoo.rows(inputs, size)).backward()
    assert len(texts) == (2 if place == "anything" else 1)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.usefixtures("_only_new_objects")
def test_what_runs_instead_trains_what_is_selected_and_nothing_else(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs, opt = mlp(passes=[GreenTrainer(train=TRAINED)])
    Failing().patch(monkeypatch, place)
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    with warnings_of():
        for _ in range(2):
            model.zero_grad()
            opt(*inputs).backward()
            ours = {name: p.grad for name, p in model.named_parameters()}
            assert_close(ours, eager_gradients(model, inputs), TRAINED)
            optimizer.step()
    assert {n for n, p in model.named_parameters() if not torch.equal(p, before[n])} == set(TRAINED)
    assert all(p.requires_grad for p in model.parameters())
    again = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    again(*inputs).backward()  # copies know nothing of the selection
    assert all(p.grad is not None for p in again.parameters())
    model.zero_grad()
    del opt
    gc.collect()
    model(*inputs).backward()  # nor does the model, once what optimised it is gone
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("place", PLACES)
def test_checkpointed_layers(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Checkpointed(zoo.MLP):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            block = lambda h: torch.relu(self.second(torch.relu(self.first(h))))  # noqa: E731
            hidden = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            return nn.functional.cross_entropy(self.third(hidden), labels)

    model, (_, inputs) = Checkpointed(), zoo.make("mlp", 6)
    opt = graphopt.optimize(model, inputs, passes=[GreenTrainer(train=("first.weight",))], backend="aot_eager")
    Failing().patch(monkeypatch, place)
    with warnings_of():
        assert_close(gradients_of(model, lambda _: opt(*inputs)), eager_gradients(model, inputs), ("first.weight",))


@pytest.mark.parametrize("place", PLACES)
def test_a_new_selection_that_cannot_be_compiled_is_in_force_all_the_same(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = ("third.weight",), ("second.weight", "second.bias")
    model, inputs, opt = mlp(passes=[GreenTrainer(train=first)])
    opt(*inputs).backward()
    opt.adopt(replace(opt.plan, train=frozenset(second)))
    Failing().patch(monkeypatch, place)
    with warnings_of() as texts:
        for size in (6, 4, 6):
            some = zoo.rows(inputs, size)
            assert_close(gradients_of(model, lambda _, some=some: opt(*some)), eager_gradients(model, some), second)
        opt.adopt(replace(opt.plan, train=frozenset(first)))  # which was compiled
        assert_close(gradients_of(model, lambda _: opt(*inputs)), eager_gradients(model, inputs), first)
    assert opt.selected == set(first)
    assert len(texts) == (2 if place == "anything" else 1)


def test_a_sampler_that_cannot_be_rewritten_gives_way_to_exact_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = zoo.make("bert", 8, layers=1)
    opt = graphopt.optimize(model, inputs, passes=[Vcas(keep_rows=0.5), GreenTrainer(train=TOP)], backend="aot_eager")
    monkeypatch.setattr("graphopt.passes.vcas.rewrite.RowLevels", lambda *_: (_ for _ in ()).throw(RuntimeError("no room")))
    with warnings_of() as texts:
        ours = gradients_of(model, lambda _: zoo.call(opt, inputs).loss)
    assert_close(ours, gradients_of(copy.deepcopy(model), lambda m: zoo.call(m, inputs).loss), TOP)
    assert opt.last_step.sampled_part == 1
    assert any("no room" in text for text in texts)


@pytest.mark.parametrize("schedule", ["sequential", "layerwise"])
def test_compressed_gradients_stay_compressed(monkeypatch: pytest.MonkeyPatch, schedule: str) -> None:
    """Without lsp's rewriting, gradients reach the weights themselves, where hooks compress them."""
    results = []
    for place in (None, *PLACES):
        with monkeypatch.context() as patch:
            torch.manual_seed(0)
            model, inputs = zoo.make("mlp", 6, torch.float64)
            lsp = Lsp(subspace=4, nonzeros=2, criterion="flops", schedule=schedule)
            opt = graphopt.optimize(model, inputs, passes=[lsp], backend="aot_eager")
            optimizer = opt.make_optimizer(torch.optim.AdamW, lr=0.05)
            patch.setattr(Subspaces, "due", lambda *_: False)  # projectors stay, whether or not a checking step compiles
            if place is not None:
                Failing().patch(patch, place)
            with warnings_of() as texts:
                for _ in range(3):
                    opt(*inputs).backward()
                    optimizer.step()
                    optimizer.zero_grad()
            optimizer.synchronize()
            assert bool(texts) == (place is not None)
            results.append(copy.deepcopy(model.state_dict()))
    for found in results[1:]:
        torch.testing.assert_close(found, results[0])


class Fussy:
    """A pass that refuses graphs of some batch sizes, which it reads off the decisions' graph."""

    name = "fussy"
    preserves = Preserves.EXACT
    serves = ()

    def __init__(self) -> None:
        self.broken = False

    def applicable(self, graph: TrainingGraph) -> list[Site]:
        return []

    def apply(self, graph: TrainingGraph, decisions: Any) -> Changes:
        if self.broken:
            raise KeyError("a bug of the user's")
        return Changes(())


def test_a_pass_that_raises_later_does_not_end_training() -> None:
    fussy = Fussy()
    model, inputs, opt = mlp(passes=[fussy])
    opt(*inputs)
    fussy.broken = True
    few = zoo.rows(inputs, 3)
    with warnings_of() as texts:
        assert_close(gradients_of(model, lambda _: opt(*few)), eager_gradients(model, few))
    assert "KeyError" in texts[0]
    assert texts[0] in " ".join(str(opt.report).split())
    fussy.broken = False
    opt(*inputs)
    assert opt.last_step is not None


def test_what_optimize_itself_finds_wrong_still_raises() -> None:
    with pytest.raises(PassError, match="nonsense"):
        mlp(passes=["nonsense"])
    with pytest.raises(graphopt.CaptureError):
        graphopt.optimize(nn.Linear(2, 2).requires_grad_(False), torch.ones(3, 2))


class Branching(nn.Module):
    """Python that Dynamo cannot trace, for long sequences alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > 3 and float(x.sum()) > 1e9:
            return self.layer(-x).sum()
        return self.layer(x).square().sum()


def test_a_length_that_is_not_one_graph() -> None:
    model = Branching()
    opt = graphopt.optimize(model, torch.randn(2, 3, 4), backend="aot_eager")
    with warnings_of() as texts:
        for length in (3, 5, 5, 3):
            x = torch.randn(2, length, 4)
            ours = gradients_of(model, lambda _, x=x: opt(x))
            assert_close(ours, gradients_of(copy.deepcopy(model), lambda m, x=x: m(x)))
    assert (texts, opt.counters.captures, opt.model_runs) == ([], 1, 0)


def test_errors_of_the_model_are_its_own_and_not_held_against_the_compiler() -> None:
    model, (x, labels), opt = mlp()
    for call in (model, opt):
        with (
            warnings_of() as texts,
            pytest.raises(RuntimeError, match=r"mat1 and mat2 shapes cannot be multiplied \(6x4 and 5x8\)"),
        ):
            call(x[:, :4], labels)
        with pytest.raises(TypeError, match="labels"):
            call(x)
    assert texts == []
    assert opt.report.notes == []


def test_a_batch_whose_inputs_disagree_is_a_step_like_any_other() -> None:
    class Repeats(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            return (self.layer(x) * scale).sum()

    model = Repeats()
    opt = graphopt.optimize(model, (torch.randn(4, 4), torch.randn(4, 1)), backend="aot_eager")
    with warnings_of() as texts:
        for _ in range(2):
            inputs = torch.randn(3, 4), torch.randn(1, 1)
            assert_close(gradients_of(model, lambda _, i=inputs: opt(*i)), eager_gradients(model, inputs))
    assert (texts, opt.model_runs) == ([], 0)


def test_a_selection_that_is_frozen_as_a_whole_is_an_error() -> None:
    model, inputs, opt = mlp(passes=[GreenTrainer(train=("third.bias",))])
    model.third.bias.requires_grad_(False)
    with pytest.raises(PassError, match="reselect"):
        opt(*inputs)


def test_of_two_plans_for_a_model_the_one_that_ran_last_drops_gradients() -> None:
    model, inputs, first = mlp(budget=0.6)
    second = graphopt.optimize(model, inputs, backend="aot_eager")
    first.drop_unselected()
    for opt, complete in ((first, False), (second, True), (first, False)):
        model.zero_grad()
        opt(*inputs).backward()
        assert all(p.grad is not None for p in model.parameters()) is complete


def test_out_of_memory_while_compiling_falls_back_and_while_running_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Backend:
        raising: str = ""

        def __call__(self, module: Any, inputs: Any) -> Any:
            if self.raising == "compile":
                raise torch.OutOfMemoryError("no room to compile")

            def run(*args: Any) -> Any:
                if self.raising == "run":
                    raise torch.OutOfMemoryError("no room to run")
                return module(*args)

            return run

    backend = Backend()
    model, inputs = zoo.make("cnn", 4)
    opt = graphopt.optimize(model, inputs, backend=backend)
    loss = zoo.call(opt, inputs)["loss"]
    state = copy.deepcopy(model.state_dict())
    backend.raising = "run"
    with pytest.raises(torch.OutOfMemoryError, match="no room to run"):
        zoo.call(opt, inputs)
    with pytest.raises(torch.OutOfMemoryError, match="no room to run"):
        loss.backward()
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    backend.raising = ""
    zoo.call(opt, inputs)["loss"].backward()
    backend.raising = "compile"
    few, eager = zoo.rows(inputs, 3), copy.deepcopy(model)
    with warnings_of() as texts:
        ours = gradients_of(model, lambda _: zoo.call(opt, few)["loss"])
    assert_close(ours, gradients_of(eager, lambda m: zoo.call(m, few)["loss"]))
    assert all("no room to compile" in text for text in texts)
    assert texts == opt.report.notes != []


def test_a_backward_that_cannot_be_compiled_in_the_middle_of_a_step_runs_uncompiled() -> None:
    """What is differentiated beside the loss is compiled when it first comes."""
    compiled: list[Any] = []

    def backend(module: Any, inputs: Any) -> Any:
        compiled.append(module)
        if len(compiled) > 2:
            raise RuntimeError("no room")
        return module

    model, inputs = zoo.make("cnn", 4)
    opt = graphopt.optimize(model, inputs, backend=backend)

    def total(m: Any) -> Tensor:
        output = zoo.call(m, inputs)
        return output["loss"] + output["logits"].square().sum()

    eager = gradients_of(copy.deepcopy(model), total)
    with warnings_of() as texts:
        ours = gradients_of(model, lambda _: total(opt))
    assert_close(ours, eager)
    assert len(compiled) > 2
    assert any("uncompiled" in text for text in texts)
    assert texts == opt.report.notes


def test_the_optimizer_of_compressed_gradients_is_still_asked_for() -> None:
    model, inputs = zoo.make("mlp", 6)
    opt = graphopt.optimize(model, inputs, passes=[Lsp(subspace=4, nonzeros=2)], backend="aot_eager")
    with pytest.raises(GraphoptError, match="make_optimizer"):
        opt(*inputs)
    assert isinstance(opt._fallback, Fallback)


@torch._dynamo.allow_in_graph  # type: ignore[untyped-decorator]
def seen(x: Tensor) -> Tensor:
    """What Dynamo cannot trace, though it is told to."""
    x.detach().numpy()
    return x * 1.0


class Looked(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.first, self.second, self.rows = nn.Linear(4, 8), nn.Linear(8, 1), rows

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.second(seen(hidden) if len(x) > self.rows else hidden).square().mean()


@pytest.mark.parametrize("rows", [0, 3])
def test_what_torch_compile_cannot_trace_runs_and_is_tried_a_few_times(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Looked(rows), torch.randn(6, 4)
    tried, run = [], Running.__call__
    monkeypatch.setattr(Running, "__call__", lambda *args: (tried.append(1), run(*args))[1])
    with warnings_of():
        opt = graphopt.optimize(model, (x[:3],), backend="aot_eager")
        for _ in range(5):
            assert_close(gradients_of(model, lambda _: opt(x)), eager_gradients(model, (x,)))
    assert len(tried) == ATTEMPTS
    assert opt.model_runs == 5

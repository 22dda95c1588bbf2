"""What training loops of other libraries do around a step: autocast, hooks that require gradients, pickles, type checks."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt
import graphopt.capture
from graphopt.runtime.module import OptimizedModule
from tests import zoo


class Broken(nn.Module):
    """Two graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        return nn.functional.cross_entropy(self.third(torch.tanh(self.second(hidden))), labels)


def small() -> tuple[tuple[Tensor, Tensor], Broken]:
    torch.manual_seed(0)
    return (torch.randn(5, 6), torch.randint(0, 3, (5,))), Broken()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_a_loss_of_the_logits_under_autocast_that_is_left_before_the_backward() -> None:
    model, inputs = zoo.make("bert", 4)
    reference = copy.deepcopy(model)
    opt = graphopt.optimize(model, inputs, budget=0.7, backend="aot_eager")
    for _ in range(2):
        for run in (reference, opt):
            run.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                logits = zoo.call(run, inputs).logits
            nn.functional.cross_entropy(logits.float(), inputs["labels"]).backward()
        found, wanted = gradients(model), gradients(reference)
        assert set(found) == opt.selected
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, wanted[name], rtol=0.1, atol=5e-3)


@pytest.mark.parametrize("mixed", [True, False])
def test_a_step_runs_again_in_the_precision_of_its_own_call(mixed: bool) -> None:
    model, inputs = zoo.make("bert", 4, layers=1)
    reference = copy.deepcopy(model)
    opt = graphopt.optimize(model, inputs, backend="aot_eager")
    for autocast in (True, True, False, False, True, False):  # of each kind a first step, and one that compiles nothing
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            opt(**inputs).loss.backward()
    for run in (reference, opt):
        run.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            logits = zoo.call(run, inputs).logits
        logits.float().square().mean().backward()
    found = gradients(model)
    for name, wanted in gradients(reference).items():
        close = {"rtol": 0.1, "atol": 5e-3} if mixed else {"rtol": 1e-4, "atol": 1e-6}
        torch.testing.assert_close(found[name], wanted, **close)


def test_a_model_of_several_graphs_selects_anew() -> None:
    inputs, model = small()
    opt = graphopt.optimize(model, inputs, budget=0.8, backend="aot_eager")
    opt(*inputs).backward()
    before = opt.selected
    assert not opt.reselect(inputs).changed
    for name in before & {"third.weight"}:
        model.get_parameter(name).requires_grad_(False)
    assert opt.reselect(inputs).changed
    assert opt.selected != before
    model.zero_grad()
    opt(*inputs).backward()
    assert set(gradients(model)) == opt.selected


def test_an_output_that_a_hook_has_require_a_gradient_breaks_no_graph() -> None:
    """As with checkpointing of models whose embeddings are frozen."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    model[0].weight.requires_grad_(False)
    model[0].register_forward_hook(lambda module, args, output: output.requires_grad_(True))
    reference, x = copy.deepcopy(model), torch.randint(0, 11, (4, 5))
    reference(x).square().mean().backward()
    opt = graphopt.optimize(model, (x,), budget=0.6, backend="aot_eager")
    opt(x).square().mean().backward()
    assert opt.last_step is not None
    assert len(opt.last_step.regions) == 1
    assert opt.report.flops_ratio <= 0.6
    wanted = gradients(reference)
    found = gradients(model)
    assert set(found) == opt.selected
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, wanted[name])


def made(kind: str) -> tuple[nn.Module, tuple[Tensor, ...], Any]:
    if kind == "one graph":
        model, inputs = zoo.make("mlp", 4)
    else:
        inputs, model = small()
    return model, inputs, graphopt.optimize(model, inputs, budget=0.8, backend="aot_eager")


@pytest.mark.parametrize("kind", ["one graph", "several graphs"])
def test_an_optimised_model_that_has_run_is_pickled_and_goes_on(kind: str) -> None:
    model, inputs, opt = made(kind)
    opt(*inputs).backward()
    again = pickle.loads(pickle.dumps(opt))
    assert type(again) is OptimizedModule
    again.zero_grad()
    again(*inputs).backward()
    assert again.selected == opt.selected
    for name, gradient in gradients(again._graphopt_model).items():
        torch.testing.assert_close(gradient, model.get_parameter(name).grad)
    assert again.report.flops_ratio == opt.report.flops_ratio
    copied = copy.deepcopy(opt)
    assert copied.report.flops_ratio == opt.report.flops_ratio
    assert copied._graphopt_model is not model


def test_it_passes_for_the_model_and_shows_its_signature() -> None:
    model, _, opt = made("one graph")
    assert isinstance(opt, type(model))
    assert isinstance(opt, OptimizedModule)
    assert type(opt) is OptimizedModule
    assert inspect.signature(opt.forward) == inspect.signature(model.forward)


@pytest.mark.parametrize("strict", [False, True])
def test_it_is_exported_as_the_model_is(strict: bool) -> None:
    model, inputs, opt = made("one graph")
    opt(*inputs).backward()
    exported = torch.export.export(opt, inputs, strict=strict)
    assert set(exported.state_dict) == set(model.state_dict())
    torch.testing.assert_close(exported.module()(*inputs), model(*inputs))


@pytest.mark.parametrize("kind", ["one graph", "several graphs"])
@pytest.mark.usefixtures("_only_new_objects")
def test_a_model_that_is_dropped_is_freed(kind: str) -> None:
    names = set(vars(graphopt.capture))
    model, inputs, opt = made(kind)
    opt(*inputs).backward()
    gone = weakref.ref(model)
    del model, opt
    gc.collect()
    assert gone() is None
    assert set(vars(graphopt.capture)) == names

"""Selecting tensors anew while training goes on: what changes, what is traced, and what a changed model makes of it."""

from __future__ import annotations

import math
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import graphopt
from graphopt.analysis.flops import flop_profile
from graphopt.calls import batch_dims_of, flatten_call
from tests import zoo
from tests.runtime.test_module import optimized


class Layers(nn.Module):
    """As many of its layers as `depth` says run: all where that is None."""

    def __init__(self, count: int, depth: int | list[int] | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(count))
        self.depth = depth

    def forward(self, x: Tensor) -> Tensor:
        depth = len(self.depth) if isinstance(self.depth, list) else self.depth
        for layer in self.layers[:depth]:
            x = layer(x).tanh()
        return x.square().mean()


def test_a_change_of_selection_clears_stale_gradients_and_is_not_traced() -> None:
    model, inputs, opt = optimized("bert", budget=0.5)
    for _ in range(2):  # the first call writes the kind of problem into the configuration
        zoo.call(opt, inputs).loss.backward()
    compilations = opt.counters.compilations
    first = opt.selected
    other = "bert.pooler.dense.weight" if "bert.pooler.dense.weight" not in first else "bert.pooler.dense.bias"
    opt._install(replace(opt.plan, train=frozenset({other})), opt.graph, opt.flops)
    assert all(p.grad is None for n, p in model.named_parameters() if n != other)
    dict(model.named_parameters())[other].grad = torch.ones_like(dict(model.named_parameters())[other])
    outcome = opt.reselect(inputs, tolerance=0.0)
    assert outcome.changed
    assert opt.selected == first
    assert other in first or dict(model.named_parameters())[other].grad is None
    zoo.call(opt, inputs)
    assert opt.counters.captures == 1
    assert opt.counters.compilations == compilations  # the earlier plan is still compiled


def test_gradients_from_before_the_first_step_move_nothing_that_is_not_selected() -> None:
    """Zeros are enough: AdamW goes on by its momentum."""
    model, x = Layers(2), torch.randn(4, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(x).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    opt = graphopt.optimize(model, (x,), budget=0.7, backend="aot_eager")
    assert all(p.grad is not None for p in model.parameters())
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for _ in range(2):
        opt(x).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == opt.selected
    assert moved < set(before)


def test_a_tiny_gain_keeps_the_selection() -> None:
    _, inputs, opt = optimized("bert", budget=0.5)
    before = opt.selected
    outcome = opt.reselect(inputs, tolerance=0.05)
    assert not outcome.changed
    assert outcome.gain == pytest.approx(0, abs=1e-6)
    assert opt.selected == before
    wrong: tuple[Any, ...] = (math.nan, -0.1, "x")
    for tolerance in wrong:
        with pytest.raises(graphopt.InputError, match="must be a fraction of at least 0"):
            opt.reselect(inputs, tolerance=tolerance)


@pytest.mark.parametrize("replaced", [True, False])
def test_parameters_that_are_new_are_selected_and_counted_like_all_others(replaced: bool) -> None:
    model, x = Layers(4), torch.randn(4, 8)
    opt = graphopt.optimize(model, (x,), budget=0.6, backend="aot_eager")
    opt(x).backward()
    if replaced:
        model.layers[2] = nn.Sequential(nn.Linear(8, 24), nn.GELU(), nn.Linear(24, 8))
    else:
        model.layers.append(nn.Linear(8, 8))
    opt(x).backward()  # trains what the plan does not know
    assert opt.reselect((x,)).changed
    assert {n for n, p in model.named_parameters() if p.grad is not None} <= opt.selected
    with FlopCounterMode(display=False) as counter:
        opt(x).backward()
    assert {n for n, p in model.named_parameters() if p.grad is not None} == opt.selected
    assert counter.get_total_flops() <= 0.6 * flop_profile(graphopt.analyze(model, (x,)).graph).step


def test_where_all_tensors_are_trained_freezing_some_changes_what_is_counted() -> None:
    model, inputs, opt = optimized("bert", budget=1.0)
    frozen = next(name for name, m in model.named_modules() if isinstance(m, nn.Linear)) + ".weight"
    dict(model.named_parameters())[frozen].requires_grad_(False)
    before, flops = opt.selected, opt.report.step_flops
    assert opt.reselect(inputs).changed
    assert opt.selected == before - {frozen}
    assert opt.report.step_flops < flops
    assert not opt.reselect(inputs).changed
    dict(model.named_parameters())[frozen].requires_grad_(True)
    assert opt.reselect(inputs).changed
    assert opt.selected == before


def test_selecting_anew_counts_the_branch_that_a_flag_of_the_model_takes() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.deep = nn.Linear(8, 8), nn.Linear(8, 8), False

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            for _ in range(6 if self.deep else 1):
                x = self.b(x)
            return x.square().mean()

    model, x = Deep(), torch.randn(4, 8)
    opt = graphopt.optimize(model, (x,), budget=0.8, backend="aot_eager")
    before = opt.captures.graph((x,), {})
    model.deep = True
    assert opt.captures.graph((x,), {}) is not before


@pytest.mark.parametrize("kind", [int, list])
def test_selecting_anew_counts_the_layers_that_the_model_runs_by_now(kind: type) -> None:
    model, x = Layers(6, depth=2 if kind is int else [0, 1]), torch.randn(4, 8)
    opt = graphopt.optimize(model, (x,), budget=0.6, backend="aot_eager")
    opt(x).backward()
    model.depth = 6 if kind is int else list(range(6))
    assert opt.reselect((x,)).changed
    assert opt.flops.step == flop_profile(graphopt.analyze(model, (x,)).graph).step
    captures = opt.counters.captures
    opt.reselect((x,))
    assert opt.counters.captures == captures


def test_an_option_at_the_address_of_an_earlier_one_is_traced_anew() -> None:
    class Option:
        __hash__ = None  # type: ignore[assignment]

    model, x = Layers(4), torch.randn(4, 8)
    captures = graphopt.optimize(model, (x,), backend="aot_eager").captures
    call = flatten_call((x,), {"option": Option()})
    dims = batch_dims_of(call, captures.batch_dim)
    earlier, option = captures.signature(call, dims), weakref.ref(call.constants[-1])
    del call
    assert option() is not None  # its address is taken as long as the graph is found by it
    again = flatten_call((x,), {"option": option()})
    assert captures.signature(again, dims) == earlier
    assert captures.signature(flatten_call((x,), {"option": Option()}), dims) != earlier


def test_the_controller_selects_on_schedule() -> None:
    _, inputs, opt = optimized("bert", budget=0.5)
    optimizer = torch.optim.AdamW(opt.parameters(), lr=1e-3)
    controller = graphopt.SelectionController(opt, optimizer, every=3)
    outcomes = [controller.after_step(inputs) for _ in range(7)]
    assert [o is not None for o in outcomes] == [False, False, True, False, False, True, False]
    with pytest.raises(graphopt.InputError, match="every"):
        graphopt.SelectionController(opt, optimizer, every=0)

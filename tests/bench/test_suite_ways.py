"""Every way of `graphopt bench suite` trains a tiny classifier for a few steps, and keeps to what it says it trains."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import graphopt
from graphopt.bench.projected_adamw import ApolloAdamW, GaloreAdamW
from graphopt.bench.suite_run import prepare
from graphopt.bench.suite_ways import PERIOD, WAYS, Prepared, Start, counted_flops, one_block, two_layers
from graphopt.compat.dynamo import seconds_compiling
from tests import zoo
from tests.long_forms import long

WHOLE = ("exact", "auto", "lsp", "LoRA", "DoRA", "reordered LoRA", "GaLore", "APOLLO", "checkpointing")
"""Those that treat all blocks alike: one will do."""


def check_flops(way: str, prepared: Prepared, batch: dict[str, torch.Tensor]) -> None:
    """FLOPs of a step are those that torch's counter sees of the model that runs, less where a way trains or samples a part."""
    found = prepared.step_flops()
    for p in prepared.model.parameters():
        assert p.grad is None
    if way in ("LoRA", "DoRA", "reordered LoRA"):
        assert found > 0
    elif way in ("exact", "GaLore", "APOLLO", "checkpointing"):
        whole = counted_flops(zoo.make("bert", 4, layers=1)[0], batch)
        assert found == pytest.approx(whole * (4 / 3 if way == "checkpointing" else 1), rel=0.1)
    else:
        whole = counted_flops(zoo.make("bert", 4, layers=1 if way in WHOLE else 2)[0], batch)
        assert 0.3 * whole < found <= (1.5 if way == "memory=0.5" else 1.0) * whole


def start(way: str) -> tuple[nn.Module, dict[str, torch.Tensor], float, float]:
    """The model after three steps on one batch, that batch, and its loss before and after."""
    model, batch = zoo.make("bert", 4, layers=1 if way in WHOLE else 2)
    before = float(model(**batch).loss.detach())
    prepared = WAYS[way](Start(model, batch, 5e-3, 0, "aot_eager"))
    for _ in range(3):
        prepared.step(**batch).loss.backward()
        prepared.optimizer.step()
        prepared.optimizer.zero_grad()
        prepared.after_step(batch)
    assert prepared.compile_seconds() > 0
    check_flops(way, prepared, batch)
    return prepared.model, batch, before, float(prepared.model(**batch).loss.detach())


LONG = (
    "vcas", "flops=0.4", "flops=0.6", "flops=0.7", "memory=0.5", "reordered LoRA", "DoRA", "topmost", "checkpointing", "APOLLO",
    "LISA",
)  # fmt: skip
"""Those that another one is alike: APOLLO projects as GaLore does, LISA takes turns as BAdam does."""


@pytest.mark.parametrize("way", [*(way for way in WAYS if way not in LONG), *long(*LONG)])
def test_a_way_learns_one_batch(way: str) -> None:
    _, _, before, after = start(way)
    assert after < before


def test_rotations_train_what_they_say_and_come_to_every_layer() -> None:
    layers, others = [nn.Linear(1, 1) for _ in range(5)], [nn.Linear(1, 1)]
    lisa = list(itertools.islice(two_layers(layers, others, 0), 30))
    assert all(modules[0] is others[0] and len(set(modules)) == 3 for modules in lisa)
    assert {m for modules in lisa for m in modules} == {*layers, *others}
    blocks = list(itertools.islice(one_block(layers, others, 0), 6))
    assert {m for block in blocks for m in block} == {*layers, *others}


def test_a_rotation_changes_layers_after_its_period() -> None:
    model, batch = zoo.make("bert", 4)
    prepared = WAYS["BAdam"](Start(model, batch, 1e-3, 0, "aot_eager"))
    first = {name for name, p in model.named_parameters() if p.requires_grad}
    for _ in range(PERIOD):
        prepared.after_step(batch)
    second = {name for name, p in model.named_parameters() if p.requires_grad}
    assert first
    assert second
    assert not first & second


@pytest.mark.parametrize("make", [GaloreAdamW, ApolloAdamW])
def test_projected_states_are_small_and_a_tall_matrix_is_stepped_as_its_transpose(make: Callable[..., Any]) -> None:
    wide, tall, bias, kernel = (nn.Parameter(torch.zeros(shape)) for shape in ((6, 20), (20, 6), (20,), (20, 1, 1, 1)))
    gradients = [torch.randn(6, 20) for _ in range(3)]
    optimizers = [make([wide, bias, kernel], lr=0.1, rank=2), make([tall], lr=0.1, rank=2)]
    for gradient in gradients:
        wide.grad, tall.grad, bias.grad, kernel.grad = gradient, gradient.t(), gradient[0], gradient[0].view_as(kernel)
        for optimizer in optimizers:
            torch.manual_seed(0)
            optimizer.step()
    torch.testing.assert_close(tall, wide.t())
    assert optimizers[0].state[wide]["first"].shape == (2, 20)
    ordinary = nn.Parameter(torch.zeros(20))
    adam = torch.optim.Adam([ordinary], lr=0.1, eps=1e-6)
    for gradient in gradients:
        ordinary.grad = gradient[0]
        adam.step()
    torch.testing.assert_close(bias, ordinary)
    torch.testing.assert_close(kernel.flatten(), ordinary)


def test_apollo_with_a_rank_as_large_as_the_matrix_scales_channels_as_adam_does() -> None:
    """With P orthogonal, |P'u| = |u|: the first step moves every channel as far as Adam's, along its gradient."""
    p = nn.Parameter(torch.zeros(8, 12))
    gradient = torch.randn(8, 12)
    optimizer = ApolloAdamW([p], lr=0.1, rank=7)
    p.grad = gradient
    optimizer.step()
    projector = optimizer.state[p]["projector"]
    projected = projector @ gradient
    factor = torch.sign(projected).norm(dim=0) / projected.norm(dim=0)
    torch.testing.assert_close(p.detach(), -0.1 * gradient * factor, rtol=1e-3, atol=1e-5)
    before = copy.deepcopy(p.detach())
    p.grad = 100 * gradient
    optimizer.step()
    assert float((p.detach() - before).norm()) <= 1.0101 * float(before.norm())  # a step's norm grows by 1 % at most


def test_what_the_benchmark_finds_out_for_a_rule_is_not_in_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = zoo.make("mlp", 4)
    analyze, took = graphopt.analyze, 1000.0  # far more than all else
    monkeypatch.setattr("graphopt.bench.suite_ways.time", SimpleNamespace(perf_counter=lambda: time.perf_counter() + late[0]))
    monkeypatch.setattr("graphopt.bench.suite_run.now", lambda device: time.perf_counter() + late[0])
    late = [0.0]

    def slow(*args: Any, **options: Any) -> Any:
        late[0] += took
        return analyze(*args, **options)

    monkeypatch.setattr(graphopt, "analyze", slow)
    _, setup, compiling = prepare(WAYS["random"], Start(model, batch, 5e-3, 0, "aot_eager"), "cpu")
    assert late == [took]
    assert 0 < setup + compiling < took


@pytest.mark.parametrize("planned", [False, True])
def test_compiling_for_another_size_has_a_clock_of_its_own_in_every_way(planned: bool) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    example = torch.ones(3, 5)
    step = graphopt.optimize(model, (example,), backend="aot_eager") if planned else torch.compile(model, backend="aot_eager")
    spent = [seconds_compiling()]
    for rows in (3, 3, 7, 7):
        step(torch.ones(rows, 5)).sum().backward()
        spent.append(seconds_compiling())
    assert [after > before for before, after in itertools.pairwise(spent)] == [True, False, True, False]

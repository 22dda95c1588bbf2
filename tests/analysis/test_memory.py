"""Predicted memory against the allocator's own events, and what a profile says about itself."""

from __future__ import annotations

import functools
from collections import defaultdict
from pathlib import Path

import pytest
import torch
import torch.utils.checkpoint
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

import graphopt
from graphopt import BudgetError, InputError
from graphopt.analysis.eager_memory import eager_memory
from graphopt.analysis.memory import MemoryProfile
from graphopt.analysis.optimizers import named_optimizer
from graphopt.analysis.step_memory import step_memory
from graphopt.calls import as_call
from graphopt.capture import capture
from tests import zoo
from tests.analysis.test_flops import Branches
from tests.long_forms import long
from tests.measure import peak_and_rest

BATCH = 24


def measured_peak(step: nn.Module, inputs: object, optimizer_name: str) -> int:
    """Bytes that one step allocates on top of what exists before it, at its peak."""
    optimizer = named_optimizer(optimizer_name, torch.device("cpu"))([p for p in step.parameters() if p.requires_grad])

    def train() -> None:
        zoo.loss_of(zoo.call(step, inputs)).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        train()
    return peak_and_rest(train)[0]


OPTIONS = defaultdict[str, dict[str, int]](dict, bert={"layers": 1})


@functools.cache
def predicted(name: str, backend: str, optimizer: str, batch: int = BATCH, **options: bool | int) -> MemoryProfile:
    if backend != "eager":
        return step_memory(zoo.captured(name, batch, **OPTIONS[name]), backend, optimizer, **options)  # type: ignore[arg-type]
    model, inputs = zoo.make(name, batch, **OPTIONS[name])
    return eager_memory(model, *as_call(inputs), optimizer=optimizer, **options)  # type: ignore[arg-type]


MASKED = ("t5-tied", "vit")
"""Their masks are computed from the batch in the graph that is planned on, and are constants in the one that runs."""


def assert_compiled_peak_is_predicted(
    model: nn.Module, inputs: object, backend: str, optimizer: str, tolerance: float, masked: bool = False
) -> None:
    """Within `tolerance`; of a `masked` model by the graph that runs, and by the planned one no less."""
    opt = graphopt.optimize(model, inputs, passes=[], backend=backend)  # type: ignore[arg-type]
    measured = measured_peak(opt, inputs, optimizer)
    assert opt.last_step is not None
    planned = step_memory(opt.graph, backend, optimizer)
    assert planned.peak_bytes - planned.static_bytes >= measured * (1 - tolerance)
    profile = step_memory(opt.last_step.graph, backend, optimizer) if masked else planned
    assert profile.peak_bytes - profile.static_bytes == pytest.approx(measured, rel=tolerance)


# Eager LSTMs run in a library whose workspace torch does not reveal.
@pytest.mark.parametrize("name", ["mlp", "cnn", "bert", "t5-tied", *long("llama", "lstm", "opt", "gpt2", "bloom", "vit", "lora")])
def test_the_peak_is_the_allocators(name: str) -> None:
    assert_compiled_peak_is_predicted(*zoo.make(name, BATCH, **OPTIONS[name]), "aot_eager", "adamw", 0.01, name in MASKED)


class Conditioned(nn.Module):
    """An input that enters after the layers: its gradient is computed first, and held while theirs are."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        return (self.layers(x) * condition).square().mean()


def test_the_gradient_of_an_input_is_held() -> None:
    inputs = torch.randn(16, 64), torch.randn(16, 64, requires_grad=True)
    opt = graphopt.optimize(Conditioned(), inputs, passes=[], backend="aot_eager")
    optimizer = torch.optim.SGD([*opt.parameters(), inputs[1]])

    def train() -> None:
        opt(*inputs).backward()
        optimizer.zero_grad()

    train()
    profile = step_memory(opt.graph, "aot_eager", "sgd")
    assert profile.peak_bytes - profile.static_bytes == pytest.approx(peak_and_rest(train)[0], rel=0.01)


class Checkpointed(nn.Module):
    """Attention and two wide layers, which can be computed again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.below, self.norm, self.heads, self.out = nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)
        self.up, self.down, self.checkpointing = nn.Linear(32, 128), nn.Linear(128, 32), False

    def gradient_checkpointing_enable(self) -> None:
        self.checkpointing = True

    def block(self, x: Tensor) -> Tensor:
        query, key, value = self.heads(self.norm(x)).unflatten(-1, (3, 4, 8)).movedim(-3, 0).transpose(2, 3)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.below(x)
        x = torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=False) if self.checkpointing else self.block(x)
        return x.square().mean()


def with_attention(batch: int) -> tuple[Checkpointed, tuple[Tensor]]:
    return Checkpointed(), (torch.randn(batch, 12, 32),)


@pytest.mark.parametrize("name", ["mlp", "checkpointing", *long("llama checkpointing", "llama", "cnn", "lora")])
def test_the_peak_under_inductor_is_the_allocators(name: str) -> None:
    """Of the program that Inductor would generate: what it fuses, recomputes, reorders and copies to other layouts."""
    model, inputs = with_attention(BATCH) if name == "checkpointing" else zoo.make(name.split()[0], BATCH)
    if name.endswith("checkpointing"):
        model.gradient_checkpointing_enable()
    assert_compiled_peak_is_predicted(zoo.in_one_block(model), inputs, "inductor", "sgd", 0.001)


@pytest.mark.parametrize("name", ["mlp", "cnn", "llama", "bert", "t5-tied", *long("opt", "gpt2", "bloom", "vit", "lora")])
def test_the_peak_in_eager_mode_is_the_allocators(name: str) -> None:
    profile = predicted(name, "eager", "adamw")
    measured = measured_peak(*zoo.make(name, BATCH, **OPTIONS[name]), "adamw")
    assert profile.peak_bytes - profile.static_bytes == pytest.approx(measured, rel=0.01)


@pytest.mark.parametrize("backend", ["aot_eager", "eager", *long("inductor")])
def test_analyze_predicts_the_same(backend: str) -> None:
    model, inputs = zoo.make("mlp", BATCH)
    analysis = graphopt.analyze(model, inputs, backend=backend, accumulation=2, keep_outputs=True)  # type: ignore[arg-type]
    assert analysis.memory.timeline == predicted("mlp", backend, "adamw", accumulation=2, keep_outputs=True).timeline


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", ["mlp", "bert", "cnn"])
def test_another_batch_is_what_analysis_there_says(name: str, backend: str) -> None:
    profile = predicted(name, backend, "adamw")
    for batch in (3, 17) if name == "mlp" else (17,):
        again = predicted(name, backend, "adamw", batch)
        assert profile.at(batch).peak_bytes == again.peak_bytes
        assert profile.at(batch).breakdown == again.breakdown


@pytest.mark.parametrize("name", ["mlp", "cnn", *long("bert")])
def test_another_batch_under_inductor_runs_nearly_the_same_program(name: str) -> None:
    """Inductor's choices depend on sizes, so the program for another batch can differ in a few small buffers."""
    profile = predicted(name, "inductor", "adamw")
    for batch in (3, 17) if name == "mlp" else (17,):
        assert profile.at(batch).peak_bytes == pytest.approx(predicted(name, "inductor", "adamw", batch).peak_bytes, rel=0.001)


def test_the_largest_batch_fits_and_the_next_does_not() -> None:
    profile = predicted("mlp", "aot_eager", "adamw")
    capacity = profile.at(17).peak_bytes + 1
    assert profile.max_batch(capacity) == 17
    assert predicted("mlp", "aot_eager", "adamw", 17).peak_bytes <= capacity
    assert capacity < predicted("mlp", "aot_eager", "adamw", 18).peak_bytes
    assert profile.at(17).fits(capacity)
    assert not profile.at(18).fits(capacity)
    assert profile.max_batch(profile.at(1).peak_bytes - 1) == 0


@given(batch=st.integers(1, 500))
@settings(max_examples=30)
def test_a_profile_is_consistent_at_every_batch(batch: int) -> None:
    whole = predicted("bert", "aot_eager", "adamw")
    profile = whole.at(batch)
    rows = profile.timeline
    assert sum(profile.breakdown.values()) == profile.peak_bytes == max(row.live for row in rows)
    assert all(sum(row.by_category.values()) == row.live for row in rows)
    assert sum(row.allocated for row in rows) == sum(row.freed for row in rows)
    # Never less than what the largest operator holds by itself, never more than all storages together (papers.md 4.8, P8).
    assert max(profile.sizes) <= profile.peak_bytes <= sum(profile.sizes)
    assert profile.peak_bytes >= profile.static_bytes
    assert profile.peak_bytes <= whole.at(batch + 1).peak_bytes


def test_the_tensors_at_the_peak_are_named_with_their_reason() -> None:
    profile = predicted("llama", "aot_eager", "adamw")
    live = profile.top(10**6)
    assert sum(t.bytes for t in live) == profile.peak_bytes
    assert [t.bytes for t in live] == sorted((t.bytes for t in live), reverse=True)
    assert all(t.name and t.why for t in live)
    assert any(t.category == "saved activation" and "mlp" in t.module for t in live)
    assert profile.peak_phase in ("forward", "backward", "optimizer")
    assert len(profile.top(3)) == 3


def test_gradient_accumulation_and_held_outputs_cost_what_they_hold() -> None:
    parameters = sum(p.numel() * p.element_size() for p in zoo.make("llama")[0].parameters())
    once = predicted("llama", "aot_eager", "adamw").peak_bytes
    assert once < predicted("llama", "aot_eager", "adamw", accumulation=4).peak_bytes <= once + parameters
    assert once <= predicted("llama", "aot_eager", "adamw", keep_outputs=True).peak_bytes
    for backend in ("eager", "aot_eager"):
        profile = predicted("llama", backend, "adamw", accumulation=2)
        assert profile.timeline[0].by_category["gradient"] == parameters


def test_master_weights_are_float32_copies() -> None:
    model, inputs = zoo.make("mlp", BATCH, torch.bfloat16)
    graph = capture(model, *as_call(inputs))
    count = sum(p.numel() for p in model.parameters())
    half, master = (step_memory(graph, "aot_eager", "sgd", master_weights=m) for m in (False, True))
    assert master.static_bytes - half.static_bytes == 4 * count


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_what_checkpointing_recomputes_is_not_saved(backend: str) -> None:
    model, inputs = with_attention(64)
    plain = graphopt.analyze(model, inputs, backend=backend, optimizer="sgd").memory
    model.gradient_checkpointing_enable()
    checkpointed = graphopt.analyze(model, inputs, backend=backend, optimizer="sgd").memory
    assert checkpointed.breakdown["saved activation"] < 0.7 * plain.breakdown["saved activation"]


def test_frozen_tensors_have_neither_gradient_nor_state() -> None:
    model, inputs = zoo.make("mlp", BATCH)
    model.first.requires_grad_(False)
    for backend in ("eager", "aot_eager"):
        profile = graphopt.analyze(model, inputs, backend=backend).memory  # type: ignore[arg-type]
        assert not [b.name for b in profile.blocks if b.category in ("gradient", "optimizer state") and "first" in b.name]


class LooksAtValues(nn.Module):
    """Python that depends on a computed value."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y.sum() if y.sum().item() > 0 else y.mean()


def test_bad_input_is_refused_with_the_remedy() -> None:
    model, inputs = zoo.make("mlp", BATCH)
    with pytest.raises(InputError, match="adamw8bit"):
        graphopt.analyze(model, inputs, optimizer="lion")
    with pytest.raises(InputError, match="'eager'"):
        graphopt.analyze(model, inputs, backend="tvm")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="at least 1"):
        graphopt.analyze(model, inputs, accumulation=0)
    profile = graphopt.analyze(model, inputs, backend="aot_eager").memory
    with pytest.raises(BudgetError, match="24GiB"):
        profile.fits("plenty")
    with pytest.raises(InputError, match="at least 1"):
        profile.at(0)


def test_a_model_that_is_not_one_graph_is_analysed_in_parts() -> None:
    analysis = graphopt.analyze(LooksAtValues(), (torch.randn(3, 4),), backend="aot_eager")
    assert analysis.flops.step > 0
    assert analysis.memory.peak_bytes > 0


def test_analysis_changes_nothing() -> None:
    model, inputs = zoo.make("cnn", BATCH)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    state = torch.get_rng_state()
    for backend in ("eager", "aot_eager"):
        graphopt.analyze(model, inputs, backend=backend).memory.timeline  # type: ignore[arg-type]  # noqa: B018
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(state, torch.get_rng_state())


def test_a_model_with_a_condition_has_a_memory_under_inductor() -> None:
    memory = graphopt.analyze(Branches(), (torch.randn(4, 8),)).memory
    assert memory.peak_bytes > sum(4 * p.numel() for p in Branches().parameters())


class Stateful(nn.Module):
    """Its code fixes the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.state = nn.Linear(4, 4), nn.Buffer(torch.zeros(BATCH, 4))

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) + self.state).square().mean()


def test_a_model_that_fixes_its_batch_has_a_memory_in_eager_mode_too() -> None:
    memory = graphopt.analyze(Stateful(), (torch.randn(BATCH, 4),), backend="eager").memory
    assert not memory.symbolic
    assert memory.peak_bytes > 4 * BATCH * 4


def test_predicting_leaves_no_folder_where_caches_are_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with torch._inductor.config.patch(force_disable_caches=True):
        assert graphopt.analyze(Branches(), (torch.randn(4, 8),)).memory.peak_bytes > 0
    assert [folder.name for folder in tmp_path.glob("tmp*")] == []


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_step_that_ran_has_the_memory_that_was_planned(backend: str) -> None:
    """Its graph returns updated buffers after gradients, and the plan's before outputs."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))
    opt = graphopt.optimize(model, torch.randn(4, 3, 8, 8), loss=lambda output: output.square().mean(), backend="aot_eager")
    opt(torch.randn(4, 3, 8, 8)).square().mean().backward()
    assert opt.last_step is not None
    planned = opt.plan.rewrite(opt.graph)[0]
    peaks = [step_memory(graph, backend, "adamw").peak_bytes for graph in (opt.last_step.graph, planned)]
    assert peaks[0] == peaks[1] > 0

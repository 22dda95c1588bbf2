"""Plans over devices."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

import graphopt
from graphopt import BudgetError, InputError
from graphopt.distributed.predicted import block_of
from graphopt.planner.parallel import SEGMENT_SLACK, Layout, Method, plan_devices, strategy_bytes
from tests import zoo


def _profile():  # type: ignore[no-untyped-def]
    model, inputs = zoo.make("llama", 4, layers=2)
    return graphopt.analyze(model, inputs, backend="aot_eager").memory


PROFILE = _profile()
GENEROUS = SEGMENT_SLACK + PROFILE.at(64).peak_bytes


@given(batch=st.integers(1, 64), power=st.integers(0, 4))
@settings(max_examples=25)
def test_sharding_never_costs_more_than_it_gathers(batch: int, power: int) -> None:
    profile, n = PROFILE.at(batch), 2**power
    single = {m: strategy_bytes(profile, Layout(m, 1)) for m in (Method.CDP, Method.ADP, Method.TP, Method.DP_TP)}
    assert set(single.values()) == {profile.peak_bytes}  # papers.md 4.8, P7
    assert strategy_bytes(profile, Layout(Method.TP, 2 * n, 2 * n)) <= strategy_bytes(profile, Layout(Method.TP, n, n))
    padding = sum(  # weights, two buffers that they are gathered into, and one for their gradients
        4 * size // int(b.shape[0]) * (-int(b.shape[0]) % (4 * n))
        for b, size in zip(profile.blocks, profile.sizes, strict=True)
        if b.category == "parameter"
    )
    assert strategy_bytes(profile, Layout(Method.ADP, 4 * n)) <= strategy_bytes(profile, Layout(Method.ADP, 2 * n)) + padding
    hybrid = strategy_bytes(profile, Layout(Method.DP_TP, 4 * n, 2))
    assert hybrid <= strategy_bytes(profile, Layout(Method.TP, 2, 2))
    assert strategy_bytes(profile, Layout(Method.CDP, 2 * n)) >= profile.peak_bytes


def test_the_batch_is_the_largest_that_leaves_the_margin() -> None:
    found = plan_devices(PROFILE, 1, GENEROUS, context_bytes=0, margin=0.1)
    assert found.strategy == "CDP"
    peak = lambda batch: PROFILE.at(batch).peak_bytes + SEGMENT_SLACK  # noqa: E731
    assert peak(found.batch_size) <= GENEROUS * 0.9 < peak(found.batch_size + 1)
    closer = plan_devices(PROFILE, 1, GENEROUS, context_bytes=0, margin=0.1, allow_within_margin=True)
    assert peak(closer.batch_size) <= GENEROUS < peak(closer.batch_size + 1)


def test_data_parallel_wins_where_it_fits_and_offload_only_where_nothing_does() -> None:
    found = plan_devices(PROFILE, 4, GENEROUS, context_bytes=0)
    assert found.strategy == "CDP"
    assert [row.strategy for row in found.table] == ["CDP", "ADP", "TP", "DP+TP (2 x 2)"]
    tight = SEGMENT_SLACK + PROFILE.at(1).peak_bytes // 3
    offloaded = plan_devices(PROFILE, 1, tight, context_bytes=0)
    assert offloaded.strategy == "offload"
    assert all(row.batch_size == 0 for row in offloaded.table[:-1])
    assert "one sample takes" in offloaded.table[0].why
    assert plan_devices(PROFILE, 1, SEGMENT_SLACK, context_bytes=0).batch_size == 0


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_data_parallel_is_predicted_from_the_graph_that_averages(backend: str) -> None:
    model, inputs = zoo.make("mlp", 4)
    analysis = graphopt.analyze(model, inputs, backend=backend)  # type: ignore[arg-type]
    averaging = analysis.memory_on(4)
    assert averaging is not None
    assert analysis.memory_on(1) is None
    options = {"devices": 4, "device_memory": "64MiB", "context_bytes": 0, "backend": backend}
    found = graphopt.plan(model, inputs, **options)  # type: ignore[arg-type]
    row = found.table[0]
    assert row.peak_bytes == averaging.at(row.batch_size).peak_bytes + SEGMENT_SLACK
    assert any("optimize(mesh=...)" in assumption for assumption in found.assumptions)
    gathering = graphopt.plan(model, inputs, accumulation=2, **options)  # type: ignore[arg-type]
    assert any("DDP's gradient buckets" in assumption for assumption in gathering.assumptions)


class Numbers(nn.Module):
    """Parameters that have no rows."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.empty = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale).square().mean() + self.empty.sum()


def test_sharding_parameters_without_rows() -> None:
    memory = graphopt.analyze(Numbers(), (torch.randn(8, 4),), backend="aot_eager").memory
    assert memory.peak_bytes <= strategy_bytes(memory, Layout(Method.ADP, 4)) <= memory.peak_bytes + 64


def test_in_eager_mode_two_blocks_are_taken_to_be_gathered_and_not_all() -> None:
    model, inputs = zoo.make("bert", 4)
    backends: tuple[Literal["eager", "aot_eager"], ...] = ("eager", "aot_eager")
    eager, compiled = (graphopt.analyze(model, inputs, backend=backend).memory for backend in backends)
    sharded = Layout(Method.ADP, 2)
    assert strategy_bytes(compiled, sharded) < strategy_bytes(eager, sharded) < 1.2 * strategy_bytes(compiled, sharded)


def test_repeated_blocks_are_found_by_their_numbers() -> None:
    names = [b.name for b in PROFILE.blocks if b.category == "parameter"]
    assert {"", "model.layers.0"} <= {block_of(name) for name in names}
    assert block_of("0.weight") == "0"
    assert block_of("encoder.3.experts.1.weight") == "encoder.3"


def test_plan_takes_a_model_and_states_what_it_assumed() -> None:
    model, inputs = zoo.make("bert", 4)
    found = graphopt.plan(model, inputs, devices=2, device_memory="1GiB", optimizer="sgd", backend="aot_eager")
    assert found.batch_size > 0
    text = " ".join(found.assumptions)
    assert all(word in text for word in ("attention", "context", "optimizer sgd", "free"))
    first, *rest = str(found).splitlines()
    assert first == f"{found.strategy}, batch {found.batch_size} per device"
    assert [line.split("  ")[1] for line in rest] == [row.strategy for row in found.table]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"devices": 0}, InputError, "at least 1"),
        ({"devices": 1.5}, InputError, "whole number"),
        ({"devices": 4, "tensor_parallel": 3}, InputError, "does not divide"),
        ({"devices": 4, "tensor_parallel": "2"}, InputError, "does not divide"),
        ({"margin": "5%"}, InputError, r"\[0, 1\)"),
        ({"accumulation": None}, InputError, "at least 1"),
        ({"device_memory": "16 apples"}, BudgetError, "24GiB"),
        ({"margin": 1.0}, InputError, r"\[0, 1\)"),
        ({"optimizer": "lion"}, InputError, "adamw"),
    ],
)
def test_bad_input_is_one_clear_error(options: dict, error: type, message: str) -> None:  # type: ignore[type-arg]
    model, inputs = zoo.make("mlp", 4)
    with pytest.raises(error, match=message):
        graphopt.plan(model, inputs, **{"devices": 1, "device_memory": "1GiB", **options})

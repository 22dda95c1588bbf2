"""The simulated schedules: the paper's claims that hold (papers.md 2.4), and what any schedule obeys (2.8, P9)."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from graphopt.bench.offload_simulator import Layer, gantt, planned_transition, simulate

SECONDS = st.floats(0.0, 1.0).map(lambda x: round(x, 3))
NATIVE_LLAMA, NATIVE_GPT2 = 1e-3, 7.9e-3
"""Seconds of updating a layer on the device."""

LAYERS = st.lists(st.builds(Layer, SECONDS, SECONDS, SECONDS, SECONDS, SECONDS, SECONDS), min_size=1, max_size=8)


def total(layers: list[Layer], what: str) -> float:
    return sum(getattr(layer, what) for layer in layers)


def zero_bound(layers: list[Layer]) -> float:
    """T_FWD + max(T_BWD, T_out) + max(T_UPD, T_back), the time of ZeRO-Offload's schedule (Eq. 1)."""
    forward, backward, out, update, back = (total(layers, what) for what in ("forward", "backward", "out", "update", "back"))
    return forward + max(backward, out) + max(update, back)


def layerwise_bound(layers: list[Layer]) -> float:
    """max(T_FWD + T_BWD + one layer's copies and update, T_out, T_back, T_UPD): what no layer-wise schedule can beat."""
    device = total(layers, "forward") + total(layers, "backward") + total(layers, "apply")
    tail = min(layer.out + layer.update + layer.back for layer in layers)
    return max(device + tail, *(total(layers, what) for what in ("out", "back", "update")))


def native(layers: list[Layer], update: float) -> float:
    """Without offloading: the device updates every layer, in `update` seconds."""
    return total(layers, "forward") + total(layers, "backward") + update * len(layers)


def llama(reduction: float = 1.0) -> list[Layer]:
    """Table 1: llama-7B on an RTX 4090, 14 GB of parameters over 15 GB/s, 0.06 s of update per layer."""
    copy = 14 / 15 / 32 / reduction
    return [Layer(1.7e-3, 3.5e-3, copy, 0.06 / reduction, copy)] * 32


def gpt2() -> list[Layer]:
    """Table 4: GPT2-1.3B on a laptop: 2.6 GB over 12.5 GB/s."""
    copy = 2.6 / 12.5 / 40
    return [Layer(4.5e-3, 8.7e-3, copy, 0.08, copy)] * 40


def test_the_papers_numbers_that_hold() -> None:
    seconds = native(llama(), NATIVE_LLAMA)
    assert seconds == pytest.approx(0.198, abs=5e-4)
    assert zero_bound(llama()) == pytest.approx(2.908, abs=1e-3)
    assert zero_bound(llama()) / seconds == pytest.approx(14.7, abs=0.05)
    assert native(gpt2(), NATIVE_GPT2) == pytest.approx(0.844, abs=5e-4)
    for reduction, bound in ((441, 0.1667), (110, 0.1674), (27.6, 0.1705), (6.9, 0.2785)):
        assert layerwise_bound(llama(reduction)) == pytest.approx(bound, rel=2e-3)
    assert sum(layer.update for layer in llama()) == pytest.approx(1.92)
    assert sum(layer.out for layer in llama()) == pytest.approx(0.933, abs=1e-3)


def test_the_papers_ratios_to_the_gpus_time_hold_on_gpt2_13b() -> None:
    """Section 3.1 names llama-7B and divides by Table 4's GPT2-1.3B: 14 GB and 40 GB over 15 GB/s, in its GPU times."""
    seconds = native(gpt2(), NATIVE_GPT2)
    assert 14 / 15 / seconds == pytest.approx(1.106, abs=5e-4)
    assert 40 / 15 / seconds == pytest.approx(3.16, abs=5e-3)


def test_zeros_slowdown_on_gpt2_13b_is_the_measured_one() -> None:
    """Figure 2: 4.28 times the GPU's time, measured; the simulation leaves out what Adam overlaps with copies."""
    slowdown = simulate(gpt2(), "zero").seconds / native(gpt2(), NATIVE_GPT2)
    assert slowdown == pytest.approx(4.28, rel=0.05)


@pytest.mark.parametrize(("reduction", "layer"), [(1.0, 32), (110, 0), (27.6, 0), (6.9, 21)])
def test_the_papers_transition_layers_clamped(reduction: float, layer: int) -> None:
    """papers.md 2.3: 32.1, -172, -17.6 and 21.0 before clamping."""
    assert planned_transition(llama(reduction)) == pytest.approx(layer, abs=1)


def test_compressed_it_is_faster_than_native_and_much_faster_than_zero() -> None:
    compressed = simulate(llama(110)).seconds
    assert compressed < native(llama(), NATIVE_LLAMA)
    assert simulate(llama(), "zero").seconds > 10 * compressed
    assert simulate(llama()).seconds < simulate(llama(), "zero").seconds


@given(LAYERS)
def test_no_schedule_beats_its_resources(layers: list[Layer]) -> None:
    result = simulate(layers)
    device = sum(layer.forward + layer.backward + layer.apply for layer in layers)
    longest = max(layer.out + layer.update + layer.back + layer.forward + layer.backward + layer.apply for layer in layers)
    sums = [sum(getattr(layer, what) for layer in layers) for what in ("out", "update", "back")]
    assert result.seconds >= max(device, longest, *sums) - 1e-9


@given(LAYERS)
def test_each_resource_does_one_thing_at_a_time_and_no_forward_is_stale(layers: list[Layer]) -> None:
    for schedule in ("zero", "layerwise"):
        spans = simulate(layers, schedule).spans  # type: ignore[arg-type]
        for resource in {s.resource for s in spans}:
            own = sorted((s.start, s.end) for s in spans if s.resource == resource)
            assert all(a[1] <= b[0] + 1e-9 for a, b in itertools.pairwise(own))


@given(LAYERS)
def test_layerwise_is_never_slower_than_zero(layers: list[Layer]) -> None:
    assert simulate(layers, "layerwise", 0).seconds <= simulate(layers, "zero").seconds + 1e-9


@given(LAYERS)
def test_zero_takes_at_least_what_its_formula_says(layers: list[Layer]) -> None:
    plain = [replace(layer, apply=0.0) for layer in layers]
    assert simulate(plain, "zero").seconds >= zero_bound(plain) - 1e-9


@given(LAYERS, st.integers(0, 7), st.sampled_from(["forward", "backward", "out", "update", "back", "apply"]))
def test_faster_tasks_never_make_a_slower_step_first_come_first_served(layers: list[Layer], index: int, what: str) -> None:
    faster = list(layers)
    i = index % len(layers)
    faster[i] = replace(layers[i], **{what: getattr(layers[i], what) / 2})
    assert simulate(faster, "layerwise", 0).seconds <= simulate(layers, "layerwise", 0).seconds + 1e-9


def test_the_chart_is_drawn(tmp_path: Path) -> None:
    charts = {s: simulate(llama(6.9), s) for s in ("zero", "layerwise")}  # type: ignore[arg-type]
    assert gantt({str(k): v for k, v in charts.items()}, tmp_path / "steps.png").stat().st_size > 5_000

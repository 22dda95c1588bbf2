"""Models whose layers the user has divided among ranks by `parallelize_module`, beside the same ones in eager mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed import work_tensor_parallel
from tests.distributed.spawned import results

Steps = list[tuple[float, dict[str, Tensor]]]


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return results(work_tensor_parallel.work)


@pytest.fixture(scope="module")
def four() -> list[dict[str, Any]]:
    return results(work_tensor_parallel.on_mesh, size=4)


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor], names: list[str], times: int = 1) -> None:
    assert sorted(found) == sorted(names)
    for name in names:
        torch.testing.assert_close(found[name], times * wanted[name], rtol=1e-10, atol=1e-13, msg=name)


def assert_same_steps(found: Steps, eager: Steps, names: list[str]) -> None:
    for (loss, gradients), (wanted, others) in zip(found, eager, strict=True):
        assert loss == pytest.approx(wanted, rel=1e-12)
        assert_same(gradients, others, names)


@pytest.mark.parametrize("name", ["layers", "sequences", "llama", "in parts"])
def test_as_in_eager_mode_but_for_what_is_not_trained(ranks: list[dict[str, Any]], name: str) -> None:
    for found in ranks:
        ours, eager, selected = found[name]
        assert 0 < len(selected) < len(eager[0][1])
        assert selected == ranks[0][name][2]
        assert_same_steps(ours, eager, selected)


def test_flops_and_bytes_are_those_of_a_rank_and_cut_with_the_rest(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        for executed, planned, whole in found["FLOPs"]:
            assert executed == pytest.approx(planned, rel=5e-3)  # of a Llama's positions by frequencies
            assert planned <= work_tensor_parallel.BUDGET * whole
        for dispatched, counted, planned, before in found["bytes"]:
            assert dispatched == counted == planned
            assert 0 < len(counted) < before


def test_tensors_are_rated_as_a_whole(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        for rule in ("norms", "values"):
            ours, whole = found[rule]
            assert len(ours) > 1
            assert ours == pytest.approx(whole, rel=1e-9)


def test_the_peak_of_a_rank_is_the_allocators(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        predicted, measured = found["memory"]
        assert predicted == pytest.approx(measured, rel=0.01)


def test_freezing_and_selecting_anew(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        changed, gradients, whole, selected = found["anew"]
        assert changed
        assert not any(name.startswith("down.") for name in selected)
        assert_same(gradients, whole, selected)


def test_what_is_not_planned_runs_as_torch_compile_has_it(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        notes, ours, eager = found["several meshes"]
        assert "tensor parallel on several meshes" in notes[0]
        assert_same_steps(ours, eager, sorted(eager[0][1]))
        assert "tensor parallel on 2 ranks, and 1 train it: optimize(mesh=...)" in found["other ranks"][0]
        assert found["plan"].startswith("InputError: the weights of the model are divided among ranks already")


def test_a_model_is_divided_as_a_plan_has_it(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        whole, _ = found["distributed, undivided"]
        for strategy in ("CDP", "ADP", "TP"):
            gradients, divided = found[f"distributed, {strategy}"]
            assert_same(gradients, whole, sorted(whole))
            wanted = {"CDP": [], "ADP": list(whole), "TP": [name for name in whole if "_proj" in name]}[strategy]
            assert sorted(divided) == sorted(wanted)


WHY = {
    "again": "divided among ranks already",
    "nothing": "there is nothing to carry out: nothing fits",
    "offload": "plan with more devices",
    "dimensions": "mesh has 2 dimensions, and ADP divides along one",
    "no names": "pass init_device_mesh(.., (1, 2), mesh_dim_names=('dp', 'tp'))",
    "other mesh": "mesh is 2 x 1, on which a batch of 4 does not fit by the plan: pass init_device_mesh(.., (1, 2)",
    "no tp_plan": "it has no tp_plan. Set model.tp_plan",
    "no such names": "are those of no layer, as where another module wraps the model",
    "style": "divides model.layers.*.self_attn.q_proj by 'packed_colwise', for which torch",
    "heads": "2 ranks cannot divide 1 heads",
}


@pytest.mark.parametrize("name", WHY)
def test_what_cannot_be_divided(ranks: list[dict[str, Any]], name: str) -> None:
    for found in ranks:
        assert found["refused"][name].startswith("InputError: ")
        assert WHY[name] in found["refused"][name]


def test_a_rank_that_cannot_compile_adds_nothing_to_other_sums(ranks: list[dict[str, Any]]) -> None:
    told = [found["alone"] for found in ranks]
    second = next(i for i, error in enumerate(told) if error.startswith("RankError: this rank runs other sums in a step"))
    first = told[1 - second]  # which has waited for it: in a graph, or in eager mode, where torch's own error is raised
    assert first.startswith("RankError: another rank has ended") if second else "by peer" in first


def test_each_of_two_groups_averages_its_parts_with_the_others(four: list[dict[str, Any]]) -> None:
    for found in four:
        gradients, selected, (dispatched, counted) = found["step"]
        assert 0 < len(selected) < len(found["one process"])
        assert selected == four[0]["step"][1]
        assert_same(gradients, found["one process"], selected)
        assert dispatched == counted
        norms, wanted = found["norms"]
        assert norms == pytest.approx({name: wanted[name] for name in norms}, rel=1e-9)
        for times, (gathered, in_graph) in enumerate(found["gathered"], 2):
            assert_same(gathered, found["one process"], selected, times)
            assert in_graph is (times == 3)


def test_which_ranks_have_other_samples_has_to_be_said(four: list[dict[str, Any]]) -> None:
    for found in four:
        assert "tensor parallel on 2 ranks, and 4 train it" in found["no mesh"][0]
        assert "fully_shard was applied to it, too" in found["fully_shard, notes"][0]
        ours, eager = found["fully_shard, too"]
        whole = found["fully_shard, one process"]
        for gradients in (ours, eager):
            assert_same(gradients, whole, sorted(whole))

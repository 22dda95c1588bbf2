"""Models that the user has sharded by `fully_shard`, beside the same ones in eager mode."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphopt.distributed.divided import mean_gradients
from tests.distributed import work_sharded
from tests.distributed.spawned import results


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def two(folder: str) -> list[dict[str, Any]]:
    return results(work_sharded.two, folder)


@pytest.fixture(scope="module")
def three(two: list[dict[str, Any]], folder: str) -> list[dict[str, Any]]:
    return results(work_sharded.three, folder, size=3)


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert sorted(found) == sorted(wanted)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-13, msg=name)


def assert_as_eager(found: dict[str, Any]) -> None:
    """Losses, gradients, buffers, and a curve of training: as eager mode has them."""
    assert found["untouched"]
    assert found["calls"] == 0
    for name in {"step", "exact"} & set(found):
        assert found[f"{name}, report"][0] == 0
        assert_same(found[f"{name}, buffers"], found["buffers"])
        for (loss, wanted), (ours, some) in zip(found["eager"], found[name], strict=True):
            assert ours == pytest.approx(loss, rel=1e-12)
            if name == "step":
                assert 0 < len(some) < len(wanted)
                wanted = {name: wanted[name] for name in found["selected"]}
            assert_same(some, wanted)
    counted, predicted = found["collectives"]
    assert counted
    assert predicted == counted
    curve, wanted = found["curves"]
    assert curve == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("name", ["layers", "llama"])
def test_as_in_eager_mode_but_for_what_is_not_trained(two: list[dict[str, Any]], name: str) -> None:
    for found in two:
        assert_as_eager(found[name])
        assert found[name]["selected"] == two[0][name]["selected"]
        assert_same(found[name]["weights"], two[0][name]["weights"])


def test_rows_that_ranks_cannot_divide(three: list[dict[str, Any]]) -> None:
    for found in three:
        assert_as_eager(found["frozen"])


@pytest.mark.parametrize("name", ["layers", "llama"])
def test_the_backward_ends_where_nothing_is_trained(two: list[dict[str, Any]], name: str) -> None:
    for found in two:
        executed, planned = found[name]["FLOPs"]
        assert executed == pytest.approx(planned, abs=0.03)


def test_the_selection_is_that_of_one_process_on_the_joint_batch(two: list[dict[str, Any]]) -> None:
    """Where that normalises each rank's samples by themselves: batch norm alone knows which rank a sample is on."""
    for found in two:
        for rule, (ours, wanted) in found["rated"].items():
            for values, those_wanted in zip(ours[:2], wanted[:2], strict=True):
                assert values == pytest.approx(those_wanted, rel=1e-10, abs=1e-13)
            assert ours[2] == wanted[2]
            assert bool(wanted[1]) == (rule == "steepness")


def test_bytes_that_are_counted_are_dispatched(two: list[dict[str, Any]]) -> None:
    for found in two:
        dispatched, counted = found["sent"]
        assert dispatched == counted
        scattered = sum(size for kind, size in counted if kind == "reduce_scatter")
        assert 8 * sum(found["sizes"]) <= scattered <= 8 * sum(size + 15 for size in found["sizes"])  # a row is padded


def test_gradients_that_gather_before_they_are_averaged(two: list[dict[str, Any]]) -> None:
    for found in two:
        wanted = found["accumulated, eager"]
        assert 0 < len(found["accumulated"]) < len(wanted)
        assert_same(found["accumulated"], {name: wanted[name] for name in found["accumulated"]})


def test_replicated_adapters_on_a_sharded_base(two: list[dict[str, Any]]) -> None:
    def joint(seed: int = 0) -> tuple[Tensor, ...]:
        return tuple(map(torch.cat, zip(*(work_sharded.rows(rank, seed) for rank in range(2)), strict=True)))

    model = work_sharded.adapted()
    model(*joint())[0].backward()
    wanted = work_sharded.gradients(model)
    for name, parameter in model.named_parameters():
        parameter.grad = None
        parameter.requires_grad_(name in two[0]["replicated"][1])
    one = work_sharded.adapted_curve(model, joint)
    for found in two:
        (twice, selected, told, model_runs), (own, notes) = found["replicated"], found["own"]
        assert model_runs == 0
        assert 0 < len(selected) < len(wanted)
        assert_same(twice, {name: 2 * wanted[name] for name in selected})
        assert told["ranks"] == 2
        sent = [size for kind, size in found["replicated, sent"] if kind == "all_reduce"]
        assert sent == [sum(wanted[name].nbytes for name in selected)]
        assert {kind for kind, _ in found["replicated, sent"]} == {"all_reduce", "all_gather"}
        assert any(note.startswith("fully_shard does not average the gradients of 4 trained parameters") for note in notes)
        assert sorted(own) == sorted(wanted)
        assert not torch.allclose(own[selected[0]], wanted[selected[0]])
        assert found["another mesh"].startswith("InputError: mesh has 1 ranks, and the sharded model is trained on 2")
        assert found["other adapters"].startswith(f"InputError: {selected[0]} is not the same on ranks 0 and 1")
    for losses in zip(*(found["replicated, curve"] for found in two), one, strict=True):
        assert sum(losses[:2]) / 2 == pytest.approx(losses[2], rel=1e-9)


def test_freezing_and_selecting_anew(two: list[dict[str, Any]]) -> None:
    for found in two:
        wanted = found["layers"]["eager"][0][1]
        gradients, selected = found["frozen"]
        left = {name: wanted[name] for name in selected if not name.startswith("blocks.2.")}
        assert 0 < len(left) < len(selected)
        assert_same(gradients, left)
        gradients, selected, changed, _ = found["anew"]
        assert changed
        assert not any(name.startswith("blocks.2.") for name in selected)
        assert_same(gradients, {name: wanted[name] for name in selected})


def test_what_cannot_be_had(two: list[dict[str, Any]]) -> None:
    for found in two:
        assert found["mesh, too"].startswith("InputError: fully_shard was applied to the model")
        assert found["layers"]["exact, report"][1][0].startswith("memory= limits nothing")  # and all is trained


def test_a_checkpoint_of_two_ranks_goes_on_three(two: list[dict[str, Any]], three: list[dict[str, Any]], folder: str) -> None:
    assert Path(folder, "plan").exists()
    weights, states, selected = two[0]["saved"]
    assert sorted(states) == selected
    for found in three:
        assert_same(found["loaded"][0], weights)
        assert_same(found["loaded"][1], states)
        assert found["loaded"][2] == selected
        assert all(map(math.isfinite, found["goes on"]))


def test_measuring_gradients_leaves_buffers_as_they_were() -> None:
    """Those that were made in inference mode, which cannot be written, and those that an earlier step has saved."""
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    with torch.inference_mode():
        model.register_buffer("cache", torch.ones(3))
    scale = model[1].running_var
    earlier = (model[0].weight * scale).sum()
    found = mean_gradients(model, lambda: model(torch.randn(4, 3)).square().sum(), ["0.weight"])
    assert found["0.weight"] is not None
    assert model[0].weight.grad is None
    assert torch.equal(scale, torch.ones(3))
    earlier.backward()

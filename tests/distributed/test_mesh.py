"""Gradients that are averaged in the graph, on two ranks with quite different data."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed import work_mesh
from tests.distributed.spawned import results
from tests.distributed.work_ddp import BUDGET, joint_batch


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return results(work_mesh.work)


def assert_equal(found: dict[str, Tensor | None], wanted: dict[str, Tensor], names: list[str]) -> None:
    assert sorted(name for name, gradient in found.items() if gradient is not None) == sorted(names)
    for name in names:
        assert torch.equal(found[name], wanted[name]), name


def bytes_of(gradients: dict[str, Tensor], names: list[str]) -> int:
    return sum(gradients[name].nbytes for name in names)


def test_gradients_are_those_of_ddp_to_the_last_bit(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        wanted = found["ddp"]
        assert_equal(found["exact"][0], wanted, list(wanted))
        names, (gradients, _), _ = found["selected"]
        assert 0 < len(names) < len(wanted)
        assert_equal(gradients, wanted, names)


def test_bytes_that_are_counted_are_dispatched(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        wanted = found["ddp"]
        assert found["exact"][1] == [bytes_of(wanted, list(wanted))] == [found["report"][2]]
        names, (_, dispatched), counted = found["selected"]
        assert sum(dispatched) == counted == found["planned bytes"] == bytes_of(wanted, names)


def test_what_is_not_trained_communicates_nothing(ranks: list[dict[str, Any]]) -> None:
    assert [found["no grad"] for found in ranks] == [[], []]


def test_no_sync_gathers_and_the_next_backward_averages_all(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["inside no_sync, mesh"] == []
        wanted, _ = found["after no_sync, ddp"]
        gradients, dispatched = found["after no_sync, mesh"]
        assert_equal(gradients, wanted, list(wanted))
        text, counted = found["after no_sync, report"]
        assert dispatched == counted == bytes_of(wanted, list(wanted))
        assert "gradients have gathered since no_sync()" in " ".join(text.split())
        more, again = found["accumulated, mesh"]
        assert_close(more, found["accumulated, ddp"][0])
        assert again == counted
        assert found["in the graph again"]
        assert_close(*found["interleaved"])


def assert_close(found: dict[str, Tensor | None], wanted: dict[str, Tensor | None], tolerance: float = 1e-6) -> None:
    for name in {*found, *wanted}:
        assert (found.get(name) is None) == (wanted.get(name) is None), name
    for name, gradient in wanted.items():
        if gradient is not None:
            torch.testing.assert_close(found[name], gradient, rtol=tolerance, atol=tolerance, msg=name)


def test_ranks_with_sequences_of_other_lengths(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        for gradients, wanted, in_graph in found["lengths"]:
            assert in_graph
            assert_close(gradients, wanted)


def test_a_rank_that_cannot_compile_trains_with_the_others(ranks: list[dict[str, Any]]) -> None:
    for found, in_graph in zip(ranks, (True, False), strict=True):
        gradients, selected, said = found["fell back"]
        assert_equal(gradients, found["ddp"], selected)
        assert said == in_graph
        twice = found["fell back twice"]
        assert_close(twice, {name: 2 * found["ddp"][name] for name in selected})


def test_a_model_that_is_not_one_graph(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        gradients, wanted = found["parts"]
        assert gradients["unused"] is None
        assert_close(gradients, {**wanted, "unused": None})
        dispatched, counted, text = found["parts, bytes"]
        assert dispatched == counted
        assert "the step is not one graph" in " ".join(text.split())


def test_parameters_that_nothing_reads_get_no_gradient(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        (gradients, dispatched), counted = found["unused"]
        assert_equal(gradients, found["ddp"], list(found["ddp"]))
        assert sum(dispatched) == counted == bytes_of(found["ddp"], list(found["ddp"])) + 4


def test_freezing_takes_a_tensor_out(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        wanted = found["ddp"]
        names = [name for name in wanted if name != "body.0.weight"]
        gradients, dispatched = found["frozen"]
        assert_equal({n: g for n, g in gradients.items() if n in names}, wanted, names)
        assert sum(dispatched) == bytes_of(wanted, names)
        assert_equal(found["thawed"][0], wanted, list(wanted))
        assert found["frozen apart"].startswith("RankError: ranks 0 and 1 do not agree on which parameters require a gradient")


def test_compressed_gradients_are_the_mean_compressed(ranks: list[dict[str, Any]]) -> None:
    for i, (compressed, images, counted, dispatched, others) in enumerate(ranks[0]["lsp"]):
        theirs = ranks[1]["lsp"][i]
        for name, gradient in compressed.items():
            torch.testing.assert_close(gradient, images[name], rtol=1e-4, atol=1e-6)
            assert torch.equal(gradient, theirs[0][name])
            assert torch.equal(images[name], theirs[1][name])  # the projectors are the same
        rest = sum(g.nbytes for n, g in others.items() if g is not None and n not in compressed)
        assert counted == rest + sum(g.nbytes for g in compressed.values())
        if i % 2:  # the others compare projectors, for which they average whole gradients
            assert dispatched == counted


def test_buckets_count_in_the_memory_that_is_planned(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        ample, tight, alone = found["memory"]
        assert 0 <= tight["left"] < ample["left"]
        assert tight["used"] < ample["used"]
        assert alone["trained"] == len(found["ddp"])


def test_the_curve_is_that_of_one_process_on_the_joint_batch(ranks: list[dict[str, Any]]) -> None:
    one = work_mesh.curve(work_mesh.optimised(None, joint_batch(), BUDGET), joint_batch)
    assert one[-1] < one[0] - 0.1
    assert mean_of(ranks, "curve") == pytest.approx(one, abs=1e-5)


def mean_of(ranks: list[dict[str, Any]], name: str) -> list[float]:
    return [sum(losses) / 2 for losses in zip(*(found[name] for found in ranks), strict=True)]


def test_the_same_with_compressed_gradients_and_accumulation(ranks: list[dict[str, Any]]) -> None:
    one = work_mesh.compressed_curve(work_mesh.optimised(None, joint_batch(), passes=[work_mesh.LSP]), joint_batch)
    assert one[-1] < one[0] - 0.05
    assert mean_of(ranks, "compressed curve") == pytest.approx(one, abs=1e-5)


def test_what_cannot_be_averaged_is_refused(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["group, too"].startswith("InputError: mesh= says")
        assert found["two dimensions"].startswith("InputError: mesh has 2 dimensions")
        assert found["other weights"].startswith("InputError: body.0.bias is not the same on ranks 0 and 1")
        assert found["offload"].startswith("PassError: lsp cannot train on several ranks: schedule='layerwise' hands")
        assert found["mismatch"].startswith("RankError: ranks 0 and 1 do not agree on a plan to adopt")


def test_under_inductor() -> None:
    ranks = results(work_mesh.compiled)
    for found in ranks:
        (gradients, dispatched), selected, counted = found["selected"]
        assert_close(gradients, {name: found["ddp"][name] for name in selected})
        assert sum(dispatched) == counted == bytes_of(found["ddp"], selected)
        assert found["again"][1] == dispatched
        dispatched, counted, in_full = found["compressed"]
        assert dispatched == counted
        assert 16 * counted <= in_full
    assert ranks[0]["weights"] == ranks[1]["weights"]

"""What happens on one rank alone, or differs between ranks: they train together all the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from graphopt.integrations.training_steps import ATTEMPTS
from tests.distributed import work_apart
from tests.distributed.spawned import results


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return results(work_apart.work, str(tmp_path_factory.mktemp("apart")))


def assert_close(found: dict[str, Tensor | None], wanted: dict[str, Tensor | None]) -> None:
    assert {n for n, g in found.items() if g is not None} == {n for n, g in wanted.items() if g is not None}
    for name, gradient in wanted.items():
        if gradient is not None:
            torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=1e-6, msg=name)


def test_a_batch_that_could_not_be_optimised_accumulates_with_the_others(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        inside, after, again, last = found["failed_kind"]
        assert inside > 0
        assert again > 0
        assert after == last == 0


def test_gradients_that_are_views_of_ddp_buckets(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert_close(*found["bucket_views"])


def test_a_gradient_of_zeros_on_one_rank_is_there_on_all(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["zeros"] is not None
        assert torch.equal(found["zeros"], torch.zeros(2, 4))


def test_without_a_budget_ranks_select_anew_in_the_order_of_rank_0(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        changed, ours, plain, _ = found["orders"]
        assert changed
        assert_close(ours, plain)


def test_another_order_is_an_error(ranks: list[dict[str, Any]]) -> None:
    errors = [found["orders"][3] for found in ranks]
    assert any(error.startswith("RankError: this rank does not average the gradients") for error in errors)


def test_a_backward_that_fails_leaves_what_had_gathered(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        error, before, after, apart = found["failed_backward"]
        assert error.startswith("MemoryError")
        assert_close(after, before)
        assert apart == 0


def test_a_state_that_is_refused_on_one_rank_changes_nothing_on_the_others(ranks: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(ranks):
        for (error, lr, states), why in zip(found["refused"], ("it holds no state of this AdamW", "is damaged"), strict=True):
            assert error.startswith("InputError: " + ("" if rank else "on rank 1: "))
            assert why in error
            assert (lr, states) == (0.7, 0)


def test_a_step_is_left_out_by_all_ranks_without_an_optimised_model_too(ranks: list[dict[str, Any]]) -> None:
    assert [found["not_finite"] for found in ranks] == [[False, False, True, False]] * 2


def test_all_ranks_try_to_optimise_the_same_batches(ranks: list[dict[str, Any]]) -> None:
    assert [found["kinds"] for found in ranks] == [[1] * ATTEMPTS] * 2


def test_a_rank_that_gave_up_adapts_the_plan_with_the_others(ranks: list[dict[str, Any]]) -> None:
    for (count, selected, apart), theirs in zip(ranks[0]["gives_up"], ranks[1]["gives_up"], strict=True):
        assert (count, selected) == theirs[:2]
        assert count == 3
        assert apart == 0


def test_a_wrapper_that_does_not_fit_is_an_error_of_the_first_step(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["wrapped"].startswith("InputError")
        assert "find_unused_parameters=True" in found["wrapped"]


def test_verifying_that_fails_on_one_rank_fails_on_all(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["verifying"] == "ZeroDivisionError: on rank 1: division by zero"
    assert ranks[1]["verifying"] == "ZeroDivisionError: division by zero"


def test_a_graph_that_breaks_once_on_one_rank_mixes_no_gradients(ranks: list[dict[str, Any]]) -> None:
    assert [found["breaks_once"] for found in ranks] == [[0.0] * 4] * 2


def test_a_released_model_is_averaged_by_its_wrapper_again(ranks: list[dict[str, Any]]) -> None:
    assert [found["released"] for found in ranks] == [[1, 0.0, 0.0]] * 2


def test_a_weight_that_is_unfrozen_where_nothing_compiles_is_averaged(ranks: list[dict[str, Any]]) -> None:
    assert [found["unfrozen_uncompiled"] for found in ranks] == [[0.0] * 5] * 2

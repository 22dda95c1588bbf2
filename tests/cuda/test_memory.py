"""Predicted peaks on a GPU are `torch.cuda.max_memory_allocated`, and no higher than torch.compile's."""

import pytest

from graphopt.bench.memory import CASES, Case, measure


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.model}-{c.backend}{'-checkpointing' * c.checkpointing}")
def test_predicted_peaks_are_the_measured_ones(case: Case) -> None:
    row = measure(case, "cuda")
    print("MEMORY", case.model, case.backend, case.optimizer, row["predicted"], row["measured"], row["torch_compile"])
    assert abs(row["error"]) <= 0.01
    if row["beside_torch_compile"] is not None:
        assert row["beside_torch_compile"] <= 0.001

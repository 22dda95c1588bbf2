"""Predicted peaks on a GPU are what the allocator counts, and compiled steps take no more than torch.compile's."""

import pytest

from graphopt.bench.memory import CASES, Case, measure

WORKSPACES = 0.1
"""At most this part of a step's peak is what kernels allocate while they run, for small models; predictions leave it out."""


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.model}-{c.backend}{'-checkpointing' * c.checkpointing}")
def test_peaks_are_predicted_but_for_workspaces_and_no_larger_than_torch_compiles(case: Case) -> None:
    row = measure(case, "cuda")
    assert -WORKSPACES <= row["error"] <= 0.001
    if row["beside_torch_compile"] is not None:
        assert row["beside_torch_compile"] <= 0.001

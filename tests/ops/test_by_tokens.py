"""What programs of a few tokens at a time call."""

from __future__ import annotations

import pytest
import torch

from graphopt.ops.by_tokens import softmax_gradient_

aten = torch.ops.aten


@pytest.mark.parametrize("logit", [0.0, 3.0, 5.0, 7.0])
def test_the_gradient_of_a_label_that_is_predicted_well_is_torchs_own_in_half_precision(logit: float) -> None:
    """1 - p was the difference of two numbers near 1: 0.5 and 0.8 % off at 5 and 7."""
    logits = torch.zeros(1, 10, dtype=torch.bfloat16)
    logits[0, 3] = logit
    own = torch.log_softmax(logits, -1)
    chosen = torch.zeros_like(own)
    chosen[0, 3] = -1
    expected = aten._log_softmax_backward_data(chosen, own, 1, torch.bfloat16)
    found = softmax_gradient_(own.clone(), torch.ones(1, dtype=torch.bfloat16), torch.tensor([3]), None, -100)
    assert found[0, 3] == expected[0, 3]
    torch.testing.assert_close(found, expected)

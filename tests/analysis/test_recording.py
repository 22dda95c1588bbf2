"""Fake tensors on a GPU that is not there: what is known of their values, and on which device results are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from graphopt import compat
from graphopt.analysis.recording import Recording

DEVICES = ["cpu", "cuda"]


def known(device: str, values: Tensor) -> tuple[Tensor, compat.DispatchMode]:
    """A fake tensor with values, and its mode."""
    mode = compat.new_fake_mode()
    with mode:
        fake = torch.empty(values.shape, dtype=values.dtype, device=device)
    return compat.fake_with_values(fake, values), mode


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_computed_from_known_values_is_known_and_on_their_device(device: str) -> None:
    given, mode = known(device, torch.arange(4))
    with mode, compat.known_integer_values(), Recording():
        total = given + torch.arange(4, device=device)
        assert total.device.type == device
        assert total.max().item() == 6
        assert (total > -1).all().item() is True
        weights = torch.empty(8, 3, device=device)
        assert torch.embedding(weights, total).device.type == device


@pytest.mark.parametrize("device", DEVICES)
def test_operators_made_of_others_do_not_mix_devices(device: str) -> None:
    labels, mode = known(device, torch.arange(4))
    with mode, compat.known_integer_values(), Recording():
        logits = torch.empty(4, 9, device=device)
        assert torch.nn.functional.cross_entropy(logits, labels).device.type == device
        assert labels.sum().item() == 6


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_written_to_is_no_longer_known(device: str) -> None:
    labels, mode = known(device, torch.arange(4))
    with mode, compat.known_integer_values(), Recording():
        counts = torch.zeros(4, dtype=torch.long, device=device)
        counts.add_(labels)
        assert counts.sum().item() == 6
        counts.add_(torch.empty(4, device=device).long())
        with pytest.raises(Exception, match="_local_scalar_dense"):
            counts.sum().item()

"""An operator that finds the rows of each sample whose label counts."""

from __future__ import annotations

import torch
from torch import Tensor

from graphopt.errors import InputError
from graphopt.ops.library import define


class TooManyLabels(InputError, RuntimeError):
    """A sample has more rows whose label counts than there are places for."""


def rows_with_label(labels: Tensor, ignored: int, length: int, count: int) -> Tensor:
    """The numbers of `count` rows of each sample, each once, those whose label counts first.

    Args:
        labels: of all rows, `length` for each sample.
        ignored: the label of rows that do not count.
    Returns:
        (samples, count).
    Raises:
        TooManyLabels: a sample has more rows that count; on a GPU the device asserts it.
    """
    counts = labels.reshape(-1, length) != ignored
    fits, message = (counts.sum(1) <= count).all(), f"a sample has more than {count} rows whose label counts"
    if labels.device.type == "cpu" and not fits:
        raise TooManyLabels(f"{message}: use DeadRows with a larger labelled, or without.")
    torch._assert_async(fits, message)
    return counts.sort(dim=1, descending=True, stable=True).indices[:, :count].contiguous()


define(
    "rows_with_label(Tensor labels, int ignored, int length, int count) -> Tensor",
    rows_with_label,
    lambda labels, ignored, length, count: labels.new_empty((labels.numel() // length, count), dtype=torch.int64),
)

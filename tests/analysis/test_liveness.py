"""Which storages a graph makes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx

from graphopt.analysis.liveness import can_be_view, is_view


@pytest.mark.parametrize(
    ("argument", "shape"),
    [
        (lambda: torch.zeros(8, 64, 5), (512, 5)),
        (lambda: torch.zeros(8, 64, 5)[:, :-1], (504, 5)),  # the shift of a language model's logits
        (lambda: torch.zeros(8, 64, 5)[..., :4], (512, 4)),
        (lambda: torch.zeros(8, 64, 5)[..., :4], (8 * 64 * 4,)),
        (lambda: torch.zeros(4, 6).t(), (6, 4)),
        (lambda: torch.zeros(4, 6).t(), (24,)),
        (lambda: torch.zeros(8, 64, 5)[:, :1], (8, 5)),
        (lambda: torch.zeros(8, 1).expand(8, 5), (40,)),
        (lambda: torch.zeros(1, 6).expand(3, 6), (3, 2, 3)),
        (lambda: torch.zeros(2, 3, 4).transpose(0, 1)[:1], (2, 4)),
    ],
)
def test_reshape_is_a_view_where_it_does_not_copy(argument: Callable[[], Tensor], shape: tuple[int, ...]) -> None:
    value = argument()
    graph = fx.Graph()
    given = graph.placeholder("x")
    given.meta["val"] = value
    node = graph.call_function(torch.ops.aten.reshape.default, (given, list(shape)))
    node.meta["val"] = value.reshape(shape)
    assert can_be_view(node)
    assert is_view(node) == (value.data_ptr() == node.meta["val"].data_ptr())

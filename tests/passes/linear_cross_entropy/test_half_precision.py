"""Heads in chunks in bfloat16: no farther from the exact values than eager mode is."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from graphopt.passes import LinearCrossEntropy
from torch import Tensor, nn

import graphopt
from tests.passes.linear_cross_entropy.test_technique import LanguageModel, batch

LABELS = batch(samples=8, tokens=64, vocabulary=300, ignored=9)


def results(run: nn.Module, dtype: torch.dtype | None) -> list[Tensor]:
    """Loss and gradients, in double precision; under autocast to `dtype` if there is one."""
    run.zero_grad()
    with contextlib.nullcontext() if dtype is None else torch.autocast("cpu", dtype):
        output = run(*LABELS)
    loss = output[0] if isinstance(output, tuple) else output
    loss.backward()
    return [value.detach().double().clone() for value in (loss, *(p.grad for p in run.parameters()))]


@pytest.mark.parametrize("autocast", [False, True], ids=["weights", "autocast"])
@pytest.mark.parametrize("form", ["mean", "shifted returned"])
def test_errors_are_at_most_those_of_eager_mode(form: str, autocast: bool) -> None:
    torch.manual_seed(0)
    dtype = torch.bfloat16
    model = LanguageModel(form, vocabulary=300).to(torch.float32 if autocast else dtype)
    under = dtype if autocast else None
    exact = results(copy.deepcopy(model).double(), None)
    eager = results(copy.deepcopy(model), under)
    with contextlib.nullcontext() if under is None else torch.autocast("cpu", under):
        opt = graphopt.optimize(model, LABELS, passes=[LinearCrossEntropy(8)], backend="aot_eager")
    ours = results(opt, under)
    assert opt.last_step is not None
    assert opt.last_step.reports[0].changes.changed == ("head.weight",)
    for mine, others, true in zip(ours, eager, exact, strict=True):
        allowed = torch.linalg.vector_norm(others - true) + torch.finfo(dtype).eps * torch.linalg.vector_norm(true)
        assert torch.linalg.vector_norm(mine - true) <= allowed

"""Benchmarks that compare whole steps have the fused AdamW on all sides; those of single steps are in `test_steps`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from graphopt.passes import Lsp
from rich.progress import Progress

import graphopt
from graphopt.bench import demo
from tests import zoo


class Asked(Exception):
    """An AdamW was to be made."""


def test_the_demo_makes_a_fused_adamw(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    model, inputs = zoo.make("bert", 4, layers=1)

    class AdamW(torch.optim.AdamW):
        def __init__(self, *_: Any, **options: Any) -> None:
            asked.update(options)
            raise Asked

    monkeypatch.setattr(torch.optim, "AdamW", AdamW)
    monkeypatch.setattr(demo, "pretrained_minilm", lambda *_: model)
    rows: Any = SimpleNamespace(batches=lambda *_: iter([inputs]))
    arguments: Any = SimpleNamespace(lr=1e-3, batch=4)
    with pytest.raises(Asked):
        demo.fine_tune(arguments, "full", 0, (rows, rows), 2, Progress())
    assert asked["fused"]


def test_compressed_gradients_are_stepped_with_it() -> None:
    """And what is too small to be compressed beside them."""
    model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)), torch.randn(3, 8)
    opt = graphopt.optimize(model, (x,), passes=[Lsp(subspace=2, nonzeros=1)], backend="aot_eager")
    optimizer = opt.make_optimizer(torch.optim.AdamW, lr=0.1, fused=True)
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(2):
        opt(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))

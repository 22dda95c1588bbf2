"""Benchmarks that compare steps with their optimizer's have the fused AdamW on all sides."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from graphopt.passes import Lsp
from rich.progress import Progress

import graphopt
from graphopt.bench import demo, exact, greentrainer, lsp
from tests import zoo


class Asked(Exception):
    """An AdamW was to be made."""


def bert() -> Any:
    return zoo.make("bert", 4, layers=1)


def demo_runs() -> None:
    rows: Any = SimpleNamespace(batches=lambda *_: iter([bert()[1]]))
    arguments: Any = SimpleNamespace(lr=1e-3, batch=4)
    demo.fine_tune(arguments, "full", 0, (rows, rows), 2, Progress())


COMPARED: dict[str, Callable[[], Any]] = {
    "demo": demo_runs,
    "exact": lambda: exact.measure(bert, 1, "cpu", Progress(), "bert"),
    "greentrainer": lambda: greentrainer._variant("eager", *bert()),
    "lsp, native": lambda: lsp._prepared("native AdamW", None, lsp.Linears(4, 1), torch.randn(3, 4)),
    "lsp, compressed": lambda: lsp._prepared("s = 2", Lsp(subspace=2, nonzeros=1), lsp.Linears(4, 1), torch.randn(3, 4)),
}


@pytest.mark.parametrize("name", COMPARED)
def test_it_makes_a_fused_adamw(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    class AdamW(torch.optim.AdamW):
        def __init__(self, *_: Any, **options: Any) -> None:
            asked.update(options)
            raise Asked

    monkeypatch.setattr(torch.optim, "AdamW", AdamW)
    monkeypatch.setattr(exact, "gradient_error", lambda *_: 0.0)
    monkeypatch.setattr(demo, "pretrained_minilm", lambda *_: bert()[0])
    with pytest.raises(Asked):
        COMPARED[name]()
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

"""What torch's cache on disk knows a rewritten region by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from graphopt.passes import Lsp, Pass, Preserves, RunLora, Site
from graphopt.passes.base import Changes
from torch import Tensor, nn

import graphopt
from graphopt.compat import aot
from graphopt.compat.aot import Hooks
from graphopt.frontend import backend, rewriting
from graphopt.graph import TrainingGraph
from graphopt.planner.memory_limit import MemoryLimit
from graphopt.planner.plan import Plan


def test_what_other_code_rewrote_is_not_taken_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The version alone stays the same between two states of a checkout, and a mended rewrite would not take effect."""
    rule = tmp_path / "graphopt" / "analysis" / "rule.py"
    rule.parent.mkdir(parents=True)
    rule.write_text("KEEPS = 1")
    monkeypatch.setattr(rewriting, "__file__", str(tmp_path / "graphopt" / "frontend" / "rewriting.py"))
    code = rewriting._own_code.__wrapped__
    before = code()
    assert code() == before
    rule.write_text("KEEPS = 10")
    assert code() != before


class Adapted(nn.Module):
    """Frozen layers with adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(16, 16).requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(16, 2)), nn.Parameter(torch.randn(2, 16))

    def forward(self, x: Tensor) -> Tensor:
        return (self.base(x) + x @ self.down @ self.up).square().mean()


def keyed(monkeypatch: pytest.MonkeyPatch, *passes: Pass) -> tuple[Hooks, Callable[[MemoryLimit | None], str]]:
    """What AOTAutograd is given for a step, and the key under a limit on memory."""
    hooks: list[Hooks] = []
    keys: list[Callable[[MemoryLimit | None], str]] = []

    def compile_joint(module: Any, examples: Any, compiler: Any, given: Hooks) -> Any:
        hooks.append(given)
        return aot.compile_joint(module, examples, compiler, given)

    def key(plan: Plan, *rest: Any) -> str:
        keys.append(lambda memory: key_of(replace(plan, memory=memory), *rest))
        return key_of(plan, *rest)

    key_of, x = rewriting._key, torch.randn(8, 16)
    with monkeypatch.context() as patch:
        patch.setattr(backend, "compile_joint", compile_joint)
        patch.setattr(rewriting, "_key", key)
        opt = graphopt.optimize(Adapted(), (x,), passes=passes, backend="aot_eager")
        opt(x).backward()
        return hooks[0], lambda memory: (opt, keys[0](memory))[1]  # it lives for as long


def test_what_measured_times_decide_is_not_taken_from_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may have measured others: the order that runs would not be the one that is reported."""
    assert keyed(monkeypatch, RunLora())[0].untold
    for told in (RunLora(criterion="flops"), RunLora(order="forward1+backward1")):
        assert not keyed(monkeypatch, told)[0].untold
    assert Lsp().measures_machine
    assert not any(p.measures_machine for p in (Lsp(order="formed"), Lsp(criterion="flops")))


@dataclass(frozen=True)
class OfTheUser:
    """A pass whose code lies anywhere."""

    name = "of the user"
    preserves = Preserves.EXACT
    serves = ()

    def applicable(self, graph: TrainingGraph) -> list[Site]:
        return []

    def apply(self, graph: TrainingGraph, decisions: Any) -> Changes:
        return Changes(())


def test_what_a_pass_of_the_users_rewrote_is_not_taken_from_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code may have been edited since."""
    assert keyed(monkeypatch, OfTheUser())[0].untold


def test_the_limit_on_memory_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Orders within it depend on it."""
    _, key = keyed(monkeypatch, RunLora(criterion="flops"))

    def adamw(**settings: Any) -> MemoryLimit:
        return MemoryLimit(2**30, "inductor", torch.optim.AdamW([torch.zeros(1)], **settings))

    limits = [
        None, MemoryLimit(2**30, "inductor"), MemoryLimit(2**31, "inductor"), MemoryLimit(2**30, "aot_eager"),
        MemoryLimit(2**30, "inductor", "sgd"), adamw(), adamw(amsgrad=True),
    ]  # fmt: skip
    assert len({key(limit) for limit in limits}) == len(limits)
    assert key(adamw()) == key(adamw(lr=0.5))

"""Checkpoints: a run that was stopped goes on bit-equal, and a state that does not fit changes nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from graphopt.passes import Lsp, RunLora, Vcas
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import graphopt
from graphopt import MergeController, SelectionController
from tests import zoo


@dataclass
class Run:
    """Everything that a script makes before its loop."""

    model: nn.Module
    opt: graphopt.OptimizedModule
    optimizer: torch.optim.Optimizer
    after_step: list[Callable[[Any], Any]] = field(default_factory=list)
    held: list[Any] = field(default_factory=list)

    def step(self, batch: Any) -> None:
        self.opt(*batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        for adapt in self.after_step:
            adapt(batch)

    def weights(self) -> dict[str, Tensor]:
        return copy.deepcopy(self.model.state_dict())


def batches(count: int, size: int = 16) -> list[tuple[Tensor, Tensor]]:
    """Some samples much harder than the others."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(count):
        x = torch.randn(size, 5, generator=generator)
        labels = (x.sum(1) > 0).long()
        labels[: size // 8] = 2
        found.append((x, labels))
    return found


def mlp(seed: int, dropout: float = 0.2) -> nn.Module:
    torch.manual_seed(seed)
    model = zoo.MLP(width=16)
    model.second = nn.Sequential(model.second, nn.Dropout(dropout))  # type: ignore[assignment]
    return model


def optimized(model: nn.Module, **options: Any) -> graphopt.OptimizedModule:
    return graphopt.optimize(model, batches(1)[0], backend="aot_eager", **options)


def selecting(seed: int) -> Run:
    model = mlp(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    opt = optimized(model, budget=0.8, optimizer=optimizer)
    controller = SelectionController(opt, optimizer, every=2, tolerance=0.0)
    return Run(model, opt, optimizer, [controller.after_step], [controller])


def sampling(seed: int) -> Run:
    model = mlp(seed)
    opt = optimized(model, budget=graphopt.Budget(variance=1.0), passes=[Vcas(every=3, alpha=0.2, beta=0.5)])
    assert opt.controller is not None
    return Run(model, opt, torch.optim.Adam(model.parameters(), lr=1e-2), [opt.controller.after_step])


def sampling_at_fixed_ratios(seed: int) -> Run:
    model = mlp(seed)
    opt = optimized(model, passes=[Vcas(keep_rows=0.5, keep_tokens=0.7, sampler="bernoulli")])
    return Run(model, opt, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


def compressing(seed: int, schedule: str) -> Run:
    model = mlp(seed)
    rewrite = Lsp(subspace=5, nonzeros=2, check_every=3, threshold=0.3, iterations=3, schedule=schedule)
    opt = optimized(model, passes=[rewrite])
    return Run(model, opt, opt.make_optimizer(torch.optim.AdamW, lr=1e-2, weight_decay=0.1))


class Adapted(nn.Module):
    """A layer with adapters behind one without."""

    def __init__(self) -> None:
        super().__init__()
        self.below, self.above, self.drop = nn.Linear(5, 16), nn.Linear(16, 3), nn.Dropout(0.2)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.above(self.drop(torch.tanh(self.below(x)))), labels)


def reordering(seed: int) -> Run:
    torch.manual_seed(seed)
    model = get_peft_model(Adapted(), LoraConfig(r=2, target_modules=["below", "above"]))
    opt = optimized(model, passes=[RunLora()])
    controller = MergeController(opt, every=2)
    return Run(model, opt, torch.optim.AdamW(model.parameters(), lr=1e-2), [lambda _: controller.after_step()], [controller])


CASES: dict[str, Callable[[int], Run]] = {
    "greentrainer": selecting,
    "vcas": sampling,
    "vcas-fixed": sampling_at_fixed_ratios,
    "lsp": lambda seed: compressing(seed, "sequential"),
    "lsp-layerwise": lambda seed: compressing(seed, "layerwise"),
    "lsp-zero": lambda seed: compressing(seed, "zero"),
    "runlora": reordering,
}


def same(one: Any, other: Any) -> bool:
    """Equal to the bit, NaN included."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.shape == other.shape and torch.equal(one.nan_to_num(), other.nan_to_num())
    if isinstance(one, dict):
        return isinstance(other, dict) and list(one) == list(other) and all(same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return one == other or (one != one and other != other)


@pytest.mark.parametrize("case", CASES)
def test_stopped_and_resumed_after_every_step_it_goes_on_bit_equal(case: str, tmp_path: Path) -> None:
    steps, path = 8, tmp_path / "state"
    expected = []
    run = CASES[case](0)
    torch.manual_seed(1)
    for batch in batches(steps):
        run.step(batch)
        expected.append(run.weights())
    whole = run
    run = CASES[case](0)
    torch.manual_seed(1)
    for k, batch in enumerate(batches(steps)):
        run.step(batch)
        assert same(run.weights(), expected[k]), f"step {k}"
        weights, random_state = run.weights(), torch.get_rng_state()
        run.opt.save_state(path, run.optimizer)
        run = CASES[case](2 + k)
        run.opt.load_state(path, run.optimizer)
        run.model.load_state_dict(weights)
        torch.set_rng_state(random_state)
    assert run.opt.selected == whole.opt.selected
    assert run.opt.sample_ratios == whole.opt.sample_ratios
    if case == "greentrainer":
        assert any(r.changed for r in whole.held[0].history)
        assert [r.gain for r in run.held[0].history] == [r.gain for r in whole.held[0].history]
    if case == "vcas":
        assert whole.opt.controller is not None
        assert whole.opt.sample_ratios
        assert run.opt.controller is not None
        assert [a.rows for a in run.opt.controller.history] == [a.rows for a in whole.opt.controller.history]
    if case in ("lsp", "lsp-layerwise"):
        assert run.opt.subspaces is not None
        assert any(w.fits > 1 for w in run.opt.subspaces.weights.values())

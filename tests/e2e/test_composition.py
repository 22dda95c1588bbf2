"""All passes together while a model trains: one budget for FLOPs, one for variance, compressed gradients, and selections anew."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from graphopt.passes import GreenTrainer, Lsp, Vcas
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import graphopt
from graphopt import Budget, PassError
from graphopt.analysis.flop_formulas import ADDED_FORMULAS
from graphopt.planner.importance import Importance
from graphopt.planner.rating import Rater
from tests import zoo
from tests.long_forms import long


class Adapter(nn.Module):
    """A frozen layer, and an update of it of rank 4."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down, self.up = nn.Linear(inputs, 4, bias=False), nn.Linear(4, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Adapted(nn.Module):
    """Two blocks with adapters: what a language model with LoRA is to all passes, in a tenth of its operations."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(zoo.VOCABULARY, 32).requires_grad_(False)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(32), Adapter(32, 48), nn.GELU(), Adapter(48, 32)) for _ in "ab")
        self.head = nn.Linear(32, zoo.VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.embed(input_ids)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return {"loss": nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())}


def batches(name: str, count: int, size: int = 8) -> list[Any]:
    """Batches of which every other is like the first, so that there is something to learn."""
    ids = zoo.tokens(size * count)
    inputs = {"input_ids": ids, "labels": ids.flip(1)} if name == "adapters" else zoo.make(name, size * count)[1]
    return [{k: v[size * i : size * (i + 1)] for k, v in inputs.items()} for i in range(count)]


def made(name: str) -> nn.Module:
    if name == "adapters":
        return Adapted()
    return zoo.make("lora", 8, layers=2)[0] if name == "lora" else zoo.in_one_block(zoo.make(name, 8)[0])


def optimised(name: str, flops: float, **lsp: Any) -> tuple[nn.Module, Any, Any, list[Any]]:
    model, data = made(name), batches(name, 4)
    opt = graphopt.optimize(
        model,
        data[0],
        budget=Budget(flops=flops, variance=0.5),
        passes=[
            Lsp(**{"subspace": 4, "nonzeros": 2, "criterion": "flops", "check_every": 5, "iterations": 3, **lsp}),
            Vcas(every=3, alpha=0.3, beta=0.5),
            "runlora",
            "greentrainer",
        ],
        backend="aot_eager",
    )
    return model, opt, opt.make_optimizer(torch.optim.AdamW, lr=5e-3, weight_decay=0.1), data


def prefer_others(opt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the next selection rate tensors that are not trained far above those that are."""
    current = opt.selected

    rate = Rater.rate

    def rated(*arguments: Any) -> Importance:
        found = rate(*arguments)
        return replace(found, values={n: 1e-3 if n in current else 1.0 for n in found.values})

    monkeypatch.setattr(Rater, "rate", rated)


def train_until_sampled(opt: Any, optimizer: Any, data: list[Any], steps: int) -> None:
    """Two calibrations long."""
    for step in range(steps):
        opt(**data[step % 2])["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        opt.controller.after_step(data[step % 2])
    assert opt.controller.ratios


@pytest.mark.parametrize(
    ("name", "schedule"),
    [("adapters", "layerwise"), *long(("lora", "layerwise"), ("bert", "sequential"), ("bert", "layerwise"))],
)
def test_training_with_everything_at_once(name: str, schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, opt, optimizer, data = optimised(name, 0.8 if name == "bert" else 0.78, schedule=schedule)
    assert [p.name for p in opt.plan.passes] == ["greentrainer", "runlora", "vcas", "lsp"]
    losses, sampled, selections = [], 0, {opt.selected}
    for step in range(22):
        batch = data[step % 2]
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        loss = opt(**batch)["loss"]
        loss.backward()
        trained = opt.selected
        for n, p in model.named_parameters():
            assert p.grad is None or (n in trained and n not in opt.states["lsp"].weights), n
        for n, w in opt.states["lsp"].weights.items():
            assert (w.variable.grad is None) == (n not in trained), n
        optimizer.step()
        optimizer.zero_grad()
        optimizer.synchronize()
        for n, p in model.named_parameters():
            assert n in trained or torch.equal(p, before[n]), n
        opt.controller.after_step(batch)
        sampled += opt.last_step is not None and opt.last_step.sampled_part < 1
        losses.append(loss.item())
        if step == 8:
            prefer_others(opt, monkeypatch)
            assert opt.reselect(data[2], optimizer).changed
            selections.add(opt.selected)
    assert sampled > 4
    assert len(selections) == 2
    assert sum(losses[-4:]) < sum(losses[:4])
    report = opt.report
    assert report.passes == ["greentrainer", *([] if name == "bert" else ["runlora"]), "vcas", "lsp"]
    assert report.plan is not None
    assert set(report.plan.not_needed) == ({"runlora"} if name == "bert" else set())
    assert {w["layer"] for w in report.sections["lsp"]["compressed"]} <= opt.selected
    assert len(report.approximations) == 3


Trained = tuple[nn.Module, Any, Any, list[Any]]


@pytest.fixture(scope="module", params=["adapters", *long("bert")])
def sampled(request: pytest.FixtureRequest) -> Trained:
    """A model whose steps are sampled by now."""
    torch.manual_seed(0)
    model, opt, optimizer, data = optimised(request.param, 0.8)
    train_until_sampled(opt, optimizer, data, steps=7)
    return model, opt, optimizer, data


def test_the_report_counts_what_runs_whatever_the_combination(sampled: Trained) -> None:
    model, opt, _, data = sampled
    twin = copy.deepcopy(model)
    for batch in (data[0], zoo.rows(data[0], 5)):  # the second is smaller, so that it is not sampled
        opt(**batch)["loss"].backward()  # compiled here
        with FlopCounterMode(display=False, custom_mapping=ADDED_FORMULAS) as ours:
            opt(**batch)["loss"].backward()
        with FlopCounterMode(display=False, custom_mapping=ADDED_FORMULAS) as full:
            twin(**batch)["loss"].backward()
        report = opt.report
        assert report.step_flops == ours.get_total_flops()
        assert report.full_step_flops == full.get_total_flops()
        assert report.flops_ratio == pytest.approx(ours.get_total_flops() / full.get_total_flops())
        exact = opt.plan.without_sampling().rewrite(opt.graph, opt.last_step.graph.batch_size)[1][-1].step_flops_after
        assert opt.last_step.sampled_part == pytest.approx(ours.get_total_flops() / exact)


def test_a_new_selection_is_trained_without_sampling_until_it_is_calibrated(
    sampled: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, opt, optimizer, data = sampled
    opt(**data[0])["loss"].backward()
    assert opt.last_step.sampled_part < 1
    before = opt.selected
    prefer_others(opt, monkeypatch)
    assert opt.reselect(data[3], optimizer).changed
    assert opt.controller.ratios == ()
    new = [n for n in opt.selected - before if n in opt.states["lsp"].weights]
    opt(**data[0])["loss"].backward()
    optimizer.step()
    assert opt.last_step is None or opt.last_step.sampled_part == 1.0
    for n in new:
        assert not math.isnan(opt.states["lsp"].weights[n].error), n  # compared with its first gradient


def test_a_compressed_weight_that_is_not_trained_is_refused() -> None:
    model, inputs = zoo.make("mlp", 6)
    refused: list[tuple[list[Any], str]] = [
        ([GreenTrainer(train=("third.bias",)), Lsp(subspace=3, nonzeros=2)], "third"),
        (
            [GreenTrainer(train=("third.weight",)), Lsp(subspace=3, nonzeros=2, weights=("second.weight", "third.weight"))],
            "second",
        ),
    ]
    for passes, name in refused:
        with pytest.raises(
            PassError, match=rf"lsp cannot compress the gradient of {name}\.weight: greentrainer does not train it"
        ):
            graphopt.optimize(model, inputs, passes=passes, backend="aot_eager")
    passes = [GreenTrainer(train=("second.weight", "third.bias")), Lsp(subspace=3, nonzeros=2)]
    opt = graphopt.optimize(model, inputs, passes=passes, backend="aot_eager")
    assert "lsp" in opt.states
    assert list(opt.states["lsp"].weights) == ["second.weight"]


def test_a_selection_that_the_sampler_cannot_carry_out_is_not_made() -> None:
    model, data = Adapted(), batches("adapters", 2, 6)
    inputs = data[0]
    names = [n for n, p in model.named_parameters() if n.startswith("blocks") and p.dim() == 2]
    first = graphopt.optimize(model, inputs, budget=0.9, passes=["greentrainer"], backend="aot_eager").selected
    sampler = Vcas(keep_tokens={next(n for n in names if n in first): 0.5})
    opt = graphopt.optimize(model, inputs, budget=0.9, passes=[sampler, "greentrainer"], backend="aot_eager")
    opt(**inputs)["loss"].backward()
    for p in model.parameters():  # whatever was important is not any more
        if any(p is q for n, q in model.named_parameters() if n in sampler.keep_tokens):  # type: ignore[operator]
            p.requires_grad_(False)
    outcome = opt.reselect(data[1], tolerance=0.0)
    assert not outcome.changed
    assert opt.selected == first


class TwoLosses(nn.Module):
    """Weights that no step selects."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(8, 8)
        self.bias = nn.Parameter(torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.wide(x) + self.bias).square().mean()


def test_a_step_with_nothing_to_compress_is_not_taken_for_a_check_for_ever() -> None:
    torch.manual_seed(0)
    model, x = TwoLosses(), torch.randn(4, 8)
    opt = graphopt.optimize(model, (x,), passes=[Lsp(subspace=4, nonzeros=2, criterion="flops")], backend="aot_eager")
    optimizer = opt.make_optimizer(torch.optim.AdamW, lr=1e-2)
    model.wide.weight.requires_grad_(False)
    before = model.wide.weight.clone()
    for _ in range(3):
        opt(x).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert opt.last_step is not None
    assert torch.equal(model.wide.weight, before)

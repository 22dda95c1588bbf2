"""Will it fit? The verdict is that of the memory's prediction, and every change is what a step of the changed model needs."""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn

import graphopt
from graphopt.analysis.step_memory import step_memory
from graphopt.integrations.fit import GPUS, OVERHEAD, fit, gpu_bytes
from graphopt.planner.product_times import ProductTimes
from tests import zoo
from tests.integrations.trainer_runs import llama


def tokens(batch: int = 4) -> dict[str, Any]:
    ids = torch.randint(3, 50, (batch, 8))
    return {"input_ids": ids, "labels": ids}


class Language(nn.Module):
    """A model of language without attention; what fills its memory is what it is in others: logits, activations and weights."""

    def __init__(self, vocabulary: int = 50) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(vocabulary, 16), nn.LayerNorm(16), nn.Linear(16, vocabulary, False)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.embed(input_ids)
        hidden = hidden + self.down(nn.functional.silu(self.up(self.norm(hidden))))
        logits = self.head(hidden)
        following = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), following.flatten()), "logits": logits}


def language(vocabulary: int = 50) -> nn.Module:
    torch.manual_seed(0)
    return Language(vocabulary)


def peak(model: nn.Module, optimizer: str = "adamw", inputs: Any = None) -> int:
    return graphopt.analyze(model, inputs or tokens(), backend="aot_eager", optimizer=optimizer).memory.peak_bytes + OVERHEAD


def test_it_fits_up_to_the_largest_batch_and_not_beyond() -> None:
    model, batch = zoo.make("mlp", 4)
    memory = graphopt.analyze(model, batch, backend="aot_eager").memory
    capacity = memory.at(6).peak_bytes + OVERHEAD
    found = fit(model, batch, capacity, backend="aot_eager", margin=0.0)
    assert found.fits
    assert found.largest_batch == 6
    assert found.peak_bytes == memory.peak_bytes + OVERHEAD
    assert found.changes == ()
    assert str(found).startswith("It fits: a step with a batch of 4 needs ")
    assert not fit(model, batch, found.peak_bytes - 1, backend="aot_eager", margin=0.0).fits
    assert fit(model, batch, found.peak_bytes, backend="aot_eager", margin=0.0).fits
    assert not fit(model, batch, found.peak_bytes, backend="aot_eager").fits  # 5 % stay free
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.fits = False  # type: ignore[misc]


def test_what_optimize_saves_comes_first_where_logits_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphopt.integrations.fit._peft", lambda: None)  # adapters come last, and take long
    monkeypatch.setattr(ProductTimes, "peak", 1e12)  # on a busy machine, measured rates can make chunks too slow
    monkeypatch.setattr(ProductTimes, "bandwidth", 1e11)
    model = language(9000)
    inputs = {name: ids.repeat(16, 4) for name, ids in tokens().items()}
    found = fit(model, inputs, OVERHEAD, backend="aot_eager")
    first = found.changes[0]
    assert first.what == "graphopt.optimize(model, batch, outputs='loss')"
    opt = graphopt.optimize(model, inputs, backend="aot_eager", outputs="loss")
    opt(**inputs)["loss"].backward()
    assert opt.last_step is not None
    step = step_memory(opt.last_step.graph, "aot_eager", "adamw")
    assert first.peak_bytes == pytest.approx(step.peak_bytes + OVERHEAD, rel=1e-6)  # but for a few numbers of sizes


def test_every_change_is_what_a_step_of_the_changed_model_needs() -> None:
    model = language()
    before = {name: p.clone() for name, p in model.named_parameters()}
    small = graphopt.analyze(model, tokens(), backend="aot_eager").memory.at(1).peak_bytes + OVERHEAD
    found = fit(model, tokens(), small, backend="aot_eager", margin=0.0)
    assert not found.fits
    assert found.largest_batch == 1
    assert not any("optimize(" in change.what for change in found.changes)  # its logits are small
    changes = {change.what: change.peak_bytes for change in found.changes}
    gathering = graphopt.analyze(model, tokens(), backend="aot_eager", accumulation=2).memory.at(1).peak_bytes + OVERHEAD
    assert changes["a batch of 1, with gradient accumulation"] == gathering > small
    assert "a batch of 1, with gradient accumulation" in str(found)
    assert changes["adamw8bit in the place of adamw"] == peak(model, "adamw8bit")
    assert changes["weights in bfloat16"] == peak(language().bfloat16())
    assert "LoRA of rank 16" not in changes  # as large as these weights
    assert all(torch.equal(p, before[name]) and p.requires_grad for name, p in model.named_parameters())
    assert all(change.fits == (change.peak_bytes <= small) for change in found.changes)


@pytest.mark.parametrize(("made", "layers"), [(llama, "all-linear"), (language, ["up", "down", "head"])])
def test_adapters_need_what_a_step_with_them_needs(made: Callable[[], nn.Module], layers: Any) -> None:
    """Of a model of transformers PEFT finds the linear layers."""
    model = made()
    adapted = peft.get_peft_model(made(), peft.LoraConfig(r=16, target_modules=layers))
    with warnings.catch_warnings(action="error", category=FutureWarning):
        assert fit(model, tokens(), 10**12, backend="aot_eager", lora=16).peak_bytes == peak(adapted)
    assert all(p.requires_grad for p in model.parameters())


def test_checkpointing_needs_no_more_than_the_least_that_a_budget_can_meet() -> None:
    layers = [module for _ in range(12) for module in (nn.Linear(32, 32), nn.GELU())]
    model, example = nn.Sequential(*layers), (torch.randn(4096, 32),)
    found = fit(model, example, OVERHEAD, backend="aot_eager")
    changes = {change.what: change.peak_bytes - OVERHEAD for change in found.changes}
    with pytest.raises(graphopt.BudgetError) as error:
        graphopt.optimize(model, example, graphopt.Budget(memory=1), ["recompute"], "aot_eager")
    stated = re.search(r"Smallest feasible[^:]*: ([\d,]+)", str(error.value))
    assert stated
    assert changes["activation checkpointing (Budget(memory=...))"] <= int(stated[1].replace(",", ""))


def test_tied_weights_stay_one_and_a_plain_module_is_adapted() -> None:
    torch.manual_seed(0)
    tied = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    tied[2].weight = tied[0].weight
    example = (torch.randn(4, 64),)
    found = fit(tied, example, OVERHEAD + 1, backend="aot_eager", margin=0.0)
    changes = {change.what: change.peak_bytes for change in found.changes}
    assert found.largest_batch == 0
    half = peak(tied.bfloat16(), inputs=(example[0].bfloat16(),))
    assert changes["weights in bfloat16"] == half


def test_gpus_have_names_and_what_is_none_is_refused() -> None:
    assert gpu_bytes("H100") == GPUS["h100"] * 2**20
    assert gpu_bytes("16GiB") == 16 * 2**30
    model = nn.Linear(3, 2)
    for arguments, options in (
        ((model, (torch.ones(2, 3),), "gtx"), {}),
        ((model, (torch.ones(2, 3),), "h100"), {"optimizer": "nonsense"}),
        ((model, (torch.ones(2, 3),), "h100"), {"margin": 1.0}),
        ((model, (torch.ones(2, 3),), "h100"), {"lora": 0}),
        ((model, (torch.ones(2, 3),), "h100"), {"backend": "eager"}),
        (("bert", (torch.ones(2, 3),), "h100"), {}),
    ):
        with pytest.raises(graphopt.InputError):
            fit(*arguments, **options)  # type: ignore[arg-type]


def test_a_change_that_is_impossible_is_none() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten())  # no layer for adapters
    found = fit(model, (torch.randn(4, 3, 16, 16),), OVERHEAD, backend="aot_eager")
    assert not found.fits
    assert found.changes
    assert not any("LoRA" in change.what for change in found.changes)

"""The controller: variance under its budget, and nothing of the user's touched."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from graphopt.passes import Vcas
from graphopt.passes.vcas.controller import MOST_VARIANTS, SamplingController
from graphopt.passes.vcas.ratios import Calibration
from graphopt.passes.vcas.technique import SampleSizes
from torch import nn

import graphopt
from tests import zoo
from tests.runtime.uneven import batches
from tests.shared_captures import shared_captures


def trained(
    budget: float | None, steps: int, every: int = 4, dropout: float = 0.0, between: Any = None, **options: Any
) -> tuple[nn.Module, SamplingController | None, graphopt.OptimizedModule]:
    torch.manual_seed(0)
    model = zoo.MLP(width=32)
    if dropout:
        model.second = nn.Sequential(model.second, nn.Dropout(dropout))  # type: ignore[assignment]
    passes: list[Any] = [] if budget is None else [Vcas(every=every, alpha=0.04, beta=0.8, **options)]
    data = batches(steps)
    opt = graphopt.optimize(model, data[0], budget=graphopt.Budget(variance=budget), passes=passes, backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for batch in data:
        opt(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        if opt.controller is not None:
            opt.controller.after_step(batch)
        if between is not None:
            between(opt)
    return model, opt.controller, opt


@pytest.fixture(scope="module")
def falling() -> tuple[SamplingController, graphopt.OptimizedModule, int]:
    """72 steps, and how often it was compiled in them; the last test goes on from there."""
    with shared_captures():
        _, controller, opt = trained(0.5, 72)
    assert controller is not None
    return controller, opt, opt.report.compilations


def test_ratios_fall_and_the_measured_variance_stays_under_the_budget(falling: Any) -> None:
    controller, _, compilations = falling
    history = controller.history[:18]
    assert [a.step for a in history] == [4 * i for i in range(1, 19)]
    assert history[-1].flops_ratio < 1
    assert any(a.changed for a in history)
    assert all(a.rows_variance <= 0.375 and a.tokens_variance <= 0.125 for a in history)
    assert any(a.rows_variance > 0 for a in history)
    assert len(controller._known) <= MOST_VARIANTS
    assert compilations <= MOST_VARIANTS + 1
    for adaptation in history:
        ratios = [adaptation.rows.get(name, 1.0) for name in ("third", "second", "first")]
        assert ratios == sorted(ratios, reverse=True)


@pytest.mark.parametrize("twice", [False, True])
def test_where_nothing_fits_all_rows_are_kept_and_it_is_tried_once_more_on_the_next_batches(
    twice: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def between(opt: graphopt.OptimizedModule) -> None:
        steps = [a.step for a in opt.controller.history]
        if steps and steps[-1] == 56:
            monkeypatch.setattr(Calibration, "rows_fit", lambda *_: False)
        elif steps and steps[-1] == (62 if twice else 60):
            monkeypatch.undo()

    _, controller, _ = trained(8.0, 64, between=between)
    assert controller is not None
    assert [a.step for a in controller.history[-4:]] == [56, 60, 62, 64]
    before, failed, sooner, after = (a.flops_ratio for a in controller.history[-4:])
    assert before < 0.8
    assert failed == 1.0
    assert (sooner == 1.0) == twice
    assert after <= before + 0.05  # it goes on from there


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_the_whole_budget_can_be_for_rows_or_for_terms_alone(share: float) -> None:
    _, controller, _ = trained(0.5, 40, rows_share=share)
    assert controller is not None
    spent, other = ("rows_variance", "tokens_variance") if share else ("tokens_variance", "rows_variance")
    assert all(getattr(a, other) == 0 and getattr(a, spent) <= 0.5 for a in controller.history)
    kept, whole = ("rows", "tokens") if share else ("tokens", "rows")
    assert any(ratio < 1 for a in controller.history for ratio in getattr(a, kept).values())
    assert all(not getattr(a, whole) for a in controller.history)


def test_a_calibration_runs_on_as_many_batches_as_it_is_told() -> None:
    _, controller, _ = trained(0.2, 8, batches=3)
    assert controller is not None
    assert controller.counts.calibrating % 3 == 0
    assert controller.counts.calibrating >= 2 * (3 + 3)


def test_a_checkpoint_leaves_out_a_batch_that_it_cannot_hold_and_the_calibration_waits_for_another(tmp_path: Path) -> None:
    _, controller, opt = trained(0.5, 3)
    assert controller is not None
    controller._recent[-1] = controller._recent[-1][0], {"mode": torch.float32}
    opt.save_state(tmp_path / "state")
    opt.load_state(tmp_path / "state")
    fourth, fifth = batches(5)[3:]
    assert controller.after_step(fourth) is None
    assert controller.after_step(fifth) is not None


def test_a_checkpoint_keeps_when_the_calibration_after_one_in_vain_comes_and_the_batches_that_it_needs(tmp_path: Path) -> None:
    _, controller, opt = trained(0.5, 3, every=8)
    assert controller is not None
    controller._sooner_in = 1
    opt.save_state(tmp_path / "state")
    controller._sooner_in, controller._recent = 0, []
    opt.load_state(tmp_path / "state")
    fourth, fifth = batches(5)[3:]
    assert controller.after_step(fourth) is not None
    assert controller.after_step(fifth) is None


def test_until_the_first_calibration_training_is_exact() -> None:
    exact, _, _ = trained(None, 4)
    ours, controller, _ = trained(0.2, 4)
    assert controller is not None
    assert len(controller.history) == 1
    for a, b in zip(ours.parameters(), exact.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_calibration_changes_nothing_but_the_ratios() -> None:
    """Dropout draws the same numbers, gradients in the making and buffers stay, whatever the controller does."""
    torch.manual_seed(0)
    model = zoo.MLP(width=16)
    model.second = nn.Sequential(model.second, nn.Dropout(0.3))  # type: ignore[assignment]
    model.register_buffer("count", torch.zeros(()))
    data = batches(3)
    opt = graphopt.optimize(model, data[0], budget=graphopt.Budget(variance=0.1), passes=[Vcas(every=2)], backend="aot_eager")
    for batch in data[:2]:
        opt(*batch).backward()  # two backwards before a step: gradients accumulate
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        state, tensors = torch.get_rng_state(), copy.deepcopy(model.state_dict())
        adaptation = opt.controller.after_step(batch)  # type: ignore[union-attr]
        assert torch.equal(state, torch.get_rng_state())
        assert all(torch.equal(a, b) for a, b in zip(tensors.values(), model.state_dict().values(), strict=True))
        after = [p.grad for p in model.parameters()]
        assert all(torch.equal(a, b) for a, b in zip(gradients, after, strict=True))  # type: ignore[arg-type]
    assert adaptation is not None


def test_a_last_smaller_batch_is_exact_and_puts_the_calibration_off_until_two_are_alike() -> None:
    torch.manual_seed(0)
    model = zoo.MLP(width=16)
    data = batches(12)
    opt = graphopt.optimize(
        model, data[0], budget=graphopt.Budget(variance=0.5), passes=[Vcas(every=3, alpha=0.4, beta=0.5)], backend="aot_eager"
    )
    assert opt.controller is not None
    for i, batch in enumerate(data):
        small = zoo.rows(batch, 5) if i % 3 == 2 else batch
        opt(*small).backward()
        assert opt.last_step is not None
        if small is not batch:
            assert opt.last_step.sampled_part == 1
        opt.controller.after_step(small)
    assert [a.step for a in opt.controller.history] == [5, 8, 11]


def test_ratios_of_another_batch_size_are_carried_out_too() -> None:
    """They were in force for the first size alone where both had the same ones."""
    torch.manual_seed(0)
    model = zoo.MLP(width=16)
    data = batches(1)[0]
    opt = graphopt.optimize(model, data, budget=graphopt.Budget(variance=0.5), passes=[Vcas()], backend="aot_eager")
    assert opt.controller is not None
    sites = Vcas().applicable(opt.plan.before_sampling().rewrite(opt.graph)[0])
    ratios = tuple(sorted((site.name, 0.5) for site in sites))
    for size in (len(data[0]), 4):
        opt.decide("vcas", SampleSizes(ratios, size))
        for _ in range(2):
            opt(*zoo.rows(data, size)).backward()
        assert opt.last_step is not None
        assert opt.last_step.sampled_part < 1


def test_sets_of_ratios_that_are_compiled_are_known_at_every_length() -> None:
    """Buckets of two lengths: nothing is forgotten, and so compiled again, where a calibration meets the other one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 1))
    data = [(torch.randn(16, 4 if i // 4 % 2 else 7, 6),) for i in range(24)]
    opt = graphopt.optimize(
        model, data[0], budget=graphopt.Budget(variance=4.0), passes=[Vcas(every=4, alpha=0.1, beta=0.7)], backend="aot_eager"
    )
    assert opt.controller is not None
    met: set[Any] = set()
    for batch in data:
        opt(*batch).square().mean().backward()
        if opt.controller.after_step(batch) is not None:
            assert met <= set(opt.controller._known)
            met = set(opt.controller._known)
            assert all(cost < 1 for ratios, cost in opt.controller._known.items() if ratios)
    assert len(met) > 3


def test_savings_pay_for_calibrations() -> None:
    _, controller, _ = trained(0.2, 8)
    assert controller is not None
    calibrating = controller.counts.calibrating
    assert calibrating >= 2 * (2 + 2)  # two calibrations, each with two exact and at least two sampled passes
    assert calibrating % 2 == 0
    assert controller.flops_saved == pytest.approx(1 - (8 + calibrating) / 8, abs=0.2)
    assert controller.flops_saved < 0


def test_the_report_says_what_is_kept(falling: Any) -> None:
    controller, opt, _ = falling
    report = opt.report
    assert report.sections["vcas"]["rows"].keys() == {"third", "second", "first"}
    assert report.sections["vcas"]["tokens"].keys() == {"third.weight", "second.weight", "first.weight"}
    assert report.sections["vcas"]["flops_saved"] == controller.flops_saved
    assert "vcas: gradients unbiased" in report.approximations
    assert "rows kept" in str(report)
    assert "variance added" in str(report)


def test_the_loop_of_the_readme() -> None:
    model, inputs = zoo.make("bert", 8, layers=1)
    opt = graphopt.optimize(model, inputs, budget=graphopt.Budget(variance=0.025), backend="aot_eager")
    assert isinstance(opt.controller, SamplingController)
    assert graphopt.optimize(*zoo.make("mlp"), backend="aot_eager").controller is None
    opt(**inputs).loss.backward()
    assert opt.controller.after_step(inputs) is None


class Sparse(nn.Module):
    """Its embedding's gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6, sparse=True)
        self.layers = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 3))

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.layers(self.embed(tokens)).flatten(0, 1), labels.flatten())


def test_a_sparse_gradient_is_measured() -> None:
    torch.manual_seed(0)
    data = [(torch.randint(11, (8, 3)), torch.randint(3, (8, 3))) for _ in range(2)]
    budget = graphopt.Budget(variance=0.5)
    opt = graphopt.optimize(Sparse(), data[0], budget=budget, passes=[Vcas(every=2)], backend="aot_eager")
    for batch in data:
        opt(*batch).backward()
        adaptation = opt.controller.after_step(batch)
    assert not opt.plan.not_separable
    assert adaptation is not None
    assert adaptation.preserved < 1
    assert opt.report.notes == []


def test_small_gradients_are_measured_in_float16() -> None:
    """Without a scale all of them are 0, and there is nothing to compare with."""
    torch.manual_seed(0)
    model, data = zoo.MLP(width=16), batches(4)
    opt = graphopt.optimize(
        model,
        data[0],
        budget=graphopt.Budget(variance=0.5),
        passes=[Vcas(every=2)],
        backend="aot_eager",
        loss=lambda loss: loss.float() * 1e-9,
    )
    for batch in data:
        with torch.autocast("cpu", torch.float16):
            opt(*batch).backward()
            opt.controller.after_step(batch)  # type: ignore[union-attr]
    assert all(adaptation.compared for adaptation in opt.controller.history)  # type: ignore[union-attr]


def test_batches_of_equal_gradients_leave_the_ratios_and_what_was_measured_with_a_note(falling: Any) -> None:
    controller, opt, _ = falling
    before = opt.report
    assert before.sections["vcas"]["rows_variance"] > 0
    assert before.notes == []
    (batch,) = batches(1)
    for _ in range(4):
        opt(*batch).backward()
        adaptation = controller.after_step(batch)
    assert adaptation is not None
    assert math.isnan(adaptation.rows_variance)
    assert not adaptation.changed
    after = opt.report
    for kind in ("rows", "tokens", "rows_variance", "tokens_variance"):
        assert after.sections["vcas"][kind] == before.sections["vcas"][kind]
    assert [note for note in after.notes if "nothing to compare with" in note]
    json.dumps(after.to_dict(), allow_nan=False)
    assert "nan" not in str(after)


def test_where_no_weight_has_terms_to_leave_out_they_add_no_variance() -> None:
    class Images(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Conv2d(3, 3, 3), nn.Flatten())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x).square().mean()

    torch.manual_seed(0)
    data = [(torch.randn(8, 1, 8, 8),) for _ in range(2)]
    budget = graphopt.Budget(variance=0.5)
    opt = graphopt.optimize(Images(), data[0], budget=budget, passes=[Vcas(every=2)], backend="aot_eager")
    for batch in data:
        opt(*batch).backward()
        adaptation = opt.controller.after_step(batch)
    assert opt.report.sections["vcas"]["tokens"] == {}
    assert adaptation is not None
    assert adaptation.tokens_variance == 0
    assert opt.report.notes == []

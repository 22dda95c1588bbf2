"""What is trained and how many terms are kept, chosen together: more is trained, and no limit is exceeded."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from graphopt.passes import Lsp, Vcas
from torch import Tensor, nn

import graphopt
from graphopt.errors import PassError
from graphopt.planner.joint_ratios import Variances, candidates
from graphopt.runtime.calibration import Measurement
from graphopt.runtime.sampling import IdleController, SamplingController
from tests.messages import warnings_of
from tests.rules import MEASURED

Batch = tuple[Tensor, Tensor]


class Stack(nn.Module):
    """Residual layers over tokens, of which few weigh much."""

    def __init__(self, width: int = 64, layers: int = 12) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def data(count: int, size: int = 16, tokens: int = 8) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(count):
        weights = torch.exp(1.5 * torch.randn(size, tokens, 1, generator=generator))
        labels = torch.randint(5, (size, tokens), generator=generator)
        found.append((torch.randn(size, tokens, 64, generator=generator) * weights, labels))
    return found


class Run:
    """A model under a joint plan, or another, with its optimizer."""

    def __init__(self, seed: int = 0, flops: float = 0.6, variance: float | None = 0.6, **options: Any) -> None:
        torch.manual_seed(seed)
        self.model = Stack()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        selects, sampler = options.pop("selects", "greentrainer"), options.pop("sampler", None)
        passes = [selects, Vcas(every=4, jointly=True)] if variance is not None else [selects]
        if sampler is not None:
            passes = [selects, Vcas(every=4, jointly=True, sampler=sampler)]
        budget = graphopt.Budget(flops=flops, variance=variance, **options)
        self.opt = graphopt.optimize(self.model, data(1)[0], budget, passes, "aot_eager", optimizer=self.optimizer)

    def step(self, batch: Batch) -> float:
        """One training step; its FLOPs, as a part of a full one's."""
        self.opt(*batch).backward()
        assert self.opt.last_step is not None
        reports = self.opt.last_step.reports
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.opt.controller is not None:
            self.opt.controller.after_step(batch)
        return reports[-1].step_flops_after / reports[0].step_flops_before


def test_sampling_lets_more_be_trained_within_every_limit() -> None:
    run = Run()
    assert isinstance(run.opt.controller, SamplingController)
    exact = run.opt.selected
    parts = [run.step(batch) for batch in data(10)]
    assert max(parts) <= 0.6
    assert [a.step for a in run.opt.controller.history] == [4, 8]
    assert run.opt.controller.history[0].changed
    assert all(0 < a.tokens_variance <= 0.6 and a.rows_variance == 0 for a in run.opt.controller.history)
    importance = run.opt.plan.importance
    assert importance is not None
    assert importance.of(run.opt.selected) > 1.05 * importance.of(exact)
    assert run.opt.plan.exact_selection().train == exact
    report = run.opt.report
    assert report.sampling is not None
    assert min(report.sampling["tokens"].values()) < 1
    assert report.plan is not None
    assert report.plan.remaining["flops"]["used"] <= 0.6
    assert report.solver == "one program for FLOPs, memory and variance"


def test_until_the_first_calibration_it_is_the_selection_alone() -> None:
    ours, alone = Run(), Run(variance=None)
    for batch in data(4):
        ours.step(batch)
        alone.step(batch)
    assert ours.opt.sample_ratios
    for a, b in zip(ours.model.parameters(), alone.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_other_batches_are_computed_exactly_and_keep_to_the_flops() -> None:
    """A last smaller batch, and one of other lengths that would take more FLOPs, train what fits without sampling."""
    run = Run()
    exact = run.opt.selected
    for batch in data(5):
        run.step(batch)
    assert run.opt.selected != exact
    for batch in (data(1, size=5)[0], data(1, tokens=3)[0]):
        reference = copy.deepcopy(run.model)
        run.opt(*batch).backward()
        reference(*batch).backward()
        found = {n for n, p in run.model.named_parameters() if p.grad is not None}
        assert run.opt.last_step is not None
        reports = run.opt.last_step.reports
        assert reports[-1].step_flops_after <= 0.6 * reports[0].step_flops_before
        if len(batch[0]) == 5:
            assert found == exact
            for name, parameter in reference.named_parameters():
                if name in exact:
                    torch.testing.assert_close(run.model.get_parameter(name).grad, parameter.grad)
        run.optimizer.zero_grad()


def test_gradients_stay_unbiased_with_the_variance_that_was_foretold() -> None:
    """Independent draws add exactly the stated variance; the mean over many steps is autograd's gradient."""
    run = Run(variance=3.0, sampler="bernoulli")
    for batch in data(4):
        run.step(batch)
    plan, batch = run.opt.plan, data(5)[4]
    assert plan.ratios
    step = run.opt.measuring_step(batch, None, candidates(plan))
    exact = Measurement(step, run.opt.tensors(), None, [(batch, {})] * 2, 0).exact()
    foretold = Variances(dict.fromkeys(run.opt.selected, 1.0), exact.added).part(plan) * len(run.opt.selected)
    reference = copy.deepcopy(run.model)
    reference(*batch).backward()
    wanted = {n: p.grad for n, p in reference.named_parameters() if n in run.opt.selected}
    draws = 600
    total = {name: torch.zeros_like(g) for name, g in wanted.items() if g is not None}
    added = []
    for _ in range(draws):
        run.optimizer.zero_grad()
        run.opt(*batch).backward()
        found = {n: p.grad for n, p in run.model.named_parameters() if p.grad is not None}
        assert found.keys() == total.keys()
        added.append(sum(float((found[n] - wanted[n]).square().sum()) for n in total))
        for name in total:
            total[name] += found[name] / draws
    measured = sum(added) / draws
    assert measured == pytest.approx(foretold, rel=0.15)
    bias = sum(float((total[n] - wanted[n]).square().sum()) for n in total)
    assert bias < 3 * measured / draws


def test_stopped_and_resumed_it_goes_on_bit_equal(tmp_path: Path) -> None:
    whole, run = Run(), Run()
    for k, batch in enumerate(data(10)):
        whole.step(batch)
        run.step(batch)
        for a, b in zip(whole.model.parameters(), run.model.parameters(), strict=True):
            assert torch.equal(a, b), f"step {k}"
        run.opt.save_state(tmp_path / "state", run.optimizer)
        weights = copy.deepcopy(run.model.state_dict())
        run = Run()
        run.opt.load_state(tmp_path / "state", run.optimizer)
        run.model.load_state_dict(weights)
    assert run.opt.plan.key == whole.opt.plan.key
    assert run.opt.sample_ratios
    adapted, expected = ([a.tokens for a in r.opt.controller.history] for r in (run, whole))  # type: ignore[union-attr]
    assert adapted == expected


def test_selecting_anew_keeps_what_was_chosen_or_starts_again_without_ratios() -> None:
    run = Run(selects=MEASURED[0])
    for batch in data(4):
        run.step(batch)
    joint = run.opt.plan
    outcome = run.opt.reselect(data(4)[3], run.optimizer, tolerance=10.0)
    assert not outcome.changed
    assert run.opt.plan is joint
    x, labels = data(20)[19]
    outcome = run.opt.reselect((10 * x, labels), run.optimizer, tolerance=-10.0)
    assert outcome.changed
    assert run.opt.plan.train != joint.exact_selection().train
    assert (run.opt.plan.ratios, run.opt.plan.unsampled) == ((), None)
    assert max(run.step(batch) for batch in data(6)) <= 0.6


def test_a_variance_that_no_longer_fits_is_taken_back() -> None:
    run = Run()
    for batch in data(4):
        run.step(batch)
    assert run.opt.sample_ratios
    exact = run.opt.plan.exact_selection().train
    before = run.opt.plan.unsampled
    run.opt.controller.tolerance = 1e-9  # type: ignore[union-attr]
    for batch in data(4):
        run.step(batch)
    assert run.opt.sample_ratios == ()
    assert run.opt.selected == exact
    assert run.opt.plan.selection == before
    assert run.opt.report.solver != "one program for FLOPs, memory and variance"


def test_memory_holds_as_well() -> None:
    free = Run()
    for batch in data(5):
        free.step(batch)
    graph, size = free.opt.captured(data(1)[0])
    limit = graphopt.analyze(Stack(), data(1)[0], backend="aot_eager").memory.peak_bytes
    run = Run(memory=limit)
    for batch in data(5):
        run.step(batch)
    assert run.opt.sample_ratios
    assert run.opt.plan.memory is not None
    assert run.opt.plan.memory.peak_of(run.opt.plan.rewrite(graph, size)[0], size) <= limit
    short = Run(memory=limit)  # measured on short batches, and still within the limit on those like the example
    for batch in data(5, tokens=4):
        short.step(batch)
    assert short.opt.plan.memory is not None
    assert short.opt.plan.memory.peak_of(short.opt.plan.rewrite(graph, size)[0], size) <= limit
    tight = Run(memory=int(0.6 * limit))
    with warnings_of() as texts:
        for batch in data(5):
            tight.step(batch)
    assert tight.opt.sample_ratios == ()
    assert any("measuring the variances" in text for text in texts)


def test_a_plan_that_cannot_be_compiled_gives_way_to_the_exact_selection(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    exact = run.opt.selected
    sample = Vcas.apply

    def failing(self: Any, graph: Any, decisions: Any) -> Any:
        if decisions and graph.out_spec is None:  # not where it is only planned
            raise RuntimeError("no room")
        return sample(self, graph, decisions)

    monkeypatch.setattr(Vcas, "apply", failing)
    with warnings_of() as texts:
        parts = [run.step(batch) for batch in data(7)]
    assert max(parts) <= 0.6
    assert any("no room" in text for text in texts)
    assert run.opt.selected == exact
    assert run.opt.sample_ratios == ()


def test_where_everything_fits_nothing_is_measured() -> None:
    run = Run(flops=1.0)
    assert isinstance(run.opt.controller, IdleController)
    assert [run.step(batch) for batch in data(5)] == [1.0] * 5
    assert run.opt.report.plan is not None
    assert "everything is trained" in run.opt.report.plan.not_needed["vcas"]


def test_what_is_frozen_meanwhile_is_left_out() -> None:
    run = Run()
    frozen = [name for name in run.opt.selected if name.endswith("weight")][:2]
    for i, batch in enumerate(data(9)):
        if i == 1:
            for name in frozen:
                run.model.get_parameter(name).requires_grad_(False)
        run.step(batch)
    assert len(run.opt.controller.history) == 2  # type: ignore[union-attr]
    assert not run.opt.report.notes
    assert all(run.model.get_parameter(name).grad is None for name in frozen)


def test_where_all_of_the_exact_selection_is_frozen_something_else_is_trained() -> None:
    run = Run()
    for batch in data(4):
        run.step(batch)
    joint = run.opt.selected
    exact = run.opt.plan.exact_selection().train
    assert exact is not None
    assert joint - exact
    for name in exact:
        run.model.get_parameter(name).requires_grad_(False)
    run.step(data(1, size=5)[0])  # cannot be sampled
    run.opt.controller.tolerance = 1e-9  # type: ignore[union-attr]
    for batch in data(8):
        run.step(batch)
        assert any(p.requires_grad and name in run.opt.selected for name, p in run.model.named_parameters())
    assert run.opt.sample_ratios == ()
    assert run.opt.model_runs == 0


class Positions(nn.Module):
    """What a token's gradient is follows from its position alone, but for a sign per batch: tokens are as alike as can be."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))
        self.head = nn.Linear(64, 8).requires_grad_(False)
        self.register_buffer("positions", torch.randn(8, 64, generator=generator))

    def forward(self, x: Tensor, sign: Tensor) -> Tensor:
        hidden = nn.functional.layer_norm(0.01 * x + self.positions, (64,))
        for layer in self.layers:
            hidden = hidden + 0.1 * torch.tanh(layer(hidden))
        return (self.head(hidden).diagonal(dim1=1, dim2=2) * sign[:, None]).mean()


def test_the_variance_is_kept_where_tokens_repeat_from_sample_to_sample() -> None:
    torch.manual_seed(0)
    model = Positions()
    generator = torch.Generator().manual_seed(1)

    def batch(sign: float) -> Batch:
        return torch.randn(16, 8, 64, generator=generator), torch.full((16,), sign)

    passes = ["greentrainer", Vcas(every=2, jointly=True)]
    opt = graphopt.optimize(model, batch(1.0), graphopt.Budget(flops=0.6, variance=0.6), passes, "aot_eager")
    for sign in (1.0, -1.0):
        opt(*batch(sign)).backward()
        model.zero_grad()
        opt.controller.after_step(batch(sign))  # type: ignore[union-attr]
    assert opt.sample_ratios
    names = [name.split(": ")[1] for name, _ in opt.sample_ratios]
    gradients = {sign: exact_gradients(model, batch(sign), names) for sign in (1.0, -1.0)}
    own = sum(float((gradients[1.0][n] - gradients[-1.0][n]).square().sum()) / 2 for n in names)
    fixed = batch(1.0)
    exact = exact_gradients(model, fixed, names)
    added = []
    for _ in range(300):
        model.zero_grad()
        opt(*fixed).backward()
        added.append(sum(float((model.get_parameter(n).grad - exact[n]).square().sum()) for n in names))  # type: ignore[operator]
    assert sum(added) / len(added) <= 0.6 * own


def exact_gradients(model: nn.Module, batch: Batch, names: list[str]) -> dict[str, Tensor]:
    reference = copy.deepcopy(model)
    reference.zero_grad()
    reference(*batch).backward()
    return {name: reference.get_parameter(name).grad for name in names}  # type: ignore[misc]


class Fixed(Stack):
    """A batch size that the code fixes."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return super().forward(x.reshape(16, -1, 64), labels)


def test_a_batch_that_the_code_fixes_is_not_sampled() -> None:
    torch.manual_seed(0)
    model = Fixed()
    passes = ["greentrainer", Vcas(every=2, jointly=True)]
    opt = graphopt.optimize(model, data(1)[0], graphopt.Budget(flops=0.6, variance=0.6), passes, "aot_eager")
    for batch in data(5):
        opt(*batch).backward()
        opt.controller.after_step(batch)  # type: ignore[union-attr]
    assert opt.sample_ratios == ()


def test_beside_reordered_adapters_the_flops_hold() -> None:
    """Adapters have few FLOPs to leave out; whatever is chosen, a step stays within the limit."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    names = [f"layers.{i}" for i in range(12)]
    model = get_peft_model(Stack(), LoraConfig(r=16, target_modules=names, modules_to_save=["head"]))  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    passes = ["greentrainer", "runlora", Vcas(every=2, jointly=True)]
    budget = graphopt.Budget(flops=0.75, variance=3.0)
    opt = graphopt.optimize(model, data(1)[0], budget, passes, "aot_eager", optimizer=optimizer)
    for batch in data(6):
        opt(*batch).backward()
        reports = opt.last_step.reports
        assert reports[-1].step_flops_after <= 0.75 * reports[0].step_flops_before
        optimizer.step()
        optimizer.zero_grad()
        opt.controller.after_step(batch)
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert not opt.report.notes


def test_what_cannot_be_chosen_jointly_is_refused() -> None:
    both = graphopt.Budget(flops=0.6, variance=0.1)
    cases: list[tuple[graphopt.Budget, list[Any], str]] = [
        (graphopt.Budget(variance=0.1), ["greentrainer", Vcas(jointly=True)], "flops"),
        (graphopt.Budget(variance=0.1), [Vcas(jointly=True)], r"Budget\(flops"),
        (both, ["greentrainer", Vcas(jointly=True), Lsp(subspace=4, nonzeros=2)], "compressed"),
        (both, ["greentrainer", graphopt.passes.GreenTrainer(train=("head.weight",)), Vcas(jointly=True)], "more than once"),
        (both, [graphopt.passes.GreenTrainer(train=("head.weight",)), Vcas(jointly=True)], "without names"),
    ]
    for budget, passes, message in cases:
        with pytest.raises(graphopt.GraphoptError, match=message):
            graphopt.optimize(Stack(), data(1)[0], budget, passes, "aot_eager")
    with pytest.raises(PassError, match="leave out keep_rows"):
        Vcas(keep_tokens=0.5, jointly=True)

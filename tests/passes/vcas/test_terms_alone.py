"""Where samples are not independent, rows stay, and terms of weights' gradients may still be left out."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from graphopt.passes import GreenTrainer, Vcas, run_pass
from graphopt.passes.vcas import TOKENS
from graphopt.passes.vcas.technique import terms_alone
from torch import Tensor, nn

import graphopt
from graphopt import PassError
from graphopt.capture import capture
from tests.draws import eager_gradients, expectation


class Normed(nn.Module):
    """Layers with batch normalisation between them."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, width), nn.BatchNorm1d(width)
        self.second, self.head = nn.Linear(width, width), nn.Linear(width, 3)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.first(x)))
        return nn.functional.cross_entropy(self.head(torch.tanh(self.second(hidden))), labels)


def batch(size: int = 8, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 4, dtype=dtype), torch.randint(3, (size,))


def optimized(model: nn.Module, inputs: Any, *passes: Any, **options: Any) -> graphopt.OptimizedModule:
    return graphopt.optimize(model, inputs, passes=list(passes), backend="aot_eager", **options)


def test_terms_of_every_weight_are_unbiased_over_all_draws() -> None:
    torch.manual_seed(0)
    model, inputs = Normed().double(), batch()
    graph = capture(model, inputs)
    sites = terms_alone(graph)
    assert sites == [TOKENS + f"{name}.weight" for name in ("head", "second", "first")]
    exact = eager_gradients(model, inputs)
    for site in sites:
        rewritten, report = run_pass(Vcas(), graph, {site: 0.5})
        assert report.changes.changed == (site,)
        for name, mean in expectation(rewritten, model, inputs).items():
            torch.testing.assert_close(mean, exact[name], rtol=1e-9, atol=1e-12)


def test_a_step_leaves_out_terms_and_no_rows() -> None:
    torch.manual_seed(0)
    model, inputs = Normed().double(), batch()
    reference = copy.deepcopy(model)
    opt = optimized(model, inputs, Vcas(keep_tokens=0.5))
    opt(*inputs).backward()
    reference(*inputs).backward()
    assert opt.last_step is not None
    assert opt.last_step.sampled_part < 0.9
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        sampled = name.endswith("weight") and ours.dim() > 1
        assert torch.allclose(ours.grad, theirs.grad) != sampled, name  # type: ignore[arg-type]
    section = opt.report.sections["vcas"]
    assert not section["rows"]
    assert set(section["tokens"].values()) == {0.5}
    (note,) = [n for n in opt.report.notes if "not sampled" in n]
    assert note.startswith("rows of the backward are not sampled: aten.native_batch_norm_backward.default")


def test_rows_are_refused_with_what_can_be_done_instead() -> None:
    with pytest.raises(PassError, match=r"batch_norm.*or keep_rows: terms of weights' gradients \(keep_tokens\) can be"):
        optimized(Normed(), batch(dtype=torch.float32), Vcas(keep_rows=0.5, keep_tokens=0.5))
    opt = optimized(Normed(), batch(dtype=torch.float32), Vcas(keep_rows=1.0, keep_tokens=0.5))
    assert opt.report.flops_ratio < 1


def test_terms_of_weights_that_are_not_trained_are_no_sites() -> None:
    inputs = batch(dtype=torch.float32)
    opt = optimized(Normed(), inputs, GreenTrainer(train=("head.weight",)), Vcas(keep_tokens=0.5))
    opt(*inputs).backward()
    assert set(opt.report.sections["vcas"]["tokens"]) == {"head.weight"}


def test_a_controller_has_the_whole_budget_for_terms_and_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, data = Normed(16), [batch(16, torch.float32) for _ in range(40)]

    def prepared(model: nn.Module) -> tuple[graphopt.OptimizedModule, torch.optim.Optimizer]:
        opt = optimized(model, data[0], Vcas(every=4, beta=0.8), budget=graphopt.Budget(variance=0.5))
        return opt, torch.optim.SGD(model.parameters(), lr=0.05)

    opt, optimizer = prepared(model)
    for i, inputs in enumerate(data):
        if i == 30:
            opt.save_state(tmp_path / "state")
            resumed, other = prepared(copy.deepcopy(model))
            resumed.load_state(tmp_path / "state")
        for run, rule in [(opt, optimizer)] + ([(resumed, other)] if i >= 30 else []):
            run(*inputs).backward()
            rule.step()
            rule.zero_grad()
            run.controller.after_step(inputs)
    history = opt.controller.history
    assert min(a.flops_ratio for a in history) < 0.95
    assert not any(a.rows or a.rows_variance for a in history)
    assert all(a.tokens_variance <= 0.5 for a in history)
    assert max(a.tokens_variance for a in history) > 0.125  # that is all that terms have beside rows
    assert resumed.controller.ratios == opt.controller.ratios
    for ours, theirs in zip(resumed.parameters(), opt.parameters(), strict=True):
        assert torch.equal(ours, theirs)


class _Product(torch.autograd.Function):
    """`x @ weight`, and the weight's gradient changed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.change = change
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return gradient @ weight.T, ctx.change(x.T @ gradient), None


class Squared(nn.Module):
    """A weight whose gradient is not linear in a product."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.weight = nn.Linear(4, 4), nn.Parameter(torch.randn(4, 3))

    def change(self, product: Tensor) -> Tensor:
        return product + product * product

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(_Product.apply(self.first(x).softmax(0), self.weight, self.change), labels)


def test_a_product_that_is_squared_keeps_its_terms() -> None:
    model, inputs = Squared(), batch(dtype=torch.float32)
    assert terms_alone(capture(model, inputs)) == [TOKENS + "first.weight"]


class Checked(Normed):
    """Runs an operator with an effect in its backward's order: a check that raises."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        factor = torch.linalg.cholesky(hidden.T @ hidden + torch.eye(hidden.shape[1]))
        return nn.functional.cross_entropy(self.head(self.second(hidden)), labels) + 0.1 * factor.diagonal().log().sum()


class Halves(Normed):
    """Compares two halves of a batch, so that sizes are half of it."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        hidden = self.head(self.second(self.norm(self.first(x))))
        half = len(hidden) // 2
        return (hidden[:half] - hidden[half:]).square().mean()


@pytest.mark.parametrize(("kind", "sampler", "variance"), [(Checked, Vcas(keep_tokens=0.5), None), (Halves, Vcas(every=2), 0.5)])
def test_graphs_that_must_stay_as_they_are_do(kind: type[Normed], sampler: Vcas, variance: float | None) -> None:
    torch.manual_seed(0)
    model, inputs = kind(), batch(dtype=torch.float32)
    reference = copy.deepcopy(model)
    opt = optimized(model, inputs, sampler, budget=graphopt.Budget(variance=variance))
    for _ in range(4):
        opt(*inputs).backward()
        assert opt.controller is None or opt.controller.after_step(inputs) is None
    reference(*inputs).backward()
    assert not any("rewritten" in note or "failed" in note for note in opt.report.notes)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(None if ours.grad is None else ours.grad / 4, theirs.grad)


def test_nothing_is_left_out_where_the_whole_budget_is_for_rows() -> None:
    model, inputs = Normed(16), batch(16, torch.float32)
    opt = optimized(model, inputs, Vcas(every=2, rows_share=1.0), budget=graphopt.Budget(variance=0.5))
    for _ in range(4):
        opt(*inputs).backward()
        assert opt.controller.after_step(inputs) is None


class Rounded(Squared):
    """A weight whose gradient is rounded to whole numbers."""

    def change(self, product: Tensor) -> Tensor:
        return (40 * product).to(torch.int8).to(product.dtype) / 40


class Scaled(Squared):
    """A weight that is scaled before its product, whose variance is then not that of the gradient."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.first(x).softmax(0) @ (30 * self.weight), labels)


@pytest.mark.parametrize("kind", [Rounded, Scaled])
def test_a_product_that_is_rounded_or_scaled_keeps_its_terms(kind: type[Squared]) -> None:
    assert terms_alone(capture(kind(), batch(dtype=torch.float32))) == [TOKENS + "first.weight"]


class Convolutions(nn.Module):
    """A network whose one linear layer takes few of its FLOPs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.second, self.head = nn.Conv2d(16, 16, 3, padding=1), nn.Linear(16, 3)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        hidden = torch.relu(self.second(torch.relu(self.norm(self.first(x)))))
        return nn.functional.cross_entropy(self.head(hidden.mean((2, 3))), labels)


def test_terms_that_are_hardly_any_flops_are_not_calibrated() -> None:
    model, inputs = Convolutions(), (torch.randn(4, 1, 8, 8), torch.randint(3, (4,)))
    opt = optimized(model, inputs, Vcas(every=2), budget=graphopt.Budget(variance=0.5))
    for _ in range(4):
        opt(*inputs).backward()
        assert opt.controller.after_step(inputs) is None
    assert opt.controller.flops_saved == 0


class Paired(nn.Module):
    """Every product of the backward sums over samples of which each has met all others, and no weight has a product alone."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        hidden = (x * self.scale).softmax(0)
        return (hidden @ hidden.T).square().mean()


def test_without_products_nothing_is_calibrated() -> None:
    model, inputs = Paired(), batch(dtype=torch.float32)
    opt = optimized(model, inputs, Vcas(every=2), budget=graphopt.Budget(variance=0.5))
    for _ in range(4):
        opt(*inputs).backward()
        assert opt.controller.after_step(inputs) is None
    assert opt.controller.flops_saved == 0
    assert any(note.startswith("the backward is not sampled") for note in opt.report.notes)
